"""`Images` reads prepared files and image files, as `Prepared` and `ImageFiles` do."""

import numpy as np
import pytest

from lit_knn.common.errors import InputError
from lit_knn.data import ImageFiles, Images, Prepared
from lit_knn.data.prepare_options import PrepareOptions
from lit_knn.data.prepared_writer import prepare
from tests.image_files import encoded, pixels, write_folder


@pytest.fixture
def photos(tmp_path):
    """A folder of two classes, and a prepared file of it."""
    names = [f"{name}/{i}.png" for name in ("cat", "dog") for i in range(3)]
    folder = write_folder(tmp_path / "photos", {name: encoded(pixels(6, 8, 3)) for name in names})
    prepare(folder, tmp_path / "photos.npy", PrepareOptions(labels_from_folders=True))
    return str(folder), str(tmp_path / "photos.npy")


@pytest.mark.parametrize("is_prepared", [False, True])
def test_own_images_are_those_of_the_file_or_the_folder(is_prepared, photos):
    path = photos[is_prepared]
    options = {} if is_prepared else {"labels_from_folders": True}
    same = Prepared(path) if is_prepared else ImageFiles(path, **options)
    data = Images(path, **options)
    assert data.stored() == same.stored()
    assert data.read_labels().tolist() == [0, 0, 0, 1, 1, 1]
    data.setup()
    same.setup()

    np.testing.assert_array_equal(data.reference.images, same.reference.images)
    assert data.reference.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.class_names == ["cat", "dog"]
    # Prepared images stay on the disk, and are known by their hash.
    assert (data.mapped, data.sha256) == (same.mapped, same.sha256)
    assert (data.sha256 is not None) == is_prepared


def test_options_of_labels_are_refused_for_a_prepared_file(photos):
    with pytest.raises(
        InputError,
        match=r"photos\.npy: data\.labels_from_folders is for image files: give --labels",
    ):
        Images(photos[1], labels_from_folders=True)
    with pytest.raises(InputError, match=r"photos\.npy: data\.label_key=y is for tables and tars"):
        Images(photos[1], label_key="y")
