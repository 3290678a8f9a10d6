"""Reads modules of another project from a checkout that the user names, and leaves no trace in this process."""

import hashlib
import importlib
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
        files: SHA-256 of the text of each file that computes, by its path in the checkout; line ends do not count.
        folder: folder of the checkout that its modules are imported from.
    """

    repository: str
    commit: str
    files: Mapping[str, str]
    folder: str = "."


class Checkout:
    """A checkout of another project. It is read, never written.

    Args:
        owner: name for messages.
        path: folder of the checkout.
        origin: the version that is expected there.

    Raises:
        InputError: the folder or a file is missing, or a file is not the one of the expected commit.
    """

    def __init__(self, owner: str, path: str, origin: Origin) -> None:
        self.owner, self.origin = owner, origin
        self.path = Path(path).expanduser().resolve()
        expected = f"expected a checkout of {origin.repository} at commit {origin.commit[:12]}"
        if not self.path.is_dir():
            raise InputError(f"{owner}: checkout={path} is no folder; {expected}")
        for name, digest in origin.files.items():
            file = self.path / name
            if not file.is_file():
                raise InputError(f"{owner}: {file} is missing; {expected}")
            if (found := text_sha256(file)) != digest:
                what = f"has SHA-256 {found[:12]}, not {digest[:12]}"
                raise InputError(f"{owner}: {file} {what}; {expected}")

    @contextmanager
    def importing(self, stand_ins: Mapping[str, ModuleType] | None = None) -> Iterator[Load]:
        """Import modules of the checkout inside the block, also those that its own functions import.

        After the block `sys.path` and `sys.modules` are as before, except for installed packages that were loaded. The
        modules live on through what refers to them, so several checkouts with modules of the same name can be used.

        Args:
            stand_ins: modules that replace installed packages inside the block, by name.
        """
        root = self.path / self.origin.folder
        own = {path.stem for path in root.iterdir() if path.is_dir() or path.suffix == ".py"}
        scoped = own | {name.partition(".")[0] for name in stand_ins or {}}
        with _lock:
            before = _take_out(scoped)
            path, bytecode, finders = sys.path[:], sys.dont_write_bytecode, set(sys.path_importer_cache)
            sys.path.insert(0, str(root))
            sys.modules.update(stand_ins or {})
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


def text_sha256(file: Path) -> str:
    """Hash a text file. Git may have written its lines with other ends."""
    return hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def _take_out(names: set[str]) -> dict[str, ModuleType]:
    """Remove the modules below some top-level names from `sys.modules`, and return them."""
    found = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    for name in found:
        del sys.modules[name]
    return found
