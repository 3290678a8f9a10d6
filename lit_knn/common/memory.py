"""Measure the memory of the machine and of processes, and copy tensors to a GPU without waiting."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Files with the memory limit of a container, for control groups of version 2 and 1. A file has a number or `max`.
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# PyTorch raises a plain RuntimeError if the machine's memory is short. These are texts of its allocators.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Storage size calculation overflowed",
)
# Maximum bytes of one work array on a CPU. Larger arrays get new memory at each use, and writing to new pages costs
# more than the products. On a GPU, PyTorch keeps freed memory, and long kernels are fastest.
WORK_BYTES = 16 * 2**20
GPU_FACTOR = 32


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation, on the machine or on a device."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def to_device(values: "Tensor", device: "torch.device") -> "Tensor":
    """Copy a CPU tensor to `device`. A copy to a GPU is queued, so the program does not wait for the GPU."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    # Only copies from pinned memory are queued.
    return values.pin_memory().to(device, non_blocking=True)


def work_bytes(device: "torch.device") -> int:
    """Return the maximum bytes of one work array on `device`."""
    return WORK_BYTES if device.type == "cpu" else WORK_BYTES * GPU_FACTOR


def machine_bytes() -> int | None:
    """Return the bytes of memory of this machine, or of this process's container. Returns None if unknown."""
    total = _field(Path("/proc/meminfo"), "MemTotal")
    if total is None:
        return None
    for path in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):
            total = min(total, int(Path(path).read_text()))
    return total


def available_bytes() -> int | None:
    """Return the bytes of memory that no process of this machine uses. Returns None if unknown."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def process_bytes(field: str = "VmRSS") -> int:
    """Return the resident (`VmRSS`) or the peak memory (`VmHWM`) of this process in bytes; 0 if unknown."""
    return _field(Path("/proc/self/status"), field) or 0


def _field(path: Path, name: str) -> int | None:
    """Return the bytes of the line "name: number kB" in a file; None if there is no such file or line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None
