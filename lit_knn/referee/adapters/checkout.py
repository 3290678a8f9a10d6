"""Reads modules of another project from a checkout that the user names, and leaves no trace in this process."""

import importlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from lit_knn.common.errors import InputError, first_line

Load = Callable[[str], ModuleType]
"""Imports a module of the checkout by its name there."""

_lock = threading.RLock()


class Origin(NamedTuple):
    """The version of another project that an adapter was written for.

    Attributes:
        repository: address to clone.
        commit: hash of the commit.
        folder: folder of the checkout that its modules are imported from.
    """

    repository: str
    commit: str
    folder: str = "."


class Checkout:
    """A checkout of another project. It is read, never written.

    Args:
        owner: name for messages.
        path: folder of the checkout.
        origin: the version that is expected there.

    Raises:
        InputError: the folder is missing, is at another commit, or has changed files.
    """

    def __init__(self, owner: str, path: str, origin: Origin) -> None:
        self.owner, self.origin = owner, origin
        self.path = Path(path).expanduser().resolve()
        found = commit_of(self.path)
        if found != origin.commit:
            expected = f"expected a checkout of {origin.repository} at commit {origin.commit[:12]}"
            raise InputError(f"{owner}: checkout={path} is {found}; {expected}")

    @contextmanager
    def importing(self, stand_ins: Mapping[str, ModuleType]) -> Iterator[Load]:
        """Import modules of the checkout inside the block, also those that its own functions import.

        After the block `sys.path` and `sys.modules` are as before, except for installed packages that were loaded. The
        modules live on through what refers to them, so several checkouts with modules of the same name can be used.

        Args:
            stand_ins: modules that replace installed packages inside the block, by name.
        """
        root = self.path / self.origin.folder
        own = {path.stem for path in root.iterdir() if path.is_dir() or path.suffix == ".py"}
        scoped = own | {name.partition(".")[0] for name in stand_ins}
        with _lock:
            before = _take_out(scoped)
            path, bytecode, finders = sys.path[:], sys.dont_write_bytecode, set(sys.path_importer_cache)
            sys.path.insert(0, str(root))
            sys.modules.update(stand_ins)
            sys.dont_write_bytecode = True
            importlib.invalidate_caches()
            try:
                yield lambda name: self._load(name, own)
            finally:
                _take_out(scoped)
                sys.modules.update(before)
                sys.path[:] = path
                sys.dont_write_bytecode = bytecode
                for entry in set(sys.path_importer_cache) - finders:
                    if Path(entry).is_relative_to(self.path):
                        del sys.path_importer_cache[entry]

    def _load(self, name: str, own: set[str]) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or str(error)
            if missing.partition(".")[0] in own:
                raise InputError(f"{self.owner}: {self.path} has no module {missing}: it is not complete") from error
            package = f"the package {missing}, which is not installed"
            raise InputError(f"{self.owner}: {name} in {self.path} needs {package}") from error
        except Exception as error:
            told = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"{self.owner}: {name} in {self.path} cannot be imported: {told}") from error


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, with "-dirty" if files were changed; or in words why Git does not know it."""
    if not folder.is_dir():
        return "no folder"
    git = ["git", "--no-optional-locks", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run([*git, "--exclude", "*"], capture_output=True, text=True)
    return done.stdout.strip() or f"no checkout ({' '.join(done.stderr.split())})"


def _take_out(names: set[str]) -> dict[str, ModuleType]:
    """Remove the modules below some top-level names from `sys.modules`, and return them."""
    found = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    for name in found:
        del sys.modules[name]
    return found
