"""Encodes prepared images, and writes their latents to a file for runs; an interrupted one goes on."""

import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.progress import progress_bar
from lit_knn.data.autoencoders import AutoencoderKL
from lit_knn.data.encoding import check_decoder, encoded
from lit_knn.data.growing_file import append, cut, npy_header
from lit_knn.data.image_source import Origin
from lit_knn.data.latent_files import Encoding, seen_from
from lit_knn.data.partial_file import (
    CONTENT_SUFFIX,
    STARTS_AGAIN,
    beside,
    partial_file,
    write_json,
)
from lit_knn.data.prepared import Description, npy_path, open_prepared, read_prepared
from lit_knn.data.prepared_writer import finished, made_otherwise, name_file
from lit_knn.reference import ReferenceSet

# Images are encoded and written in blocks of this number. A block is encoded in the same batches whether or not the
# preparation was interrupted before it, so that the latents are the same, bit for bit.
BLOCK = 64


def prepare_latents(
    images: str | os.PathLike[str],
    out: str | os.PathLike[str],
    autoencoder: AutoencoderKL,
    half: bool = False,
    mirrored: bool = True,
) -> Description:
    """Write the latents of prepared images to an `.npy` file for the data module `Images`, with a `.json` beside it.

    The latents of all images come first, in their order, and those of all mirrored images follow. An interrupted
    preparation continues at its last block. If `out` exists and was made in the same way, nothing is done.

    Args:
        images: a file that `prepare` wrote.
        out: the `.npy` file to write, (N, *latent_shape), or (2N, *latent_shape) with mirrored images.
        autoencoder: encodes the images.
        half: write float16, in half the space, instead of float32.
        mirrored: also encode the mirrored images, for runs with `hflip`.
    """
    out, source = npy_path(out), npy_path(images)
    prepared = read_prepared(source)
    whole = ReferenceSet(prepared.images, hflip=mirrored)
    origin = Origin(
        source=source.name,
        options=_options(autoencoder, half, mirrored),
        fingerprint=prepared.sha256,
    )
    if out.exists():
        return finished(origin, out)

    with partial_file(out) as file:
        first = encoded(autoencoder, whole.gather(torch.tensor([0])))
        # If a side of the images is odd, the decoded ones are smaller, and are refused here.
        check_decoder(autoencoder, first, whole.shape)
        shape = whole.N, *first.shape[1:]
        dtype = np.dtype(np.float16 if half else np.float32)
        header = npy_header(whole.N, shape[1:], dtype.str)

        done = _cut_to_blocks(
            file, header, dtype.itemsize * math.prod(shape[1:]), _done(out, origin)
        )
        if done:
            print(f"{out}: going on after {done:,} latents", file=sys.stderr)
        for written in _encoded_blocks(file, whole, autoencoder, dtype, done):
            write_json(beside(out, CONTENT_SUFFIX), {"origin": origin, "done": written})

        file.seek(len(header))
        sha256, mean, deviation = _summary(file, dtype)
        encoding = _encoding(autoencoder, source, out.parent, origin, (mean, deviation))
        labels = None if prepared.labels is None else prepared.labels.tolist()
        description = Description(shape, sha256, origin, labels, prepared.class_names, encoding)
        name_file(out, description)
    return description


def check_options(out: Path, autoencoder: AutoencoderKL, half: bool, mirrored: bool) -> None:
    """Refuse a file that exists and was encoded in another way, before its images are prepared for hours.

    The arguments are those of `prepare_latents`.
    """
    if not out.exists():
        return
    made = open_prepared(out)[1].origin["options"]
    if made != _options(autoencoder, half, mirrored):
        raise made_otherwise(out)


def _options(autoencoder: AutoencoderKL, half: bool, mirrored: bool) -> dict[str, object]:
    """Return what latents of the same images depend on."""
    return {**autoencoder.settings(), "half": half, "mirrored": mirrored}


def _encoding(
    autoencoder: AutoencoderKL,
    images: Path,
    folder: Path,
    origin: Origin,
    moments: tuple[float, float],
) -> Encoding:
    """Describe how latents were made.

    Args:
        autoencoder: encoded the images.
        images: the prepared file of the images.
        folder: that of the latents.
        origin: has the hash of the images, and whether mirrored ones were encoded, too.
        moments: mean and standard deviation of all values of the latents.
    """
    factor, shift = autoencoder.factors()
    return Encoding(
        images=seen_from(str(images), folder),
        images_sha256=origin["fingerprint"],
        path=seen_from(autoencoder.path, folder),
        settings=autoencoder.settings(),
        factor=factor,
        shift=shift,
        mirrored=bool(origin["options"]["mirrored"]),
        mean=moments[0],
        standard_deviation=moments[1],
    )


def _cut_to_blocks(file: io.BufferedRandom, header: bytes, item_bytes: int, done: int) -> int:
    """Cut a file after its last whole block, go to its end, and return how many latents it then has.

    Args:
        file: the file of an interrupted preparation, or an empty one, which gets the header.
        header: its beginning.
        item_bytes: bytes of one latent.
        done: how many latents were written, as the preparation noted.
    """
    # The file may have lost the end of what was written.
    in_file = max(os.fstat(file.fileno()).st_size - len(header), 0) // item_bytes
    done = min(done, in_file // BLOCK * BLOCK)
    cut(file, header, done * item_bytes)
    file.seek(0, io.SEEK_END)
    return done


def _encoded_blocks(
    file: io.BufferedRandom,
    images: ReferenceSet,
    autoencoder: AutoencoderKL,
    dtype: np.dtype,
    done: int,
) -> Iterator[int]:
    """Append the latents to a file, block by block, and yield the number that is written after each.

    Args:
        file: is at its end, after `done` latents.
        images: all images.
        autoencoder: encodes them.
        dtype: type of the values in the file.
        done: number of images that are encoded already.
    """
    bar = progress_bar(images.N, "Encoding", " images", leave=True, shown=True, initial=done)
    with bar:
        for start in range(done, images.N, BLOCK):
            ids = torch.arange(start, min(start + BLOCK, images.N))
            append(file, _encoded_bytes(autoencoder, images.gather(ids), dtype))
            # The last block may be smaller. It is encoded again if the file is not complete.
            yield start + BLOCK
            bar.update(len(ids))


def _encoded_bytes(autoencoder: AutoencoderKL, images: torch.Tensor, dtype: np.dtype) -> bytes:
    """Encode images (B, *shape), and return the bytes of their latents; refuse values that are not finite."""
    # Values that are too large for float16 become infinite.
    with np.errstate(over="ignore"):
        latents = encoded(autoencoder, images).numpy().astype(dtype)
    if not np.isfinite(latents).all():
        raise InputError(f"{autoencoder.path} encodes an image as values that are not finite")
    return latents.tobytes()


def _done(out: Path, origin: Origin) -> int:
    """Return how many latents an interrupted preparation has written, of the same images and in the same way."""
    path = beside(out, CONTENT_SUFFIX)
    if not path.exists():
        return 0

    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("origin") != origin:
        print(f"{out} {STARTS_AGAIN}", file=sys.stderr)
        return 0

    done: int = content["done"]
    return done


def _summary(file: io.BufferedRandom, dtype: np.dtype) -> tuple[str, float, float]:
    """Return the hash of the values from here to the end of the file, their mean and their standard deviation."""
    digest = hashlib.sha256()
    number, total, squares = 0, 0.0, 0.0
    while piece := file.read(64 * 2**20):
        digest.update(piece)
        values = np.frombuffer(piece, dtype).astype(np.float64)
        number += len(values)
        total += float(values.sum())
        squares += float((values**2).sum())

    mean = total / number
    return digest.hexdigest(), mean, math.sqrt(max(squares / number - mean**2, 0.0))
