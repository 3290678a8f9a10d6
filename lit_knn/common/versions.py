"""Records what can change a result besides the settings: package versions, Git revision, processor."""

import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
CHECKOUT = Path(__file__).parents[2]
# The packages whose versions can change the numbers of a run.
PACKAGES = [
    "lit-knn",
    "torch",
    "torchvision",
    "pytorch-lightning",
    "numpy",
    "faiss-gpu",
    "faiss-cpu",
    "torchmetrics",
]
PACKAGES += ["torch-fidelity", "jsonargparse"]


def package_versions() -> dict[str, str]:
    """Return the version of each installed package of `PACKAGES`."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def revision(checkout: Path = CHECKOUT) -> str | None:
    """Return the Git revision of a checkout, with `-dirty` if files were changed; None without Git."""
    # A folder of packages may lie inside a checkout of something else.
    if not (checkout / ".git").exists():
        return None
    command = [
        "git",
        "-C",
        str(checkout),
        "describe",
        "--always",
        "--dirty",
        "--exclude",
        "*",
        "--abbrev=12",
    ]
    try:
        return (
            subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            or None
        )
    except (OSError, subprocess.SubprocessError):
        return None


def processor_name() -> str:
    """Return the processor's name, family and model, or its architecture if the system does not name it."""
    lines = CPU_INFO.read_text(errors="replace").splitlines() if CPU_INFO.exists() else []
    found = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in reversed(lines))
    }
    # A virtual machine may name a brand alone, such as AMD EPYC, whose generations differ twofold in speed.
    parts = (("model name", ""), ("cpu family", "family "), ("model", "model "))
    return (
        " ".join(f"{label}{found[name]}" for name, label in parts if name in found)
        or platform.machine()
    )
