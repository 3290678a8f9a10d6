"""Sources of prepared images: zips and folders of image files, and CIFAR-10 of torchvision."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_knn.common.errors import InputError
from lit_knn.data.decoding import BadImageError, Options, decode
from lit_knn.data.file_names import CIFAR10_FOLDER
from lit_knn.data.files import Files, existing, opened, reading
from lit_knn.data.labels import NamedLabels, image_labels

__all__ = ["Options", "Source", "open_source"]


class Source(NamedTuple):
    """A set of images that are read one at a time."""

    names: list[str]  # one for each image, for messages
    read: Callable[[int], np.ndarray]  # (i) -> image i, (C, H, W) uint8; for several threads
    labels: np.ndarray | None  # (N,) int64
    origin: dict[str, Any]  # the `source`, `options`, and a `fingerprint` of images and labels
    changed: Callable[[], bool] = lambda: False  # tells whether the images have changed since
    class_names: list[str] | None = None  # of the classes 0, 1, …
    stamp: Callable[[int], str] | None = None  # (i) -> text that changes when image i does


@contextmanager
def open_source(path: str | os.PathLike[str], options: Options) -> Iterator[Source]:
    """Open the images to prepare.

    `path` is as for `read_image_files`, or a folder that has `cifar-10-batches-py`.
    """
    path = existing(path)
    if (path / CIFAR10_FOLDER).is_dir():
        yield _cifar10(path, options)
        return

    with opened(path) as files:
        (labels, class_names), origin = _labels_and_origin(files, options)

        def image(i: int) -> np.ndarray:
            try:
                return decode(files.read, files.images[i], options)
            except BadImageError:
                raise
            except InputError as error:
                raise InputError(f"{path}: {error}") from error

        def changed() -> bool:
            with suppress(InputError, OSError), opened(path) as now:
                return _labels_and_origin(now, options)[1] != origin
            return True

        def stamp(i: int) -> str:
            return _stamp(files, files.images[i])

        yield Source(files.images, image, labels, origin, changed, class_names, stamp)


def _labels_and_origin(files: Files, options: Options) -> tuple[NamedLabels, dict[str, Any]]:
    named = image_labels(files, options.labels_from_folders)
    stamps = (_stamp(files, name) for name in files.images)
    return named, _origin(files.path, options, stamps, named[0])


def _stamp(files: Files, name: str) -> str:
    return "\t".join([name, *map(str, files.stamp(name))])


def _cifar10(path: Path, options: Options) -> Source:
    """Open CIFAR-10's training images."""
    from PIL import Image
    from torchvision.datasets import CIFAR10

    if options.labels_from_folders:
        rule = "CIFAR-10 has labels of its own, --labels-from-folders does not go with it"
        raise InputError(f"{path}: {rule}")
    with reading(path / CIFAR10_FOLDER):
        dataset = CIFAR10(str(path), train=True, download=False)
    labels = np.array(dataset.targets, np.int64)
    names = [f"{CIFAR10_FOLDER} image {i}" for i in range(len(labels))]

    def image(i: int) -> np.ndarray:
        changed = options.sized(Image.fromarray(dataset.data[i]), names[i])
        return np.asarray(changed).transpose(2, 0, 1)

    # torchvision keeps a transposed view, and a hash needs the bytes in a row.
    pixels = hashlib.sha256(dataset.data.tobytes()).hexdigest()
    origin = _origin(path, options, [pixels], labels)
    return Source(names, image, labels, origin, class_names=dataset.classes)


def _origin(
    path: Path,
    options: Options,
    stamps: Iterable[str],
    labels: np.ndarray | None,
) -> dict[str, Any]:
    """Describe where images come from, and hash what must be the same to continue."""
    digest = hashlib.sha256()
    for stamp in stamps:
        digest.update(stamp.encode(errors="surrogateescape") + b"\n")
    digest.update(b"no labels" if labels is None else labels.astype("<i8").tobytes())

    how = {name: value for name, value in vars(options).items() if value}
    if not options.rgb:
        del how["background"]
    return {"source": path.name, "options": how, "fingerprint": digest.hexdigest()}
