"""How much memory a machine has, and processes and tensors take."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# The limit of a container, under versions 2 and 1 of control groups; a number, or `max`.
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def tensor_bytes(tensors: "Iterable[Tensor]") -> int:
    """Bytes of some tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors)


def machine_bytes() -> int | None:
    """Memory of this machine, or of the container this process runs in; None if the system does not tell."""
    total = _field(Path("/proc/meminfo"), "MemTotal")
    if total is None:
        return None
    for path in CONTAINER_LIMITS:
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total


def process_bytes(field: str = "VmRSS", pid: int | str = "self") -> int:
    """Memory of a process as Linux accounts for it; 0 if the system does not tell, or the process has ended.

    Args:
        field: of /proc/PID/status: `VmRSS`, resident now; `VmHWM`, the most so far; `RssAnon`, that is no file's.
        pid: the process; this one by default.
    """
    return _field(Path(f"/proc/{pid}/status"), field) or 0


def _field(path: Path, name: str) -> int | None:
    """A number of kB in a file of lines "name: number kB", in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
