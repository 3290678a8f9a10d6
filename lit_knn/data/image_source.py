"""Sources of prepared images: zips and folders of image files, and CIFAR-10 of torchvision."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from lit_knn.common.errors import InputError, reading
from lit_knn.data.bad_images import BadImageError
from lit_knn.data.decoding import decode
from lit_knn.data.file_names import CIFAR10_FOLDER
from lit_knn.data.files import Files, existing, opened
from lit_knn.data.labels import ImageLabels, image_labels
from lit_knn.data.prepare_options import PrepareOptions


class Origin(TypedDict):
    """Where prepared images come from, in their `.json`."""

    source: str  # name of the folder or zip
    options: dict[str, object]  # the `PrepareOptions` that are not off
    fingerprint: str  # hash of what must be the same to continue: images and labels


class UnpreparedImages(NamedTuple):
    """A set of images that are read one at a time."""

    names: list[str]  # one for each image, for messages
    read: Callable[[int], np.ndarray]  # (i) -> image i, (C, H, W) uint8; for several threads
    labels: np.ndarray | None  # (N,) int64
    origin: Origin
    changed: Callable[[], bool] = lambda: False  # tells whether the images have changed since
    class_names: list[str] | None = None  # of the classes 0, 1, …
    stamp: Callable[[int], str] | None = None  # (i) -> text that changes when image i does
    labels_problem: str = ""  # why the labels of a file are left out


@contextmanager
def open_source(
    path: str | os.PathLike[str], options: PrepareOptions
) -> Iterator[UnpreparedImages]:
    """Open the images to prepare.

    `path` is as for `read_image_files`, or a folder that has `cifar-10-batches-py`.
    """
    path = existing(path)
    if (path / CIFAR10_FOLDER).is_dir():
        yield _cifar10(path, options)
        return

    with opened(path) as files:
        labels, origin = _labels_and_origin(files, options)

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

        yield UnpreparedImages(
            files.images,
            image,
            labels.numbers,
            origin,
            changed,
            labels.class_names,
            stamp,
            labels.problem,
        )


def _labels_and_origin(files: Files, options: PrepareOptions) -> tuple[ImageLabels, Origin]:
    labels = image_labels(files, options.labels_from_folders)
    stamps = (_stamp(files, name) for name in files.images)
    return labels, _origin(files.path, options, stamps, labels.numbers)


def _stamp(files: Files, name: str) -> str:
    return "\t".join([name, *map(str, files.stamp(name))])


def _cifar10(path: Path, options: PrepareOptions) -> UnpreparedImages:
    """Open CIFAR-10's training images."""
    from PIL import Image
    from torchvision.datasets import CIFAR10

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
    return UnpreparedImages(names, image, labels, origin, class_names=dataset.classes)


def _origin(
    path: Path,
    options: PrepareOptions,
    stamps: Iterable[str],
    labels: np.ndarray | None,
) -> Origin:
    """Describe where images come from, and hash what must be the same to continue."""
    digest = hashlib.sha256()
    for stamp in stamps:
        digest.update(stamp.encode(errors="surrogateescape") + b"\n")
    digest.update(b"no labels" if labels is None else labels.astype("<i8").tobytes())

    how = {name: value for name, value in vars(options).items() if value}
    if not options.rgb:
        del how["background"]
    return {"source": path.name, "options": how, "fingerprint": digest.hexdigest()}
