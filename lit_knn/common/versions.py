"""Records what can change a result besides the settings: package versions, Git revision, processor."""

import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
CHECKOUT = Path(__file__).parents[2]
# The packages whose versions can change the numbers of a run.
PACKAGES = (
    "lit-knn",
    "torch",
    "torchvision",
    "pytorch-lightning",
    "numpy",
    "faiss-gpu",
    "faiss-cpu",
    "torchmetrics",
    "torch-fidelity",
    "jsonargparse",
)


def package_versions() -> dict[str, str]:
    """Return the version of each installed package of `PACKAGES`."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def revision(checkout: Path = CHECKOUT) -> str | None:
    """Return the Git revision of a checkout, with `-dirty` if files were changed; None without Git."""
    # A folder of packages may lie inside a checkout of something else.
    if not (checkout / ".git").exists():
        return None
    # `--exclude *` leaves tags out, so that the answer is the hash of the commit.
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
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def processor_name() -> str:
    """Return the processor's name, family and model, or its architecture if the system does not name it."""
    if not CPU_INFO.exists():
        return platform.machine()

    facts: dict[str, str] = {}
    for line in CPU_INFO.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())  # The file names the first processor first.

    # On a virtual machine the name may be a brand alone, such as AMD EPYC, whose generations differ twofold in speed.
    # So the family and the model are added.
    words = []
    for name, label in (("model name", ""), ("cpu family", "family "), ("model", "model ")):
        if name in facts:
            words.append(f"{label}{facts[name]}")
    return " ".join(words) or platform.machine()
