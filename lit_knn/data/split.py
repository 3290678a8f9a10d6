"""Splits the images of a data module into training images and held-out images."""

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.rng import Stream, keyed_generator


def split_rows(N: int, held_out: int, train_images: int | None) -> tuple[Tensor, Tensor]:
    """Draw which of N images are trained on and which are held out, the same at every call.

    A smaller number of training images is a part of a larger one.

    Args:
        N: number of images.
        held_out: number of images to hold out.
        train_images: number of images to train on; None for all others.

    Returns:
        Rows of the training images and of the held-out images, each ascending.

    Raises:
        InputError: there are fewer images than asked for.
    """
    wanted = held_out + (train_images or 1)
    if wanted > N:
        both = "" if train_images is None else f" and data.train_images={train_images}"
        raise InputError(f"data.held_out={held_out}{both} needs at least {wanted} images, there are {N}")
    order = torch.randperm(N, generator=keyed_generator("cpu", Stream.HELD_OUT, 0))
    end = None if train_images is None else wanted
    return order[held_out:end].sort().values, order[:held_out].sort().values
