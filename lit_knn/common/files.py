"""Writes files so that they are complete or absent."""

import glob
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lit_knn.common.errors import InputError


def at_home(path: str) -> str:
    """Replace `~` or `~USER` at the beginning of a path."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise InputError(f"{path}: there is no such user")
    return expanded


def make_folder(folder: Path) -> None:
    """Make a folder before long work fills it; refuse one that cannot be written to."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise InputError(f"nothing can be written into the folder {folder}")


@contextmanager
def written_whole(path: str | os.PathLike[str], flush: bool = True) -> Iterator[Path]:
    """Yield a temporary path with the same suffix. If the block ends without an error, the file is renamed to `path`.

    `flush=False` does not wait for the disk: after a power cut the file may be empty. An OSError names `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")

    try:
        # A new file shows which mode this process gives its files.
        partial.touch()
        mode = partial.stat().st_mode
        partial.unlink()

        yield partial
        # Some libraries write files that only their owner can read, so the mode is restored.
        if partial.stat().st_mode != mode:
            partial.chmod(mode)

        if flush:
            with partial.open("rb") as file:
                # Flush to disk before renaming: otherwise, after a power cut, the name could exist without the data.
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        # The error of a failed write names no file, or only the temporary file, which the user does not know.
        if error.filename in (None, str(partial)):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(path: Path) -> None:
    """Remove files of processes that were killed in `written_whole(path)`.

    No running process may be inside it.
    """
    stem, suffix = glob.escape(path.stem), glob.escape(path.suffix)
    for partial in path.parent.glob(f".{stem}.*.partial{suffix}"):
        partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Allow only one process at a time to enter blocks with the same path. The lock is `.<name>.lock` beside it."""
    import fcntl  # Only Unix has this module. The estimators, which lock nothing, work on other systems, too.

    with path.with_name(f".{path.name}.lock").open("w") as lock:
        if not try_lock(lock):
            warnings.warn(f"waiting for another process that is at work on {path}", stacklevel=3)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed, and return True, or False if another process has locked it.

    The system frees the lock when a process ends.
    """
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # This file system knows no locks.
    return True
