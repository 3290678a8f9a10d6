"""Sources of prepared images: zips and folders of image files, and CIFAR-10 as torchvision stores it."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_knn.common.errors import InputError
from lit_knn.data.files import Files, existing, opened, reading
from lit_knn.data.image_files import NamedLabels, decode, image_labels

CIFAR10_FOLDER = "cifar-10-batches-py"
# Images in these modes lose only transparency in RGB. Other modes lose more: 16-bit values would be cut off at 255.
TO_RGB = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")


@dataclasses.dataclass(frozen=True)
class Options:
    """The changes made to each image, and the source of its label."""

    size: int | None = None  # width and height to resize to, with antialiasing (Lanczos); None keeps an image's own
    center_crop: bool = False  # first cut the largest square out of the middle
    rgb: bool = False  # convert grayscale, CMYK and transparent images to three channels
    labels_from_folders: bool = False  # label each image by its folder instead of `dataset.json`, see `image_labels`

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise InputError(f"--size must be at least 1, got {self.size}")

    def apply(self, image: Any, where: str) -> Any:
        """Change one `PIL.Image`. Error messages call the image `where`."""
        from PIL import Image

        if self.rgb and image.mode in TO_RGB:
            image = image.convert("RGB")
        width, height = image.size
        if self.center_crop:
            side = min(width, height)
            left, top = (width - side) // 2, (height - side) // 2
            image = image.crop((left, top, left + side, top + side))
        elif self.size is not None and width != height:
            raise InputError(f"{where} is {width}x{height}, which --size {self.size} would squeeze: add --center-crop")
        if self.size is None or image.size == (self.size, self.size):
            return image
        # For palettes and 1-bit pixels, Pillow would take the nearest pixel instead of averaging.
        return image.resize((self.size, self.size), Image.Resampling.LANCZOS) if image.mode in ("RGB", "L") else image


class Source(NamedTuple):
    """A set of images that are read one at a time."""

    names: list[str]  # one for each image, for messages
    read: Callable[[int], np.ndarray]  # (i) -> image i, (C, H, W) uint8, changed by the options; for several threads
    labels: np.ndarray | None  # (N,) int64
    origin: dict[str, Any]  # name of the `source`, `options`, and a `fingerprint` of images, labels and their order
    changed: Callable[[], bool] = lambda: False  # tells whether the images have changed since
    class_names: list[str] | None = None  # of the classes 0, 1, …


@contextmanager
def open_source(path: str | os.PathLike[str], options: Options) -> Iterator[Source]:
    """Open the images to prepare, at a path as for `read_image_files` or a folder that has `cifar-10-batches-py`."""
    path = existing(path)
    if (path / CIFAR10_FOLDER).is_dir():
        yield _cifar10(path, options)
        return

    def labels_and_origin(files: Files) -> tuple[NamedLabels, dict[str, Any]]:
        named = image_labels(files, options.labels_from_folders)
        stamps = ("\t".join([name, *map(str, files.stamp(name))]) for name in files.images)
        return named, _origin(path, options, stamps, named[0])

    with opened(path) as files:
        (labels, class_names), origin = labels_and_origin(files)

        def image(i: int) -> np.ndarray:
            name = files.images[i]
            return decode(files, name, lambda image: options.apply(image, f"{path}: {name}"))

        def changed() -> bool:
            with suppress(InputError, OSError), opened(path) as now:
                return labels_and_origin(now)[1] != origin
            return True

        yield Source(files.images, image, labels, origin, changed, class_names)


def _cifar10(path: Path, options: Options) -> Source:
    from PIL import Image
    from torchvision.datasets import CIFAR10

    if options.labels_from_folders:
        raise InputError(f"{path}: CIFAR-10 has labels of its own, --labels-from-folders does not go with it")
    with reading(path / CIFAR10_FOLDER):
        dataset = CIFAR10(str(path), train=True, download=False)
    labels = np.array(dataset.targets, np.int64)
    names = [f"{CIFAR10_FOLDER} image {i}" for i in range(len(labels))]

    def image(i: int) -> np.ndarray:
        return np.asarray(options.apply(Image.fromarray(dataset.data[i]), names[i])).transpose(2, 0, 1)

    # torchvision keeps a transposed view, and a hash needs the bytes in a row.
    pixels = hashlib.sha256(dataset.data.tobytes()).hexdigest()
    return Source(names, image, labels, _origin(path, options, [pixels], labels), class_names=dataset.classes)


def _origin(path: Path, options: Options, stamps: Iterable[str], labels: np.ndarray | None) -> dict[str, Any]:
    digest = hashlib.sha256()
    for stamp in stamps:
        digest.update(stamp.encode(errors="surrogateescape") + b"\n")
    digest.update(b"no labels" if labels is None else labels.astype("<i8").tobytes())
    how = {name: value for name, value in vars(options).items() if value}
    return {"source": path.name, "options": how, "fingerprint": digest.hexdigest()}
