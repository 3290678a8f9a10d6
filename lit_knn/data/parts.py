"""The parts of a data set: images to train on, and images that are held out."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.reference.images import tensor_of
from lit_knn.reference.row_view import RowView

Labels = np.ndarray | Tensor | None


class Part(NamedTuple):
    """Some images of a data set, in the order of the data."""

    images: np.ndarray | Tensor | RowView  # (n, *shape)
    labels: Labels  # (n,) integers
    sha256: str | None  # hash of all images and the choice of these; None if the hash is not known


def split_off(
    whole: Part,
    held_out: int,
    train_images: int | None,
    mapped: bool,
) -> tuple[Part, Part | None]:
    """Split a data set into the images to train on and those held out, which are None if there are none.

    Every call with the same numbers draws the same images.

    Args:
        whole: all images.
        held_out: number of images that are held out.
        train_images: number of the others to train on; None for all.
        mapped: whether the images stay on the disk. The parts are then views, and otherwise copies.

    Raises:
        InputError: there are too few images.
    """
    if not held_out and train_images is None:
        return whole, None

    N = len(whole.images)
    # At least one image must be left to train on.
    needed = held_out + (train_images or 1)
    options = f"data.held_out={held_out}"
    if train_images is not None:
        options += f" and data.train_images={train_images}"
    if needed > N:
        raise InputError(f"{options} needs at least {needed} images, there are {N}")

    end = N if train_images is None else needed
    order = torch.randperm(N, device="cpu", generator=keyed_generator("cpu", Stream.HELD_OUT, 0))
    # The held-out images come first, so that they are the same for every number of images to train on.
    name = f"train on {train_images}, {held_out} held out"
    training = _part(whole, order[held_out:end], mapped, name)
    if not held_out:
        return training, None
    return training, _part(whole, order[:held_out], mapped, f"{held_out} held out")


def shard_of(part: Part, rows: slice, mapped: bool) -> Part:
    """Return consecutive rows of a part.

    Args:
        part: the images of all ranks.
        rows: those of one rank.
        mapped: whether the images stay on the disk; the result is then a view.
    """
    images, labels, sha256 = part
    if isinstance(images, RowView):
        images = images.part(rows)
    elif mapped:
        images = images[rows]
    else:
        # A copy frees the memory of the other shards.
        images = torch.as_tensor(images)[rows].clone()

    if labels is not None:
        labels = labels[rows]
    if sha256 is not None:
        sha256 = f"{sha256}, {rows}"
    return Part(images, labels, sha256)


def _part(whole: Part, drawn: Tensor, mapped: bool, name: str) -> Part:
    """Return the images of the rows `drawn`, in the order of the data."""
    rows = drawn.sort().values
    images, labels, sha256 = whole
    if isinstance(images, RowView):
        part: Tensor | RowView = images.part(rows)
    else:
        part = tensor_of(images)
        part = RowView(part, rows) if mapped else part[rows]

    if labels is not None:
        # NumPy would take a tensor of one row for a number.
        labels = tensor_of(labels, "labels")[rows]
    if sha256 is not None:
        sha256 = f"{sha256}, {name}"
    return Part(part, labels, sha256)
