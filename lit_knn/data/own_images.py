"""The data module of your own images, prepared or not."""

from typing import Any

from lit_knn.common.errors import InputError
from lit_knn.data.base import DataLayout, Images, Labels, ReferenceDataModule
from lit_knn.data.modules import ImageFiles, Prepared


class OwnImages(ReferenceDataModule):
    """Your own images: a file of `lit-knn prepare`, or image files of one size.

    A path that ends in .npy is read as `Prepared` does, and any other one as `ImageFiles` does.

    Args:
        path: the .npy file of `lit-knn prepare`, or the .zip file or the folder of image files.
        labels_from_folders: label each image file by its folder, see `ImageFiles`.
    """

    def __init__(self, path: str, labels_from_folders: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.labels_from_folders = labels_from_folders
        self.source: Prepared | ImageFiles = ImageFiles(path, labels_from_folders)
        if path.lower().endswith(".npy"):
            if labels_from_folders:
                rule = "is for image files: give --labels-from-folders to lit-knn prepare"
                raise InputError(f"data.path={path}: data.labels_from_folders {rule}")
            self.source = Prepared(path)
        self.mapped = self.source.mapped

    def load(self) -> tuple[Images, Labels]:
        # `self.source` asks the trainer's model whether labels are used.
        self.source.trainer = self.trainer
        images, labels = self.source.load()
        self.sha256, self.class_names = self.source.sha256, self.source.class_names
        return images, labels

    def read_labels(self) -> Labels:
        return self.source.read_labels()

    def stored(self) -> DataLayout:
        return self.source.stored()
