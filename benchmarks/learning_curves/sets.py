"""The image sets of the learning curves, with the network and the lengths of their runs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.data import Digits
from lit_knn.data.image_files import read_image_files
from lit_knn.index import FaissIndex, Index, TorchIndex
from lit_knn.nets import UNet
from lit_knn.reference import ReferenceSet


class Lengths(NamedTuple):
    """How long the runs of a set are, and how they are measured; all of it is part of a row's fingerprint.

    Attributes:
        steps: optimiser steps.
        measurements: number of measurements, evenly spaced; the last is at the end.
        batch_size: images per step.
        samples: samples of each Fréchet distance, an even number.
        held: latents of the validation error.
        pairs: pairs (z, t) of the gradient variance.
        repeats: gradients at these pairs.
    """

    steps: int
    measurements: int
    batch_size: int = 64
    samples: int = 384
    held: int = 384
    pairs: int = 64
    repeats: int = 12

    def checked(self) -> "Lengths":
        """Return self.

        Raises:
            InputError: a number that is too small, or measurements that do not divide the steps.
        """
        for name, value in self._asdict().items():
            least = 2 if name == "repeats" else 1
            if value < least:
                raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if self.samples < 4 or self.samples % 2:
            raise InputError(f"--samples must be an even number of at least 4, got {self.samples}")
        if self.steps % self.measurements:
            raise InputError(f"--measurements {self.measurements} must divide --steps {self.steps}")
        return self


@dataclass(frozen=True)
class ImageSet:
    """A set with its network, its neighbour index and its lengths."""

    name: str
    images: Callable[[], Tensor]
    net: Callable[[], UNet]
    index: Index
    lengths: Lengths

    def reference(self) -> ReferenceSet:
        """Load the images and make their reference set."""
        return ReferenceSet(self.images(), self.index)


def digits() -> ImageSet:
    """The digits of scikit-learn, 8x8, with a quarter of the weights of configs/models/unet_digits.yaml."""
    return ImageSet(
        "digits",
        lambda: torch.as_tensor(Digits().load()[0]),
        lambda: UNet(in_channels=1, channels=16, multipliers=(1, 2), blocks=1),
        FaissIndex(),
        Lengths(steps=600, measurements=5),
    )


def cifar16(source: Path | None, kept: Path | None) -> ImageSet:
    """Make CIFAR-10 at 16x16.

    Args:
        source: zip or folder of images of 32x32x3.
        kept: .npy file of the averaged images. It is made from `source` if it does not exist.

    Raises:
        InputError: neither file is there, or the images have another shape.
    """
    if kept is None or (not kept.exists() and source is None):
        raise InputError(f"--kept {kept}: cifar16 needs the file, or --images to make it from")
    if not kept.exists():
        assert source is not None
        images = averaged(read_image_files(source)[0])
        with written_whole(kept) as partial:
            np.save(partial, images)
    images = np.load(kept, allow_pickle=False)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (3, 16, 16):
        raise InputError(f"--kept {kept}: needs uint8 images (N, 3, 16, 16), got {images.dtype} {images.shape}")
    return ImageSet(
        "cifar16",
        lambda: torch.as_tensor(images),
        lambda: UNet(in_channels=3, channels=16, multipliers=(1, 2, 2), blocks=1),
        TorchIndex(),  # 8 bits a dimension; its products are bfloat16 where the processor has them.
        Lengths(steps=600, measurements=4),
    )


def averaged(images: np.ndarray) -> np.ndarray:
    """Halve the sides of uint8 images (N, C, H, W) by the mean of each 2x2 block, rounded half to even."""
    n, c, height, width = images.shape
    blocks = images.reshape(n, c, height // 2, 2, width // 2, 2)
    return np.rint(blocks.astype(np.uint16).sum((3, 5)) / 4).astype(np.uint8)
