"""Keeps built indexes on disk. Each file is complete or absent, and is used only for its own data and settings.

Each `.index` file has a `.json` file beside it, with its description and checksum. The `.json` is written last, so
that an `.index` without one is incomplete.
"""

import hashlib
import json
import os
import re
import warnings
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from lit_knn.atomic_files import locked, remove_partial, written_whole
from lit_knn.distributed import once_per_machine
from lit_knn.errors import InputError, first_line
from lit_knn.index.base import Vectors

# Bytes of a block that stays in the processor's cache between reading and summing.
CHECK_BYTES = 2**20

Settings = dict[str, Any]


class IndexCache:
    """A folder of built indexes.

    Args:
        folder: is created if missing; a leading ~ is the user's home.
        write: writes an index to a binary file.
        read: reads or maps the index in a file; raises RuntimeError if the file holds none.

    Raises:
        InputError: an empty folder name, which would mean the working directory.
    """

    def __init__(self, folder: str, write: Callable[[Any, BinaryIO], None], read: Callable[[Path], Any]) -> None:
        if not folder:
            raise InputError("cache_dir is empty: name a folder, or give null for no cache")
        self.folder = Path(folder).expanduser()
        self._write = write
        self._read = read

    def _check_folder(self) -> None:
        """Refuse a folder that cannot be created or written to."""
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise InputError(f"cache_dir={self.folder} is no folder and cannot be made: {there} is a file")
        if not os.access(there, os.W_OK | os.X_OK):
            raise InputError(f"cache_dir={self.folder} cannot be written to")

    def get(self, vectors: Vectors, settings: Settings, versions: Settings, build: Callable[[Vectors], Any]) -> Any:
        """Return the index from the folder. If the folder has no complete and matching index, build and keep one.

        Args:
            vectors: the data; one process of each machine asks for their fingerprint. If all processes of a
                distributed run share the vectors, each of them must call this: one of each machine builds, the others
                map its file.
            settings: everything else that the index depends on, with its `factory`. Settings and data determine the
                file name.
            versions: versions of the programs that write the file; a file of other versions is built anew.
            build: builds the index.

        Raises:
            InputError: the folder cannot be written to, or another process failed.
        """
        index: Any = None

        def lead() -> Path | None:
            nonlocal index
            # The check is inside `lead`, so that its error stops the other processes, too.
            self._check_folder()
            label = {**settings, "data": vectors.fingerprint()}
            path = self.folder / file_name(label)
            index, kept = self._get(path, {**label, **versions}, lambda: build(vectors))
            return path if kept else None

        def follow(path: Path | None) -> None:
            nonlocal index
            index = build(vectors) if path is None else self._read(path)

        if vectors.shared:
            once_per_machine(lead, follow)
        else:
            lead()
        return index

    def _get(self, path: Path, label: Settings, build: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the index, and whether it is in the file."""
        # The lock also stops other runs. A second run waits, and then finds the index of the first run.
        with ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(path))
            except OSError as error:
                return self._going_on_without(build(), path, error), False
            try:
                verify(path, label)
                return self._read(path), True
            except FileNotFoundError:
                pass
            except (ValueError, RuntimeError, OSError) as error:
                warnings.warn(f"index cache: {path} {first_line(error)}; building the index anew", stacklevel=2)
            index = build()
            try:
                for written in (path, path.with_suffix(".json")):
                    remove_partial(written)
                self._store(index, path, label)
                return self._read(path), True
            except (OSError, RuntimeError) as error:
                return self._going_on_without(index, path, error), False

    def _going_on_without(self, index: Any, path: Path, error: Exception) -> Any:
        warnings.warn(f"index cache: {path} cannot be written: {first_line(error)}; going on without", stacklevel=3)
        return index

    def _store(self, index: Any, path: Path, label: Settings) -> None:
        with written_whole(path) as partial:
            with partial.open("wb") as file:
                self._write(index, file)
            crc32 = _crc32(partial)
        with written_whole(path.with_suffix(".json")) as partial:
            partial.write_text(json.dumps({**label, "crc32": crc32}) + "\n")


def file_name(label: Settings) -> str:
    """Return the file name for these settings and data. The name shows the factory string."""
    digest = hashlib.sha256(json.dumps(label, sort_keys=True).encode()).hexdigest()[:16]
    return f"{re.sub('[^A-Za-z0-9]+', '-', str(label['factory']))}-{digest}.index"


def verify(path: Path, label: Settings) -> None:
    """Read the whole file and check that it matches `label`.

    Raises:
        FileNotFoundError: the file or its description is missing.
        ValueError: the difference, as the predicate of a sentence.
    """
    try:
        about = dict(json.loads(path.with_suffix(".json").read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError("has a damaged .json") from error
    for name, value in label.items():
        if about.get(name) != value:
            raise ValueError(f"is of another index: {name} is {about.get(name)}, not {value}")
    if about.get("crc32") != _crc32(path):
        raise ValueError("is damaged: its checksum is wrong")


def _crc32(path: Path) -> int:
    crc32, block = 0, memoryview(bytearray(CHECK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            crc32 = zlib.crc32(block[:count], crc32)
    return crc32
