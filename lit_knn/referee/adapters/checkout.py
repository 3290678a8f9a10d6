"""Imports modules of another project from a checkout that the user names, and leaves no trace in this process."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lit_knn.common.errors import InputError


class Origin(NamedTuple):
    """The version of another project that an adapter was written for."""

    repository: str  # address to clone
    commit: str
    folder: str = "."  # folder of the checkout that its modules are imported from


def checked(path: str, origin: Origin) -> Path:
    """Return the folder that modules are imported from; refuse a missing checkout, another commit and changed files."""
    folder, found = Path(path).expanduser().resolve(), "no folder"
    if folder.is_dir():
        git = ["git", "--no-optional-locks", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
        done = subprocess.run([*git, "--exclude", "*"], capture_output=True, text=True)
        found = done.stdout.strip() or f"no checkout ({' '.join(done.stderr.split())})"
    if found != origin.commit:
        expected = f"expected a checkout of {origin.repository} at commit {origin.commit[:12]}"
        raise InputError(f"checkout={path} is {found}; {expected}")
    return folder / origin.folder


@contextmanager
def importing(root: Path, stand_ins: Mapping[str, ModuleType]) -> Iterator[None]:
    """Import modules below the folder `root` inside the block, also those that its own functions import.

    `stand_ins` replace installed packages, by name. Afterwards `sys.path` and `sys.modules` are as before, so several
    checkouts with modules of the same name can be used.
    """
    scoped = {path.stem for path in root.iterdir() if path.is_dir() or path.suffix == ".py"}
    scoped |= {name.partition(".")[0] for name in stand_ins}
    before, path = _take_out(scoped), sys.path[:]
    sys.path.insert(0, str(root))
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        _take_out(scoped)
        sys.modules.update(before)
        sys.path[:] = path


def stand_in(name: str, **members: Any) -> ModuleType:
    """Make a module that replaces an installed one."""
    module = ModuleType(name)
    # Libraries ask for the spec to learn whether a package is installed.
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    return module


def _take_out(names: set[str]) -> dict[str, ModuleType]:
    """Remove the modules below some top-level names from `sys.modules`, and return them."""
    found = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    for name in found:
        del sys.modules[name]
    return found
