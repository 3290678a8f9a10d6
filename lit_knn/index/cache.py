"""Keeps built FAISS indexes on disk. Each file is complete or absent. A file's name is a hash of all its inputs."""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from lit_knn.common.distributed import once_per_machine
from lit_knn.common.errors import InputError, first_line
from lit_knn.common.files import locked, remove_partial, written_whole
from lit_knn.index.base import Vectors
from lit_knn.index.faiss_library import Searcher, read_index, write_index

Label = Mapping[str, str | bool]
"""Everything besides the vectors that determines an index, including `factory`. The file's name is a hash of it."""


class IndexCache:
    """A folder of built indexes, made if missing.

    Args:
        folder: the folder; a leading ~ means the user's home.
    """

    def __init__(self, folder: str) -> None:
        if not folder:  # An empty path would mean the working directory.
            raise InputError("cache_dir is empty: name a folder, or give null for no cache")
        self.folder = Path(folder).expanduser()

    def get(self, vectors: Vectors, label: Label, build: Callable[[Vectors], Searcher]) -> Searcher:
        """Return the index from the folder. If the folder does not have it, build it and write it there.

        If all processes of a distributed run share the vectors, each process must call this. One process of each
        machine computes the fingerprint and builds; the others map the file.

        Args:
            vectors: what the index is built from.
            label: everything besides the vectors that determines the index.
            build: builds the index.
        """
        # `once_per_machine` calls `lead` in one process of each machine, and then `follow` in the others, with the
        # result of `lead`. Both set `index`.
        index: Searcher | None = None

        def lead() -> Path | None:
            """Return the file with the index, or None if the index cannot be written."""
            nonlocal index
            # Make the folder inside `lead`, so that an error also stops the other processes.
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"cache_dir={self.folder} cannot be made: {error.strerror}"
                ) from error
            path = self.folder / file_name({**label, "data": vectors.fingerprint()})
            index, in_folder = self._get(path, lambda: build(vectors))
            return path if in_folder else None

        def follow(path: Path | None) -> None:
            """Map the file, or build the index if it was not written."""
            nonlocal index
            index = build(vectors) if path is None else read_index(path)

        if vectors.shared:
            once_per_machine(lead, follow)
        else:
            lead()
        assert index is not None
        return index

    def _get(self, path: Path, build: Callable[[], Searcher]) -> tuple[Searcher, bool]:
        """Return the index, and whether it is in the file `path` now. `build` is called if it was not there."""
        # A file is complete, so it needs no lock, which a folder of somebody else might refuse.
        if path.exists():
            return read_index(path), True
        with locked(path):  # A second run waits here, and then finds the index of the first.
            if not path.exists():
                index = build()
                try:
                    remove_partial(path)
                    with written_whole(path) as partial, partial.open("wb") as file:
                        write_index(index, file)
                except (OSError, RuntimeError) as error:
                    why = f"cannot be written: {first_line(error)}; going on without"
                    warnings.warn(f"index cache: {path} {why}", stacklevel=2)
                    return index, False
            return read_index(path), True


def file_name(label: Label) -> str:
    """Return the file name for an index. The name shows the factory string."""
    digest = hashlib.sha256(json.dumps(dict(label), sort_keys=True).encode()).hexdigest()[:16]
    return f"{re.sub('[^A-Za-z0-9]+', '-', str(label['factory']))}-{digest}.index"
