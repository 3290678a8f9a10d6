"""The files of samples that `SampleWriter` writes: PNG files or one .npz file, their classes, and a picture."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from lit_knn.common.errors import printable
from lit_knn.common.files import written_whole
from lit_knn.common.tables import Row, write_rows
from lit_knn.figures import captioned, sample_picture

# Number of samples in the picture: images or series in a grid, and points in a scatter plot, which has room for more.
GRID_SAMPLES = 64
GRID_POINTS = 2000
CLASSES_NAME = "classes.csv"


def write_pngs(folder: Path, images: np.ndarray, seeds: Sequence[int]) -> None:
    """Write each image into a PNG file that is named by its seed.

    Args:
        folder: folder of the files.
        images: the images, (B, C, H, W), uint8.
        seeds: their B seeds.
    """
    for seed, image in zip(seeds, images, strict=True):
        with written_whole(folder / png_name(seed), flush=False) as partial:
            to_pil_image(image.transpose(1, 2, 0)).save(partial)


def png_name(seed: int) -> str:
    """Return the name of the PNG file of the sample with this seed."""
    return f"{seed:06d}.png"


def write_npz(
    path: Path,
    images: np.ndarray,
    seeds: np.ndarray,
    classes: np.ndarray | None,
) -> None:
    """Write all samples into one file, pictures with their channels last.

    Args:
        path: path of the .npz file.
        images: pictures, (N, C, H, W), uint8, or float32 samples of any shape.
        seeds: their seeds, (N,).
        classes: their classes, (N,), or None if samples have no class.
    """
    if images.dtype == np.uint8:
        images = images.transpose(0, 2, 3, 1)

    arrays = {"images": images, "seeds": seeds}
    if classes is not None:
        arrays["labels"] = classes
    with written_whole(path) as partial:
        np.savez_compressed(partial, **arrays)  # type: ignore[arg-type]


def write_classes(
    folder: Path,
    seeds: np.ndarray,
    classes: np.ndarray,
    names: Sequence[str] | None,
) -> None:
    """Write the class of each PNG file into `dataset.json`, in EDM's layout, and into `classes.csv`, with its name.

    Args:
        folder: folder of the PNG files.
        seeds: the seeds of the samples, (N,).
        classes: their classes, (N,).
        names: names of the classes, or None if they have none.
    """
    labels = []
    rows: list[Row] = []
    for seed, label in zip(seeds.tolist(), classes.tolist(), strict=True):
        labels.append([png_name(seed), label])

        row: Row = {"file": png_name(seed), "class": label}
        if names:
            row["name"] = printable(names[label])
        rows.append(row)

    with written_whole(folder / "dataset.json") as partial:
        partial.write_text(json.dumps({"labels": labels}) + "\n", encoding="utf-8")
    write_rows(folder / CLASSES_NAME, rows)


def picture_of_first(images: np.ndarray, total: int) -> Tensor | None:
    """Return a picture of the first samples, (3, H, W) in [0, 1], or None if samples of this shape have no picture.

    Args:
        images: the samples, (N, *shape), uint8 or float32, in the order of their seeds. The last ones may be missing.
        total: the number of all samples, which the caption names.
    """
    limit = GRID_POINTS if images.shape[1:] == (2,) else GRID_SAMPLES
    first = torch.from_numpy(images[:limit]).float()
    if images.dtype == np.uint8:
        first = first / 127.5 - 1  # pixels 0 to 255 in model space, [-1, 1]

    picture = sample_picture(first)
    if picture is None:
        return None
    return captioned(picture, f"{len(first):,} of {total:,} samples")
