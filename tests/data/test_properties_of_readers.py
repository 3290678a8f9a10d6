"""What is written is read back: images, arrays, labels and networks of any shape and type."""

import json
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lit_knn.data.array_files import array_file_shape, read_array_file
from lit_knn.data.image_files import count_image_files, read_image_files
from lit_knn.data.image_source import Options
from lit_knn.data.prepared import read_prepared, verify
from lit_knn.data.prepared_writer import prepare
from tests.image_files import encoded

LABELS = st.integers(0, 2**31 - 1)
# Names of files in a zip: any text that is no path, no hidden file, and different for every image.
NAMES = st.lists(
    st.text(st.characters(exclude_characters="/\\:\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
        lambda name: not name.startswith(".")
    ),
    min_size=1, max_size=6, unique=True,
)  # fmt: skip


@given(NAMES, st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans(), st.data())
def test_images_of_a_zip_come_back_sorted_with_their_labels(names, height, width, colour, with_labels, data):
    shape = (height, width, 3) if colour else (height, width)
    pictures = {f"{name}.png": data.draw(hnp.arrays(np.uint8, shape)) for name in names}
    labels = {name: data.draw(LABELS) for name in pictures}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.zip")
        with zipfile.ZipFile(path, "w", data.draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))) as file:
            for name, picture in pictures.items():
                file.writestr(name, encoded(picture))
            if with_labels:
                file.writestr("dataset.json", json.dumps({"labels": list(labels.items())}))
        images, found, _ = read_image_files(path)
        assert count_image_files(path) == images.shape == (len(names), 3 if colour else 1, height, width)
        for image, name in zip(images, sorted(pictures), strict=True):
            np.testing.assert_array_equal(
                image if colour else image[0], np.moveaxis(pictures[name], -1, 0) if colour else pictures[name]
            )
        assert found is None if not with_labels else found.tolist() == [labels[name] for name in sorted(labels)]
        prepare(path, Path(folder, "x.npy"), Options(rgb=data.draw(st.booleans())), workers=1, block_images=2)
        prepared = read_prepared(Path(folder, "x.npy"))
        np.testing.assert_array_equal(prepared.images.numpy(), np.broadcast_to(images, prepared.images.shape))
        assert (prepared.labels is None) == (found is None)
        assert found is None or (prepared.labels == found).all()
        verify(Path(folder, "x.npy"))


FLOATS = st.sampled_from(["<f2", "<f4", "<f8", ">f4", ">f8"])
SHAPES = hnp.array_shapes(min_dims=2, max_dims=5, max_side=5)


@given(st.data(), SHAPES, FLOATS, st.booleans(), st.sampled_from(["npy", "npz", "compressed"]))
def test_floats_come_back_as_float32(data, shape, dtype, fortran, kind):
    array = data.draw(hnp.arrays(dtype, shape, elements=st.floats(-1, 1, width=16)))
    labels = data.draw(hnp.arrays(data.draw(st.sampled_from(["<i8", "<u4", ">i4", "<u8"])), shape[:1], elements=LABELS))
    stored = np.asfortranarray(array) if fortran else array
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a.{'npy' if kind == 'npy' else 'npz'}")
        if kind == "npy":
            np.save(path, stored)
        else:
            (np.savez if kind == "npz" else np.savez_compressed)(path, images=stored, labels=labels)
        found, found_labels = read_array_file(path, floats_as_is=True)
        if kind == "npy":
            assert array_file_shape(path) == (shape, 4)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, array.astype(np.float32))
    assert found_labels is None if kind == "npy" else (found_labels == labels).all()


@given(st.data(), st.integers(1, 5), st.sampled_from([1, 3]), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_pixels_come_back_with_the_channels_first(data, N, channels, height, width, last):
    array = data.draw(hnp.arrays(np.uint8, (N, channels, height, width)))
    # With one or three rows, channels last cannot be told from channels first.
    last = last and height not in (1, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.npy")
        np.save(path, np.moveaxis(array, 1, 3) if last else array)
        np.testing.assert_array_equal(read_array_file(path)[0], array)
        assert array_file_shape(path) == (array.shape, 1)
