"""`lit-knn prepare` makes its file from NumPy files and from prepared files, too."""

import numpy as np
import pytest

from lit_knn.data import Images
from lit_knn.data.prepare_options import PrepareOptions
from lit_knn.data.prepared import read_prepared
from lit_knn.data.prepared_writer import prepare
from main import main
from tests.image_files import encoded, pixels, refusal, write_folder

LABELS = np.arange(12) % 3


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("keys", [("arr_0", "arr_1"), ("images", "labels"), ("faces", "label")])
def test_pixels_and_labels_of_an_npz_are_kept(keys, channels, tmp_path):
    images = pixels(12, channels, 7, 6)
    # ADM's samples have the channels last.
    stored = images.transpose(0, 2, 3, 1) if keys[0] == "arr_0" else images
    source, out = tmp_path / "a.npz", tmp_path / "out.npy"
    np.savez(source, **{keys[0]: stored, keys[1]: LABELS})

    main(["prepare", str(source), str(out)])
    made = read_prepared(out)
    np.testing.assert_array_equal(made.images, images)
    assert made.labels.tolist() == LABELS.tolist()
    for path in (source, out):
        assert Images(str(path)).read_labels().tolist() == LABELS.tolist()


def test_a_prepared_file_is_made_smaller_with_its_classes(tmp_path):
    names = [f"{name}/{i}.png" for name in ("cat", "dog") for i in range(3)]
    folder = write_folder(tmp_path / "photos", {name: encoded(pixels(8, 8, 3)) for name in names})
    by_folder = {"labels_from_folders": True}
    prepare(folder, tmp_path / "large.npy", PrepareOptions(**by_folder))
    prepare(folder, tmp_path / "small.npy", PrepareOptions(size=4, **by_folder))

    prepare(tmp_path / "large.npy", tmp_path / "made.npy", PrepareOptions(size=4))
    made, expected = (read_prepared(tmp_path / f"{name}.npy") for name in ("made", "small"))
    assert made.sha256 == expected.sha256
    assert (made.class_names, made.labels.tolist()) == (["cat", "dog"], [0, 0, 0, 1, 1, 1])


def test_floats_and_options_of_folders_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 3, 5, 5), np.float32))
    np.save(tmp_path / "b.npy", pixels(4, 3, 5, 5))
    told = refusal(prepare, tmp_path / "a.npy", tmp_path / "out.npy")
    assert "a.npy holds float32, and pixels are uint8" in told
    assert "read them with --data Arrays" in told
    for options in (PrepareOptions(labels_from_folders=True), PrepareOptions(label_key="kind")):
        told = refusal(prepare, tmp_path / "b.npy", tmp_path / "out.npy", options)
        assert "labels are read from the keys labels, label, arr_1" in told
