"""Make a large data set from a small one: mirror, shift, blend and resize its images.

    python -m benchmarks.generate_images SOURCE OUT.npy --images 1000000 [--size 64] [--classes 1000] [--seed 0]

SOURCE is a zip or folder of images, OUT.npy a prepared file (`--data Prepared --data.path OUT.npy`). Image i is a
function of the source, the seed and i. It is w·a + (1 − w)·b, with w uniform in [1/2, 1], and has the label of a. The
source images a and b are mirrored or not, and shifted by up to 4 pixels with reflected borders. With `--classes` the
images are sorted by that many classes of equal size, and both images of a blend come from the same part of the source,
sorted by label. An interrupted run continues where it stopped.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.one_line import errors_in_one_line
from lit_knn.data.image_files import read_image_files
from lit_knn.data.image_source import Origin, UnpreparedImages
from lit_knn.data.prepared import Description
from lit_knn.data.prepared_writer import write_prepared

MAX_SHIFT = 4
# Weights of a blend are multiples of 1/256, so that the blend is exact in 16-bit integers.
WEIGHT_UNIT = 256


class Recipe:
    """The ingredients of image i, for all i at once.

    Args:
        labels: (S,) int64, labels of the source images.
        number: number of generated images.
        classes: number of classes of the generated images; None keeps the labels of the source.
        seed: seed of the draws.

    Attributes:
        ids: (number, 2), the two source images.
        weights: (number,) uint16, weight of the first image in units of 1/256.
        shifts: (number, 2, 2), rows and columns cut off each padded image, in [0, 2·MAX_SHIFT].
        mirrored: (number, 2), bool.
        labels: (number,), int64.
    """

    def __init__(self, labels: np.ndarray, number: int, classes: int | None, seed: int) -> None:
        rng = np.random.default_rng(seed)
        order = np.argsort(labels, kind="stable")
        groups = 1 if classes is None else classes
        group = np.arange(number) * groups // number
        # Each group has its own part of the source; the parts are as equal as whole images allow.
        first, last = group * len(order) // groups, (group + 1) * len(order) // groups
        places = first[:, None] + (rng.random((number, 2)) * (last - first)[:, None]).astype(
            np.int64
        )
        self.ids = order[places]
        self.weights = rng.integers(WEIGHT_UNIT // 2, WEIGHT_UNIT + 1, number, np.uint16)
        self.shifts = rng.integers(0, 2 * MAX_SHIFT + 1, (number, 2, 2), np.uint8)
        self.mirrored = rng.random((number, 2)) < 0.5
        self.labels = labels[self.ids[:, 0]] if classes is None else group


def generated_source(
    images: np.ndarray,
    labels: np.ndarray | None,
    number: int,
    size: int | None,
    classes: int | None,
    seed: int,
) -> UnpreparedImages:
    """Make generated images for `write_prepared`. `Recipe` explains `number`, `classes` and `seed`.

    `images` are (S, C, H, W) uint8 and `labels` (S,) int64, None for zeros. `size` is the width and height after
    bilinear resizing with antialiasing; None keeps those of the source.

    Raises:
        InputError: an option out of its range.
    """
    for option, value in {"images": number, "size": size, "classes": classes}.items():
        if value is not None and value < 1:
            raise InputError(f"--{option} must be at least 1, got {value}")
    if classes is not None and classes > min(len(images), number):
        raise InputError(f"--classes {classes} is more than the {min(len(images), number)} images")
    labels = np.zeros(len(images), np.int64) if labels is None else labels
    height, width = images.shape[2:]
    margin = ((0, 0), (0, 0), (MAX_SHIFT, MAX_SHIFT), (MAX_SHIFT, MAX_SHIFT))
    padded = np.pad(images, margin, mode="reflect" if min(height, width) > MAX_SHIFT else "edge")
    recipe = Recipe(labels, number, classes, seed)
    rows, columns = (
        (None, None) if size is None else (resizing(height, size), resizing(width, size))
    )

    def part(i: int, which: int) -> np.ndarray:
        top, left = recipe.shifts[i, which]
        cut = padded[recipe.ids[i, which], :, top : top + height, left : left + width]
        return cut[..., ::-1] if recipe.mirrored[i, which] else cut

    def read(i: int) -> np.ndarray:
        weight = recipe.weights[i : i + 1]
        # The largest value is 255·256 + 128, which fits 16 bits.
        blend = (
            part(i, 0) * weight + part(i, 1) * (WEIGHT_UNIT - weight) + np.uint16(WEIGHT_UNIT // 2)
        )
        image = (blend // WEIGHT_UNIT).astype(np.uint8)
        if rows is None or columns is None:
            return image
        # Each resized pixel is a weighted average of the image's pixels, so the result stays in [0, 255].
        return (rows @ image.astype(np.float32) @ columns.T + 0.5).astype(np.uint8)

    digest = hashlib.sha256(padded.data)
    for array in (recipe.ids, recipe.weights, recipe.shifts, recipe.mirrored, recipe.labels):
        digest.update(array.data)
    how: dict[str, object] = {"generated": number, "size": size, "classes": classes, "seed": seed}
    origin = Origin(source="", options=how, fingerprint=digest.hexdigest())
    names = [f"generated image {i}" for i in range(number)]
    return UnpreparedImages(names, read, recipe.labels, origin)


def resizing(old: int, new: int) -> np.ndarray:
    """Return the matrix (new, old), float32, that resizes one axis by bilinear interpolation with antialiasing."""
    columns = torch.eye(old).reshape(1, 1, old, old)
    resized = torch.nn.functional.interpolate(
        columns, size=(new, old), mode="bilinear", antialias=True
    )
    return resized[0, 0].numpy()


def generate(args: argparse.Namespace) -> Description:
    """Read the source and write the prepared file."""
    images, labels, _ = read_image_files(args.source)
    source = generated_source(images, labels, args.images, args.size, args.classes, args.seed)
    source.origin["source"] = args.source.name
    # One thread is fastest: an image is a few short NumPy calls, and more threads would only wait for each other.
    return write_prepared(source, args.out, workers=1)


def main(args: Sequence[str] | None = None) -> None:
    """Run one command line; bad input ends it with one line and exit status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="zip or folder of images")
    parser.add_argument("out", type=Path, metavar="OUT", help="the prepared file to write")
    parser.add_argument("--images", type=int, required=True, metavar="N", help="images to make")
    parser.add_argument(
        "--size", type=int, metavar="S", help="resize to S x S, bilinear with antialiasing"
    )
    parser.add_argument(
        "--classes",
        type=int,
        metavar="K",
        help="classes, in their order; default: labels of SOURCE",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(args)
    with errors_in_one_line():
        made = generate(options)
    N, channels, height, width = made.shape
    print(
        f"{options.out}: {N:,} images of {width}x{height}x{channels}, {options.out.stat().st_size / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
