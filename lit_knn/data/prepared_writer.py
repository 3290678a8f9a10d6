"""Writes prepared images in blocks, so that a preparation can be interrupted, to a file that appears when complete."""

import hashlib
import io
import math
import os
import sys
from pathlib import Path

from lit_knn.common.errors import InputError, check_at_least, printable
from lit_knn.common.files import written_whole
from lit_knn.data.bad_images import BadImageError, bad_images
from lit_knn.data.decoded_blocks import decoded_blocks
from lit_knn.data.growing_file import append, cut, npy_header
from lit_knn.data.image_source import Origin, UnpreparedImages, open_source
from lit_knn.data.partial_file import (
    CONTENT_SUFFIX,
    PartialContent,
    beside,
    partial_file,
    write_json,
)
from lit_knn.data.prepare_options import PrepareOptions
from lit_knn.data.prepared import (
    PARTIAL_SUFFIX,
    Description,
    npy_path,
    open_prepared,
    skipped_path,
)

# Images are written and recorded in blocks of about this many bytes; an interruption loses at most one block.
BLOCK_BYTES = 8 * 2**20


def prepare(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: PrepareOptions | None = None,
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
    with open_source(source, options or PrepareOptions()) as images:
        description = write_prepared(images, out, workers, block_images, skip_bad)
    if images.labels_problem:
        # A line said so before the long work, and may be out of sight.
        print(printable(f"{out} has no labels: {images.labels_problem}"), file=sys.stderr)
    return description


def write_prepared(
    images: UnpreparedImages,
    out: str | os.PathLike[str],
    workers: int | None = None,
    block_images: int | None = None,
    skip_bad: bool = False,
) -> Description:
    """Write the images of any source; the arguments are those of `prepare`."""
    out = npy_path(out)
    workers = (os.cpu_count() or 1) if workers is None else workers
    check_at_least(1, **{"--workers": workers})
    if out.exists():
        return finished(images.origin, out)

    with partial_file(out) as file:
        content = PartialContent(images, out)
        content.read(os.fstat(file.fileno()).st_size)
        shape = content.shape or _first_shape(content)
        content.shape = shape
        # An old description must not stand beside new blocks.
        content.write()
        header = npy_header(content.done, shape)
        cut(file, header, content.done * math.prod(shape))
        # This reads the pixels that are done, and leaves the file at its end.
        digest = hashlib.file_digest(file, "sha256")

        size = block_images or max(BLOCK_BYTES // math.prod(shape), workers)
        for pixels in decoded_blocks(content, shape, size, workers):
            append(file, pixels)
            digest.update(pixels)
            content.write()

        if content.bad and not skip_bad:
            raise _bad_images(content)
        if images.changed():
            changed = f"{images.origin['source']} was changed meanwhile"
            raise InputError(f"{changed}: give the same command again")
        return _finish(file, content, shape, digest.hexdigest())


def finished(origin: Origin, out: Path) -> Description:
    """Return the description of a file that exists; refuse one that was made in another way."""
    description = open_prepared(out)[1]
    # The name of the source may differ.
    if {**description.origin, "source": ""} != {**origin, "source": ""}:
        raise made_otherwise(out)

    beside(out, CONTENT_SUFFIX).unlink(missing_ok=True)
    return description


def made_otherwise(out: Path) -> InputError:
    """Return the error for a file that exists, and is not what is asked for."""
    advice = "delete both files, or name another"
    return InputError(f"{out} was made of other images or in another way: {advice}")


def _first_shape(content: PartialContent) -> tuple[int, ...]:
    """Return the shape of the first image that is not bad."""
    for i in content.candidates():
        try:
            return content.images.read(i).shape
        except BadImageError as error:
            content.add_bad(i, error)
    raise _bad_images(content)


def _bad_images(content: PartialContent) -> InputError:
    """Return the error that names the bad files and says what the user can do."""
    problems = [problem for _, problem in content.bad.values()]
    number = len(content.images.names)
    which = "them" if len(problems) > 1 else "it"
    advice = f"remove {which}, or leave {which} out with --skip-bad; what is done is kept"
    if len(problems) == number:
        advice = "no image is left to prepare"
    error = bad_images(problems, number, advice)
    return InputError(f"{content.images.origin['source']}: {error}")


def _finish(
    file: io.BufferedRandom,
    content: PartialContent,
    shape: tuple[int, ...],
    sha256: str,
) -> Description:
    """Give the file its name, and write its description and the names of bad files beside it."""
    images, out = content.images, content.out
    rows = content.candidates()
    labels = None if images.labels is None else images.labels[rows].tolist()
    if labels is not None:
        _check_classes(labels, images.class_names or [])

    file.seek(0)
    append(file, npy_header(len(rows), shape))

    origin, names = images.origin, images.class_names
    description = Description((len(rows), *shape), sha256, origin, labels, names)
    _write_skipped(content)
    name_file(out, description)
    return description


def name_file(out: Path, description: Description) -> None:
    """Write the description of the partial file, which is complete, and give it its name."""
    # The .json comes before the name, so that a finished .npy file always has its description.
    write_json(out.with_suffix(".json"), description._asdict())
    os.replace(beside(out, PARTIAL_SUFFIX), out)
    beside(out, CONTENT_SUFFIX).unlink(missing_ok=True)


def _check_classes(labels: list[int], class_names: list[str]) -> None:
    """Refuse classes without an image, because a training by class would end there."""
    empty = sorted(set(range(len(class_names))) - set(labels))
    if empty:
        name = printable(class_names[empty[0]])
        raise InputError(f"all images of the class {name} are bad: remove its folder")


def _write_skipped(content: PartialContent) -> None:
    """Write the name of each bad file, and what is wrong with it, to `NAME.skipped.txt` for `NAME.npy`."""
    path = skipped_path(content.out)
    if not content.bad:
        path.unlink(missing_ok=True)
        return

    lines = [f"{printable(name)}\t{problem}\n" for name, (_, problem) in content.bad.items()]
    with written_whole(path) as partial:
        partial.write_text("".join(lines), encoding="utf-8")
