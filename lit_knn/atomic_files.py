"""Files that are there complete or not at all."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a name to write to, in the same folder, that becomes `path` when the block ends without an error.

    Args:
        path: the file, of any kind; its folder is made.

    Yields:
        The name to write to, with the suffix of `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            # Before the file gets its name: after a power cut that must not stand for blocks that were never written.
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(path: Path) -> None:
    """Remove what processes that were killed inside `written_whole(path)` left; no other may be inside it."""
    for partial in path.parent.glob(f".{path.stem}.*.partial{path.suffix}"):
        partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out of blocks with the same path; a process that ends, however, lets them in.

    The lock is the file `.<name>.lock` beside `path`, which stays.
    """
    import fcntl  # of Unix: elsewhere all but the locks works

    with path.with_name(f".{path.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warnings.warn(f"waiting for another process that is at work on {path}", stacklevel=3)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
