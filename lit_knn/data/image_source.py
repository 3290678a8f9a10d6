"""Sources of prepared images: zips and folders of image files, and CIFAR-10 as torchvision stores it."""

import dataclasses
import hashlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_knn.common.errors import InputError
from lit_knn.data.folder_labels import folder_labels
from lit_knn.data.image_files import Read, decode, existing, opened, read_labels, sorted_images

# An image of this width and height has 200 MB.
LARGEST_SIZE = 8192
CIFAR10_FOLDER = "cifar-10-batches-py"
# Images in these modes lose only transparency in RGB. Other modes lose more: 16-bit values would be cut off at 255.
TO_RGB = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")


@dataclasses.dataclass(frozen=True)
class Options:
    """The changes made to each image, and the source of its label.

    Attributes:
        size: width and height to which every image is resized with antialiasing (Lanczos); None keeps its own size.
        center_crop: first cut the largest square out of the middle.
        rgb: convert grayscale, CMYK and transparent images to three channels.
        labels_from_folders: number the top-level folders in the order of their names, and label each image by its
            folder. Otherwise labels come from `dataset.json`, if there is one.
    """

    size: int | None = None
    center_crop: bool = False
    rgb: bool = False
    labels_from_folders: bool = False

    def __post_init__(self) -> None:
        if self.size is not None and not 1 <= self.size <= LARGEST_SIZE:
            raise InputError(f"--size must be from 1 to {LARGEST_SIZE}, got {self.size}")

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
    """A set of images that are read one at a time.

    Attributes:
        names: one for each image, for messages.
        read: (i) -> image i, (C, H, W) uint8, changed by the options; safe to call from several threads.
        labels: (N,) int64, or None.
        origin: a description of the images that JSON can write: the name of the `source`, the `options`, and a
            `fingerprint`, which changes with any image, any label and their order.
        changed: tells whether the fingerprint is another one by now.
    """

    names: list[str]
    read: Callable[[int], np.ndarray]
    labels: np.ndarray | None
    origin: dict[str, Any]
    changed: Callable[[], bool] = lambda: False


@contextmanager
def open_source(path: str | os.PathLike[str], options: Options) -> Iterator[Source]:
    """Open the images that are to be prepared.

    Args:
        path: a .zip file or a folder of images in EDM's layout, see `read_image_files`; or a folder that holds
            `cifar-10-batches-py`: then the training images are used.
        options: the changes made to each image.

    Raises:
        InputError: a path that does not exist, no images, labels that do not match.
    """
    path = existing(path)
    if (path / CIFAR10_FOLDER).is_dir():
        yield _cifar10(path, options)
        return
    with opened(path) as (all_names, read):
        names = sorted_images(path, all_names)
        labels = _labels(path, options, all_names, names, read)
        origin = _origin(path, options, _stamps(path, names), labels)

        def image(i: int) -> np.ndarray:
            return decode(path, names[i], read, lambda image: options.apply(image, f"{path}: {names[i]}"))

        yield Source(names, image, labels, origin, lambda: _origin_now(path, options) != origin)


def _origin_now(path: Path, options: Options) -> dict[str, Any] | None:
    """Read the source's origin again; None if this is not possible any more."""
    try:
        with opened(path) as (all_names, read):
            names = sorted_images(path, all_names)
            return _origin(path, options, _stamps(path, names), _labels(path, options, all_names, names, read))
    except (InputError, OSError, KeyError):
        return None


def _labels(path: Path, options: Options, all_names: list[str], names: list[str], read: Read) -> np.ndarray | None:
    return folder_labels(path, names) if options.labels_from_folders else read_labels(path, all_names, names, read)


def _stamps(path: Path, names: list[str]) -> Iterator[str]:
    """Identify each image by its size and by its CRC or time of change, without reading the image."""
    if path.is_dir():
        for name in names:
            status = (path / name).stat()
            yield f"{name}\t{status.st_size}\t{status.st_mtime_ns}"
    else:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                entry = archive.getinfo(name)
                yield f"{name}\t{entry.file_size}\t{entry.CRC}"


def _cifar10(path: Path, options: Options) -> Source:
    from PIL import Image
    from torchvision.datasets import CIFAR10

    if options.labels_from_folders:
        raise InputError(f"{path}: CIFAR-10 has labels of its own, --labels-from-folders does not go with it")
    try:
        dataset = CIFAR10(str(path), train=True, download=False)
    except (RuntimeError, OSError) as error:
        raise InputError(f"{path} has no intact {CIFAR10_FOLDER}") from error
    labels = np.array(dataset.targets, np.int64)
    names = [f"{CIFAR10_FOLDER} image {i}" for i in range(len(labels))]

    def image(i: int) -> np.ndarray:
        return np.asarray(options.apply(Image.fromarray(dataset.data[i]), names[i])).transpose(2, 0, 1)

    pixels = hashlib.sha256(dataset.data).hexdigest()
    return Source(names, image, labels, _origin(path, options, [pixels], labels))


def _origin(path: Path, options: Options, stamps: Iterable[str], labels: np.ndarray | None) -> dict[str, Any]:
    digest = hashlib.sha256()
    for stamp in stamps:
        digest.update(stamp.encode(errors="surrogateescape") + b"\n")
    digest.update(b"no labels" if labels is None else labels.astype("<i8").tobytes())
    how = {name: value for name, value in vars(options).items() if value}
    return {"source": path.name, "options": how, "fingerprint": digest.hexdigest()}
