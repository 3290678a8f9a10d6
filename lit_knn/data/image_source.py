"""Sources of prepared images: zips, folders and other stores of images, NumPy files, and CIFAR-10 of torchvision."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from lit_knn.common.errors import InputError, reading
from lit_knn.data.array_files import read_array_file
from lit_knn.data.array_keys import LABEL_KEYS
from lit_knn.data.bad_images import BadImageError
from lit_knn.data.decoding import decode
from lit_knn.data.file_names import CIFAR10_FOLDER
from lit_knn.data.files import Files, ImageLabels
from lit_knn.data.labels import image_labels
from lit_knn.data.prepare_options import PrepareOptions
from lit_knn.data.prepared import is_prepared, open_prepared
from lit_knn.data.stores import opened

# Bytes of pixels that are hashed at a time.
HASHED_BYTES = 64 * 2**20


class Origin(TypedDict):
    """Where prepared images come from, in their `.json`."""

    source: str  # name of the folder or zip
    options: dict[str, object]  # the `PrepareOptions` that are not off
    fingerprint: str  # hash of the images and labels, which an interrupted preparation needs unchanged to go on


class UnpreparedImages(NamedTuple):
    """A set of images that are read one at a time."""

    names: list[str]  # one for each image, for messages
    read: Callable[[int], np.ndarray]  # (i) -> image i, (C, H, W) uint8; for several threads
    labels: np.ndarray | None  # (N,) int64
    origin: Origin
    changed: Callable[[], bool] = lambda: (
        False
    )  # () -> whether the images have changed since they were opened
    class_names: list[str] | None = None  # of the classes 0, 1, …
    stamp: Callable[[int], str] | None = None  # (i) -> text that changes when image i does
    labels_problem: str = ""  # why the labels in a file are left out; "" if they are not


@contextmanager
def open_source(
    path: str | os.PathLike[str], options: PrepareOptions
) -> Iterator[UnpreparedImages]:
    """Open the images to prepare.

    `path` is as for `read_image_files`, or a NumPy file of pixels, or a folder that has `cifar-10-batches-py`.
    """
    folder = Path(path).expanduser()
    if (folder / CIFAR10_FOLDER).is_dir():
        yield _cifar10(folder, options)
        return
    if folder.suffix.lower() in (".npy", ".npz"):
        yield _numpy_file(folder, options)
        return

    with opened(path, options.label_key) as files:
        labels, origin = _labels_and_origin(files, options)

        def image(i: int) -> np.ndarray:
            try:
                return decode(files.read, files.images[i], options)
            except BadImageError:
                raise
            except InputError as error:
                raise InputError(f"{files.path}: {error}") from error

        def changed() -> bool:
            with suppress(InputError, OSError), opened(path, options.label_key) as now:
                return _labels_and_origin(now, options)[1] != origin
            return True

        def stamp(i: int) -> str:
            return _stamp(files, files.images[i])

        yield UnpreparedImages(
            names=files.images,
            read=image,
            labels=labels.numbers,
            origin=origin,
            changed=changed,
            class_names=labels.class_names,
            stamp=stamp,
            labels_problem=labels.problem,
        )


def _labels_and_origin(files: Files, options: PrepareOptions) -> tuple[ImageLabels, Origin]:
    """Return the labels of a folder or zip, and where its images come from."""
    # Labels that a key was given for are not left out.
    labels = image_labels(files, options.labels_from_folders, options.label_key is not None)
    stamps = (_stamp(files, name) for name in files.images)
    return labels, _origin(files.path, options, stamps, labels.numbers)


def _stamp(files: Files, name: str) -> str:
    """Return a text that changes when the file of this name does."""
    return "\t".join([name, *map(str, files.stamp(name))])


def _cifar10(path: Path, options: PrepareOptions) -> UnpreparedImages:
    """Open CIFAR-10's training images."""
    from torchvision.datasets import CIFAR10

    with reading(path / CIFAR10_FOLDER):
        dataset = CIFAR10(str(path), train=True, download=False)
    labels = np.array(dataset.targets, np.int64)
    return _pixels(path, options, np.moveaxis(dataset.data, 3, 1), labels, dataset.classes)


def _numpy_file(path: Path, options: PrepareOptions) -> UnpreparedImages:
    """Open the pixels of a file that `read_array_file` reads, or of prepared images."""
    if options.labels_from_folders or options.label_key:
        rule = f"labels are read from the keys {', '.join(LABEL_KEYS)} of an .npz file"
        raise InputError(f"{path} has no folders, and no label key to choose: {rule}")

    if is_prepared(path):
        mapped, description = open_prepared(path)
        if description.latents is not None:
            raise InputError(f"{path} holds latents, and latents are not prepared again")
        numbers = None if description.labels is None else np.array(description.labels)
        return _pixels(path, options, mapped, numbers, description.class_names)

    images, labels = read_array_file(path, floats_as_is=True)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        advice = "floats need no preparing: read them with --data Arrays"
        raise InputError(f"{path} holds {images.dtype}, and pixels are uint8; {advice}")
    return _pixels(path, options, images, labels)


def _pixels(
    path: Path,
    options: PrepareOptions,
    pixels: np.ndarray,
    labels: np.ndarray | None,
    class_names: list[str] | None = None,
) -> UnpreparedImages:
    """Describe images that are decoded already.

    Args:
        path: where they come from.
        options: the changes made to each image.
        pixels: (N, C, H, W) uint8, of 1 or 3 channels.
        labels: (N,), or None.
        class_names: of the classes 0, 1, …; None if they have no names.
    """
    from PIL import Image

    names = [f"{path.name} image {i}" for i in range(len(pixels))]

    def image(i: int) -> np.ndarray:
        # For Pillow, grayscale has no axis of channels.
        is_gray = pixels.shape[1] == 1
        picture = Image.fromarray(pixels[i, 0] if is_gray else pixels[i].transpose(1, 2, 0))
        changed = np.asarray(options.sized(options.coloured(picture, names[i]), names[i]))
        return changed[None] if changed.ndim == 2 else changed.transpose(2, 0, 1)

    digest = hashlib.sha256()
    for some in np.array_split(pixels, max(pixels.nbytes // HASHED_BYTES, 1)):
        # Channels come last in the bytes that are hashed, as in files of CIFAR-10.
        digest.update(np.moveaxis(some, 1, 3).tobytes())
    origin = _origin(path, options, [digest.hexdigest()], labels)
    return UnpreparedImages(names, image, labels, origin, class_names=class_names)


def _origin(
    path: Path,
    options: PrepareOptions,
    stamps: Iterable[str],
    labels: np.ndarray | None,
) -> Origin:
    """Describe where images come from.

    Args:
        path: the folder or zip.
        options: the options of the preparation.
        stamps: a text for each image, which changes when the image does.
        labels: (N,), or None.
    """
    digest = hashlib.sha256()
    for stamp in stamps:
        # On Linux, the name of a file may have bytes that are no UTF-8.
        digest.update(stamp.encode(errors="surrogateescape") + b"\n")
    digest.update(b"no labels" if labels is None else labels.astype("<i8").tobytes())

    how = {name: value for name, value in vars(options).items() if value}
    # Every `PrepareOptions` has a background, but only `rgb` uses it.
    if not options.rgb:
        del how["background"]
    return {"source": path.name, "options": how, "fingerprint": digest.hexdigest()}
