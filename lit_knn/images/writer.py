"""Writing a prepared file: in blocks, so that it can be interrupted, and whole or not at all."""

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lit_knn.errors import InputError
from lit_knn.images.files import describe_size
from lit_knn.images.mapped import PAGE, PARTIAL_SUFFIX, Header, read_header
from lit_knn.images.source import Options, Source, open_source

# Written and recorded at a time: what an interruption costs at most.
BLOCK_BYTES = 8 * 2**20
# A bar that is written to a file adds a line at each refresh.
SECONDS_BETWEEN_LINES_IN_A_FILE = 10.0


def prepare(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Options | None = None,
    workers: int | None = None,
    block_images: int | None = None,
) -> Header:
    """Write the images of `source` to one file that `read_prepared` maps.

    What is written so far is in `OUT.partial`, and how far that is in `OUT.partial.json`, from which an interrupted
    preparation goes on; the result is the same, byte for byte.

    Args:
        source: see `open_source`.
        out: the file. If it is there, made of the same images in the same way, nothing is done.
        options: what is done to each image.
        workers: threads that decode; one for each CPU if None.
        block_images: images written and recorded at a time; 8 MiB of them if None.

    Returns:
        The header of the file.

    Raises:
        InputError: what is wrong with the source or one of its images; images that differ in size or channels; `out`
            made of something else; another process preparing it; a full disk.
    """
    options = Options() if options is None else options
    if workers is not None and workers < 1:
        raise InputError(f"--workers must be at least 1, got {workers}")
    how = {name: value for name, value in vars(options).items() if value}
    with open_source(source, options) as images:
        return write_prepared(images, Path(source).name, how, out, workers, block_images)


def write_prepared(
    images: Source,
    name: str,
    how: dict[str, Any],
    out: str | os.PathLike[str],
    workers: int | None = None,
    block_images: int | None = None,
) -> Header:
    """Write the images of any source, see `prepare`.

    Args:
        images: the source.
        name: of the source, for the header.
        how: what was done to the images, for the header; anything that JSON can write.
        out: see `prepare`.
        workers: see `prepare`.
        block_images: see `prepare`.

    Returns:
        The header of the file.

    Raises:
        InputError: see `prepare`.
    """
    out, workers = Path(out).expanduser(), workers or os.cpu_count() or 1
    header = _planned(images, name, how)
    if out.exists():
        return _finished(out, header)
    image_bytes = math.prod(header.shape[1:])
    block = block_images or max(BLOCK_BYTES // image_bytes, workers)
    with _named_errors(out), _partial_file(out) as file:
        digest, done = _resume(out, file, header)
        _check_space(out, file, header)
        for start, pixels in _blocks(images, header, done, block, workers):
            file.seek(header.offset + start * image_bytes)
            file.write(pixels)
            _to_disk(file)
            digest.update(pixels)
            _record(out, header, start + len(pixels) // image_bytes)
        return _finish(out, file, header._replace(sha256=digest.hexdigest()), images.labels)


def _planned(images: Source, name: str, how: dict[str, Any]) -> Header:
    """The header, all but the hash of what is not read yet."""
    origin = {"source": name, "options": how, "fingerprint": images.fingerprint}
    return Header((len(images.names), *images.read(0).shape), images.labels is not None, "", origin)


def _same(a: Header, b: Header) -> bool:
    what = [(h.shape, h.has_labels, h.origin["options"], h.origin["fingerprint"], h.version) for h in (a, b)]
    return what[0] == what[1]


def _finished(out: Path, header: Header) -> Header:
    found = read_header(out)
    if not _same(found, header):
        raise InputError(f"{out} is there already, made of other images or in another way: delete it, or name another")
    _forget(out)
    return found


@contextmanager
def _partial_file(out: Path) -> Iterator[BinaryIO]:
    """The file that becomes `out`, for this process alone."""
    path = out.with_name(out.name + PARTIAL_SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by a process that dies, too
        except BlockingIOError as error:
            raise InputError(f"{out} is being prepared by another process") from error
        if not path.exists() or os.fstat(file.fileno()).st_ino != path.stat().st_ino:
            raise InputError(f"{out} has just been prepared by another process")
        yield file


@contextmanager
def _named_errors(out: Path) -> Iterator[None]:
    """Say of an error on the way to the disk what it means for the user."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        kept = "; what is done is kept: make room and give the same command again" if full else ""
        raise InputError(f"{out} cannot be written: {error.strerror}{kept}") from error


def _record_file(out: Path) -> Path:
    return out.with_name(f"{out.name}{PARTIAL_SUFFIX}.json")


def _forget(out: Path) -> None:
    for path in (_record_file(out), _record_file(out).with_suffix(".new")):
        path.unlink(missing_ok=True)


def _record(out: Path, header: Header, done: int) -> None:
    """Note that the first `done` images are on the disk."""
    # One name for all, so that a killed process leaves nothing that the next does not overwrite.
    new = _record_file(out).with_suffix(".new")
    new.write_text(json.dumps({"header": header._asdict(), "done": done}))
    os.replace(new, _record_file(out))


def _resume(out: Path, file: BinaryIO, header: Header) -> tuple[Any, int]:
    """The hash of the images that an earlier start has written, and their number."""
    digest, image_bytes = hashlib.sha256(), math.prod(header.shape[1:])
    try:
        record = json.loads(_record_file(out).read_text())
        begun, done = Header(**{**record["header"], "shape": tuple(record["header"]["shape"])}), int(record["done"])
    except FileNotFoundError:
        return digest, 0
    except (ValueError, KeyError, TypeError):
        say(f"{_record_file(out)} is damaged: starting again")
        return digest, 0
    length = os.fstat(file.fileno()).st_size
    if not _same(begun, header) or not header.offset + done * image_bytes <= length:
        say(f"{out} was begun with other images or in another way: starting again")
        return digest, 0
    say(f"{out}: going on after {done:,} images")
    file.seek(header.offset)
    left = done * image_bytes
    while left:
        piece = file.read(min(left, BLOCK_BYTES))
        digest.update(piece)
        left -= len(piece)
    return digest, done


def _check_space(out: Path, file: BinaryIO, header: Header) -> None:
    missing = header.file_bytes - 512 * os.fstat(file.fileno()).st_blocks
    free = shutil.disk_usage(out.parent).free
    if missing > free:
        raise InputError(f"{out} needs {missing / 1e9:.2f} GB more, its disk has {free / 1e9:.2f} GB free")


def _blocks(images: Source, header: Header, done: int, block: int, workers: int) -> Iterator[tuple[int, bytes]]:
    """First image and pixels of each block that is missing."""
    from tqdm import tqdm

    N = header.shape[0]

    def read(i: int) -> np.ndarray:
        image = images.read(i)
        if image.shape != header.shape[1:]:
            first = describe_size(np.empty(header.shape[1:]))
            hint = "" if image.shape[1:] != header.shape[2:] else "; --rgb makes them all RGB"
            raise InputError(
                f"all images must have one size and number of channels, but {images.names[0]} is {first} and "
                f"{images.names[i]} is {describe_size(image)}{hint}"
            )
        return image

    between = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES_IN_A_FILE
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm(total=N, initial=done, desc="Preparing", unit=" images", mininterval=between) as bar,
    ):
        for start in range(done, N, block):
            pixels = bytearray()
            for image in pool.map(read, range(start, min(start + block, N))):
                pixels += image.tobytes()
                bar.update()
            yield start, bytes(pixels)


def _finish(out: Path, file: BinaryIO, header: Header, labels: np.ndarray | None) -> Header:
    """Add labels and, last, the header, and let the file become `out`."""
    file.truncate(header.file_bytes)
    if labels is not None:
        file.seek(PAGE)
        file.write(labels.astype("<i8").tobytes().ljust(header.offset - PAGE, b"\0"))
    _to_disk(file)
    file.seek(0)
    file.write(header.encode())
    _to_disk(file)
    os.replace(out.with_name(out.name + PARTIAL_SUFFIX), out)
    _forget(out)
    return header


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def say(line: str) -> None:
    """A line beside the progress bar."""
    print(line, file=sys.stderr)
