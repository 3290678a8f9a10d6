"""Writes prepared images in blocks, so that a preparation can be interrupted.

The file appears when it is complete.
"""

import hashlib
import io
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lit_knn.common.errors import InputError, printable
from lit_knn.common.files import written_whole
from lit_knn.common.progress import SECONDS_BETWEEN_LINES_IN_A_FILE
from lit_knn.data.decoding import BadImageError, Options, bad_images
from lit_knn.data.image_files import check_same_size
from lit_knn.data.image_source import Source, open_source
from lit_knn.data.partial_file import (
    RECORD_SUFFIX,
    Record,
    beside,
    npy_header,
    partial_file,
    write_json,
)
from lit_knn.data.prepared import (
    PARTIAL_SUFFIX,
    Description,
    npy_path,
    open_prepared,
    skipped_path,
)

if TYPE_CHECKING:
    from tqdm import tqdm

# Images are written and recorded in blocks of about this many bytes.
# An interruption loses at most one block.
BLOCK_BYTES = 8 * 2**20


def prepare(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Options | None = None,
    workers: int | None = None,
    block_images: int | None = None,
    skip_bad: bool = False,
) -> Description:
    """Write the images of `source` to an `.npy` file for `read_prepared`, with a `.json` beside it.

    Finished blocks go to `OUT.partial`, and what they hold to `OUT.partial.json`. An interrupted
    preparation continues from there, with the same result, byte for byte. If `out` exists and was
    made in the same way, nothing is done.

    Args:
        source: a zip or folder, see `open_source`.
        out: the `.npy` file to write.
        options: the changes made to each image.
        workers: threads that decode; None for one per CPU.
        block_images: images that are written and recorded at a time; None for 8 MiB.
        skip_bad: leave bad files out, and write their names to `NAME.skipped.txt` for `NAME.npy`.

    Raises:
        InputError: some files are bad. All have been read, and what is done is kept.
    """
    with open_source(source, options or Options()) as images:
        return write_prepared(images, out, workers, block_images, skip_bad)


def write_prepared(
    images: Source,
    out: str | os.PathLike[str],
    workers: int | None = None,
    block_images: int | None = None,
    skip_bad: bool = False,
) -> Description:
    """Write the images of any source; the arguments are those of `prepare`."""
    out = npy_path(out)
    workers = (os.cpu_count() or 1) if workers is None else workers
    if workers < 1:
        raise InputError(f"--workers must be at least 1, got {workers}")
    if out.exists():
        return _finished(images, out)

    with partial_file(out) as file:
        record = Record(images, out)
        record.read(os.fstat(file.fileno()).st_size)
        shape = record.shape = record.shape or _first_shape(record)
        # The old record must not stand beside new blocks.
        record.write()
        _cut(file, record.done, shape)
        digest = hashlib.file_digest(file, "sha256")

        size = block_images or max(BLOCK_BYTES // math.prod(shape), workers)
        for pixels in _blocks(record, shape, size, workers):
            _append(file, pixels)
            digest.update(pixels)
            record.write()

        if record.bad and not skip_bad:
            raise _bad_images(record)
        if images.changed():
            changed = f"{images.origin['source']} was changed meanwhile"
            raise InputError(f"{changed}: give the same command again")
        return _finish(file, record, shape, digest.hexdigest())


def _finished(images: Source, out: Path) -> Description:
    """Return the description of a file that exists; refuse one that was made in another way."""
    description = open_prepared(out)[1]
    # The name of the source may differ.
    if description.origin | {"source": ""} != images.origin | {"source": ""}:
        advice = "delete both files, or name another"
        raise InputError(f"{out} was made of other images or in another way: {advice}")

    beside(out, RECORD_SUFFIX).unlink(missing_ok=True)
    return description


def _first_shape(record: Record) -> tuple[int, ...]:
    """Return the shape of the first image that is not bad."""
    for i in record.candidates():
        try:
            return record.images.read(i).shape
        except BadImageError as error:
            record.add_bad(i, error)
    raise _bad_images(record)


def _bad_images(record: Record) -> InputError:
    """Return the error that names the bad files."""
    problems = [problem for _, problem in record.bad.values()]
    number = len(record.images.names)
    which = "them" if len(problems) > 1 else "it"
    advice = f"remove {which}, or leave {which} out with --skip-bad; what is done is kept"
    if len(problems) == number:
        advice = "no image is left to prepare"
    error = bad_images(problems, number, advice)
    return InputError(f"{record.images.origin['source']}: {error}")


def _cut(file: io.BufferedRandom, done: int, shape: tuple[int, ...]) -> None:
    """Cut off what is not done, and go to the first pixel."""
    header = npy_header(done, shape)
    file.truncate(len(header) + done * math.prod(shape))
    file.seek(0)
    file.write(header)


def _append(file: io.BufferedRandom, pixels: bytes) -> None:
    """Write bytes and wait until they are on the disk."""
    file.write(pixels)
    file.flush()
    os.fsync(file.fileno())


def _blocks(record: Record, shape: tuple[int, ...], size: int, workers: int) -> Iterator[bytes]:
    """Decode the missing images, and yield the pixels of each block of `size` files."""
    images, candidates = record.images, record.candidates()
    first, missing = images.names[candidates[0]], candidates[record.done :]

    def read(i: int) -> np.ndarray | BadImageError:
        try:
            image = images.read(i)
        except BadImageError as error:
            return error
        check_same_size(first, shape, images.names[i], image.shape)
        return image

    with ThreadPoolExecutor(workers) as pool, _bar(len(candidates), record.done) as bar:
        for start in range(0, len(missing), size):
            block = missing[start : start + size]
            pixels = bytearray()

            for i, image in zip(block, pool.map(read, block), strict=True):
                bar.update()
                if isinstance(image, BadImageError):
                    record.add_bad(i, image)
                    continue
                pixels += image.tobytes()
                record.add(i)

            record.end_block()
            yield bytes(pixels)


def _bar(total: int, done: int) -> "tqdm":
    """Return the progress bar."""
    from tqdm import tqdm

    # In a log file each refresh adds a line.
    between = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES_IN_A_FILE
    return tqdm(total=total, initial=done, desc="Preparing", unit=" images", mininterval=between)


def _finish(
    file: io.BufferedRandom,
    record: Record,
    shape: tuple[int, ...],
    sha256: str,
) -> Description:
    """Give the file its name, and write its description and the names of bad files beside it."""
    images, out = record.images, record.out
    rows = record.candidates()
    labels = None if images.labels is None else images.labels[rows].tolist()
    if labels is not None:
        _check_classes(labels, images.class_names or [])

    file.seek(0)
    _append(file, npy_header(len(rows), shape))

    origin, names = images.origin, images.class_names
    description = Description((len(rows), *shape), sha256, origin, labels, names)
    _write_skipped(record)
    # The .json comes before the name, so that a finished .npy file always has its description.
    write_json(out.with_suffix(".json"), description._asdict())
    os.replace(beside(out, PARTIAL_SUFFIX), out)
    beside(out, RECORD_SUFFIX).unlink(missing_ok=True)
    return description


def _check_classes(labels: list[int], class_names: list[str]) -> None:
    """Refuse a class all of whose images are bad: without it, the others would be renumbered."""
    empty = sorted(set(range(len(class_names))) - set(labels))
    if empty:
        name = printable(class_names[empty[0]])
        raise InputError(f"all images of the class {name} are bad: remove its folder")


def _write_skipped(record: Record) -> None:
    """Write the name of each bad file, and what is wrong with it, to `NAME.skipped.txt` for `NAME.npy`."""
    path = skipped_path(record.out)
    if not record.bad:
        path.unlink(missing_ok=True)
        return

    lines = [f"{printable(name)}\t{problem}\n" for name, (_, problem) in record.bad.items()]
    with written_whole(path) as partial:
        partial.write_text("".join(lines), encoding="utf-8")
