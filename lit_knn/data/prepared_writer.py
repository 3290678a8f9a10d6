"""Write prepared images in blocks, so that a run can be interrupted; the result appears only when it is complete."""

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lit_knn.common.errors import InputError
from lit_knn.common.files import remove_partial, written_whole
from lit_knn.common.progress import SECONDS_BETWEEN_LINES_IN_A_FILE
from lit_knn.data.image_files import check_same_size
from lit_knn.data.image_source import Options, Source, open_source
from lit_knn.data.prepared import PARTIAL_SUFFIX, Description, npy_path, open_prepared

RECORD_SUFFIX = f"{PARTIAL_SUFFIX}.json"
# Images are written and recorded in blocks of about this many bytes. An interruption loses at most one block.
BLOCK_BYTES = 8 * 2**20


def prepare(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Options | None = None,
    workers: int | None = None,
    block_images: int | None = None,
) -> Description:
    """Write the images of `source` to an `.npy` file for `read_prepared`, and their description to a `.json` beside it.

    Finished blocks go to `OUT.partial`, and their number to `OUT.partial.json`. An interrupted preparation continues
    from there, with the same result, byte for byte. If `out` exists and was made in the same way, nothing is done.
    `workers` threads decode, one per CPU for None; `block_images` are written and recorded at a time, None for 8 MiB.
    """
    with open_source(source, options or Options()) as images:
        return write_prepared(images, out, workers, block_images)


def write_prepared(
    images: Source, out: str | os.PathLike[str], workers: int | None = None, block_images: int | None = None
) -> Description:
    """Write the images of any source; the arguments are those of `prepare`."""
    out = npy_path(out)
    workers = (os.cpu_count() or 1) if workers is None else workers
    if workers < 1:
        raise InputError(f"--workers must be at least 1, got {workers}")
    labels = None if images.labels is None else images.labels.tolist()
    planned = Description((len(images.names), *images.read(0).shape), "", images.origin, labels, images.class_names)
    if out.exists():
        found = open_prepared(out)[1]
        if not _same(found.origin, planned.origin):
            raise InputError(f"{out} was made of other images or in another way: delete both files, or name another")
        _beside(out, RECORD_SUFFIX).unlink(missing_ok=True)
        return found
    image_bytes, record_file = math.prod(planned.shape[1:]), _beside(out, RECORD_SUFFIX)
    block = block_images or max(BLOCK_BYTES // image_bytes, workers)
    start = io.BytesIO()
    np.lib.format.write_array_header_1_0(start, {"descr": "|u1", "fortran_order": False, "shape": planned.shape})
    header = start.getvalue()
    with _partial_file(out) as file:
        done = _images_done(record_file, file, len(header), planned)
        file.truncate(len(header) + done * image_bytes)
        file.seek(0)
        file.write(header)
        digest = hashlib.file_digest(file, "sha256")
        for pixels in _blocks(images, planned.shape, done, block, workers):
            file.write(pixels)
            file.flush()
            os.fsync(file.fileno())
            digest.update(pixels)
            done += len(pixels) // image_bytes
            _write_json(record_file, {"origin": images.origin, "done": done})
        if images.changed():
            raise InputError(f"{images.origin['source']} was changed meanwhile: give the same command again")
        description = planned._replace(sha256=digest.hexdigest())
        # The .json comes first, so that a finished .npy file always has its description.
        _write_json(out.with_suffix(".json"), description._asdict())
        os.replace(_beside(out, PARTIAL_SUFFIX), out)
        record_file.unlink(missing_ok=True)
        return description


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


def _same(found: dict[str, Any], planned: dict[str, Any]) -> bool:
    """Tell whether two origins have the same images and options; the name of the source may differ."""
    return found | {"source": ""} == planned | {"source": ""}


@contextmanager
def _partial_file(out: Path) -> Iterator[io.BufferedRandom]:
    """Open the file that becomes `out`, locked for this process. A write error says what the user can do."""
    path, description = _beside(out, PARTIAL_SUFFIX), out.with_suffix(".json")
    if description.exists() and not path.exists():
        raise InputError(f"{description} is there already: name another .npy file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # The system frees the lock when a process dies.
            except BlockingIOError as error:
                raise InputError(f"{out} is being prepared by another process") from error
            except OSError:
                pass  # This file system knows no locks.
            if out.exists():  # This process has opened the finished file, or begun a new partial one.
                path.unlink(missing_ok=True)
                raise InputError(f"{out} has just been prepared by another process")
            for written in (_beside(out, RECORD_SUFFIX), description):
                remove_partial(written)
            yield file
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        kept = "; what is done is kept: make room and give the same command again" if full else ""
        raise InputError(f"{out} cannot be written: {error.strerror}{kept}") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with written_whole(path) as partial:
        partial.write_text(json.dumps(content) + "\n", encoding="utf-8")


def _images_done(record_file: Path, file: io.BufferedRandom, header_bytes: int, planned: Description) -> int:
    """Return how many images an interrupted preparation of the same images has written to `file`.

    If it cannot be continued, file and record are emptied, so that no new block stands under the old record.
    """
    out = str(record_file).removesuffix(RECORD_SUFFIX)
    if record_file.exists():
        record = json.loads(record_file.read_text(encoding="utf-8"))
        there = (os.fstat(file.fileno()).st_size - header_bytes) // math.prod(planned.shape[1:])
        if _same(record["origin"], planned.origin) and record["done"] <= there:
            print(f"{out}: going on after {record['done']:,} images", file=sys.stderr)
            return int(record["done"])
        print(f"{out} was begun with other images or in another way: starting again", file=sys.stderr)
        record_file.unlink()
    file.truncate(0)
    return 0


def _blocks(images: Source, shape: tuple[int, ...], done: int, block: int, workers: int) -> Iterator[bytes]:
    """Yield the pixels of each missing block."""
    from tqdm import tqdm

    def read(i: int) -> np.ndarray:
        image = images.read(i)
        check_same_size(images.names[0], shape[1:], images.names[i], image.shape)
        return image

    between = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES_IN_A_FILE
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm(total=shape[0], initial=done, desc="Preparing", unit=" images", mininterval=between) as bar,
    ):
        for start in range(done, shape[0], block):
            pixels = bytearray()
            for image in pool.map(read, range(start, min(start + block, shape[0]))):
                pixels += image.tobytes()
                bar.update()
            yield bytes(pixels)
