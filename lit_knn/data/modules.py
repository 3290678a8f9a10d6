"""LightningDataModules of known data sets, image files, prepared files and arrays."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.rng import keyed_generator
from lit_knn.data.array_files import array_file_shape, read_array_file
from lit_knn.data.base import DataLayout, Images, Labels, ReferenceDataModule
from lit_knn.data.image_files import count_image_files, read_image_files, read_image_labels
from lit_knn.data.prepared import read_prepared
from lit_knn.data.reading import read_digits
from lit_knn.reference.classes import lie_together

if TYPE_CHECKING:
    from torchvision import datasets

T = TypeVar("T")


class Digits(ReferenceDataModule):
    """The 1,797 handwritten digits of scikit-learn, 8x8, grayscale, with labels. Nothing is downloaded."""

    def load(self) -> tuple[Images, Labels]:
        return read_digits()

    def stored(self) -> DataLayout:
        return DataLayout((1797, 1, 8, 8))


class PointsOnALine(ReferenceDataModule):
    """Toy data: points on a line, (N, 1), drawn from three Gaussians around −0.6, 0.1 and 0.7; `seed` fixes them.

    The label of a point is the number of its Gaussian.

    Args:
        num_points: N.
    """

    def __init__(self, num_points: int = 40, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_points = num_points

    def load(self) -> tuple[Images, Labels]:
        generator = keyed_generator("cpu", self.seed)
        component = torch.randint(3, (self.num_points,), generator=generator)
        centre, width = torch.tensor([[-0.6, 0.1, 0.7], [0.2, 0.2, 0.15]])[:, component]
        points = centre + width * torch.randn(self.num_points, generator=generator)
        return points.unsqueeze(1), component

    def stored(self) -> DataLayout:
        return DataLayout((self.num_points, 1), value_bytes=4)


class CIFAR10(ReferenceDataModule):
    """The 50,000 training images of CIFAR-10, 32x32, with labels, through torchvision.

    Args:
        root: folder of `cifar-10-batches-py`; downloads go there, too.
        download: download the data set if it is not there.
    """

    def __init__(self, root: str = "data", download: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.download = download

    def prepare_data(self) -> None:
        if self.download:
            self._dataset(download=True)

    def load(self) -> tuple[Images, Labels]:
        dataset = self._dataset(download=False)
        self.class_names = dataset.classes
        return np.ascontiguousarray(dataset.data.transpose(0, 3, 1, 2)), np.array(dataset.targets)

    def stored(self) -> DataLayout:
        return DataLayout((50_000, 3, 32, 32))

    def _dataset(self, download: bool) -> "datasets.CIFAR10":
        """Open the training images; with `download`, torchvision downloads them first if they are missing."""
        from torchvision.datasets import CIFAR10 as TorchvisionCIFAR10

        try:
            return TorchvisionCIFAR10(self.root, train=True, download=download)
        except (RuntimeError, OSError) as error:
            advice = f": {error}" if download else "; put it there or set data.download to true"
            problem = f"data.root={self.root} has no intact cifar-10-batches-py"
            raise InputError(f"{problem}{advice}") from error


class ImageFiles(ReferenceDataModule):
    """Image files of one size, RGB or grayscale, in a zip or a folder, in the layout of EDM's data sets.

    PNG, JPEG, WebP, BMP, GIF and TIFF are read. One line counts the other image files, and those of several frames.
    Labels come from `dataset.json` at the root, if there is one: {"labels": [["00000/img00000.png", 6], ...]}.
    Tars of WebDataset, tables of Hugging Face `datasets` and LMDBs are read, too; all images go into memory.

    Args:
        path: the .zip file or the folder, or another store of images, see `lit-knn prepare --help`.
        labels_from_folders: label each image with the place of its folder among all, sorted by name, from 0, as
            torchvision's `ImageFolder` does for `path/CLASS/0.png`; `dataset.json` is then not read.
        label_key: the column of a table, or the key in a tar's `.json` files, that has the labels; null for a table's
            `ClassLabel` or column `label`, and for a tar's `.cls` files.
    """

    def __init__(
        self,
        path: str,
        labels_from_folders: bool = False,
        label_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.labels_from_folders = labels_from_folders
        self.label_key = label_key

    def load(self) -> tuple[Images, Labels]:
        how = (self.labels_from_folders, self.labels_used, self.label_key)
        images, labels, self.class_names = _read(read_image_files, self.path, *how)
        return images, labels

    def read_labels(self) -> Labels:
        return _read(read_image_labels, self.path, self.labels_from_folders, self.label_key)

    def stored(self) -> DataLayout:
        return DataLayout(_read(count_image_files, self.path), by_class=self.labels_from_folders)


class Prepared(ReferenceDataModule):
    """Images in an .npy file that `lit-knn prepare` wrote, with its .json. They may be larger than memory.

    The ranks of a machine share the pages that they read. With a GPU, the images are copied to it.

    Args:
        path: the .npy file.
    """

    mapped = True

    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path

    def load(self) -> tuple[Images, Labels]:
        prepared = _read(read_prepared, self.path)
        self.sha256, self.class_names = prepared.sha256, prepared.class_names
        if self.labels_used and prepared.labels is None:
            advice = "prepare it with a dataset.json, or with --labels-from-folders"
            raise InputError(f"data.path={self.path} has no labels: {advice}")
        return prepared.images, prepared.labels

    def stored(self) -> DataLayout:
        prepared = _read(read_prepared, self.path)
        by_class = prepared.labels is not None and lie_together(torch.from_numpy(prepared.labels))
        return DataLayout(tuple(prepared.images.shape), by_class=by_class)


class Arrays(ReferenceDataModule):
    """Images, latents or vectors in an .npy or .npz file.

    uint8 images are (N, C, H, W) or (N, H, W, C) with 1 or 3 channels. Floats are (N, *shape) and never rescaled;
    float images should be in [-1, 1]. float16 and bfloat16 in an .npy file stay on the disk, and may be larger than
    memory; other arrays are read into memory.

    Args:
        path: an .npy file, or an .npz file. Its array has the name `images` or `arr_0`, or any name if it is the only
            one; integer `labels` are optional, beside `arr_0` also as `arr_1`.
        floats_as_is: also accept floats that look like images by mistake: those of 1 or 3 channels whose values leave
            [-1, 1] or are never negative, and those with the channels last.
    """

    def __init__(self, path: str, floats_as_is: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.floats_as_is = floats_as_is

    def load(self) -> tuple[Images, Labels]:
        self.stored()  # It sets `mapped`.
        return _read(read_array_file, self.path, self.floats_as_is, self.labels_used)

    def stored(self) -> DataLayout | None:
        known = _read(array_file_shape, self.path)
        if known is None:
            return None
        # An .npy file of 16-bit floats stays on the disk.
        self.mapped = known[1] == 2
        return DataLayout(*known)


def _read(reader: Callable[..., T], path: str, *options: object) -> T:
    """Return what `reader` reads from `path`; its errors then begin with the option `data.path`."""
    with prefixed(f"data.path={path}"):
        return reader(path, *options)
