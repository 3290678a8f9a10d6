"""The image sets of the learning curves, with the network and the lengths of their runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.data import Digits
from lit_knn.data.image_files import read_image_files
from lit_knn.index import FaissIndex, TorchIndex
from lit_knn.metrics import EfficientNetLite0, FeatureExtractor
from lit_knn.nets import UNet
from lit_knn.reference import ReferenceSet

# Images of CIFAR-10 that no run trains on.
HELD_OUT = 2_000
# The sets that are made of CIFAR-10, and how each differs; images are 16x16 if it has no side.
CIFAR: dict[str, dict[str, Any]] = {
    "cifar16": {},
    "cifar16_long": {"lengths": {"steps": 20_000, "measurements": 5}},
    "cifar16_classes": {"by_class": True},
    "cifar16_1000": {"training": 1_000},
    "cifar16_5000": {"training": 5_000},
    "cifar32": {"side": 32, "lengths": {"steps": 10_000, "measurements": 2}},
}


class Lengths(NamedTuple):
    """How long the runs of a set are, and how they are measured; all of it is part of a row's fingerprint.

    Attributes:
        steps: optimiser steps.
        consistency_steps: optimiser steps of a consistency model.
        measurements: number of measurements, evenly spaced; the last is at the end.
        batch_size: images per step.
        samples: samples that are compared with the images.
        held: latents of the validation error.
        pairs: pairs (z, t) of the gradient variance.
        repeats: gradients at these pairs.
    """

    steps: int
    consistency_steps: int
    measurements: int
    batch_size: int = 64
    samples: int = 384
    held: int = 384
    pairs: int = 64
    repeats: int = 12

    def checked(self) -> "Lengths":
        """Return self.

        Raises:
            InputError: a number that is too small.
        """
        for name, value in self._asdict().items():
            least = 2 if name == "repeats" else 1
            if value < least:
                raise InputError(
                    f"--{name.replace('_', '-')} must be at least {least}, got {value}"
                )
        return self


class Images(NamedTuple):
    """The images of a set.

    Attributes:
        training: what is trained on, and averaged over; with labels if the set is trained by class.
        held_out: images that no run trains on, or None.
        real: what samples are compared with.
    """

    training: ReferenceSet
    held_out: ReferenceSet | None
    real: ReferenceSet


@dataclass(frozen=True)
class ImageSet:
    """A set with its network, its lengths, and the features in which its samples are compared besides pixels."""

    name: str
    images: Callable[[], Images]
    net: Callable[..., UNet]
    lengths: Lengths
    extractor: FeatureExtractor | None = None


def digits() -> ImageSet:
    """The digits of scikit-learn, 8x8, with a quarter of the weights of configs/models/unet_digits.yaml."""

    def images() -> Images:
        training = ReferenceSet(torch.as_tensor(Digits().load()[0]), FaissIndex())
        return Images(training, None, training)

    net = partial(UNet, in_channels=1, channels=16, multipliers=(1, 2), blocks=1)
    return ImageSet(
        "digits", images, net, Lengths(steps=600, consistency_steps=600, measurements=5)
    )


def cifar(name: str, source: Path | None, kept: Path | None) -> ImageSet:
    """Make a set of CIFAR-10, one of `CIFAR`.

    Args:
        name: its name.
        source: zip or folder of images of 32x32x3.
        kept: .npz file of the images of the set's size and their labels. It is made from `source` if it does not
            exist.

    Raises:
        InputError: neither file is there, or the images have another shape.
    """
    differs = CIFAR[name]
    side = differs.get("side", 16)
    if kept is None:
        raise InputError(f"--kept: name the file of the images of {name}; it may not exist yet")
    if not kept.exists() and source is None:
        raise InputError(f"--kept {kept}: {name} needs the file, or --images to make it from")
    if not kept.exists():
        assert source is not None
        images, labels, _ = read_image_files(source)
        if labels is None:
            raise InputError(f"--images {source}: the images need labels")
        if images.shape[1:] != (3, 32, 32):
            raise InputError(f"--images {source}: needs images (3, 32, 32), got {images.shape[1:]}")
        with written_whole(kept) as partial_file, partial_file.open("wb") as file:
            np.savez(file, images=averaged(images) if side == 16 else images, labels=labels)
    with np.load(kept, allow_pickle=False) as stored:
        pixels, labels = stored["images"], stored["labels"]
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (3, side, side):
        raise InputError(
            f"--kept {kept}: needs uint8 images (N, 3, {side}, {side}), got {pixels.dtype} {pixels.shape}"
        )
    by_class = differs.get("by_class", False)

    def images_of_set() -> Images:
        x, y = torch.as_tensor(pixels), torch.as_tensor(labels)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        held, rest = order[:HELD_OUT], order[HELD_OUT:]
        chosen = rest[: differs.get("training")]
        # The index has 8 bits a dimension; its products are bfloat16 where the processor has them.
        training = ReferenceSet(x[chosen], TorchIndex(), labels=y[chosen] if by_class else None)
        held_out = ReferenceSet(x[held], labels=y[held] if by_class else None)
        return Images(training, held_out, ReferenceSet(x[rest]))

    net = partial(
        UNet, in_channels=3, channels=16, multipliers=(1, 2, 2), blocks=1, num_classes=10 * by_class
    )
    lengths = Lengths(
        steps=6_000, consistency_steps=3_000, measurements=3, samples=5_000, held=2_000
    )
    return ImageSet(
        name,
        images_of_set,
        net,
        lengths._replace(**differs.get("lengths", {})),
        EfficientNetLite0(),
    )


def averaged(images: np.ndarray) -> np.ndarray:
    """Halve the sides of uint8 images (N, C, H, W) by the mean of each 2x2 block, rounded half to even."""
    n, c, height, width = images.shape
    blocks = images.reshape(n, c, height // 2, 2, width // 2, 2)
    return np.rint(blocks.astype(np.uint16).sum((3, 5)) / 4).astype(np.uint8)
