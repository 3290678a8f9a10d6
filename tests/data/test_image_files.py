"""Image and array files as they come: pixels, classes and labels that are read, and files that are refused by name."""

import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from torchvision.datasets import ImageFolder

from lit_knn.data import Arrays, ImageFiles
from lit_knn.data.array_files import array_file_shape, read_array_file
from lit_knn.data.image_files import count_image_files, read_image_files
from lit_knn.data.prepare_options import PrepareOptions
from lit_knn.data.prepared import read_prepared, verify
from lit_knn.data.prepared_writer import prepare
from lit_knn.data.reading import reference_from
from tests.image_files import both, encoded, labels_json, pixels, refusal, write_folder, write_zip

LABELS = st.integers(0, 2**31 - 1)
# Names of files in a zip: any text that is no path, no hidden file, and different for every image.
NAMES = st.lists(
    st.text(st.characters(exclude_characters="/\\:\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
        lambda name: not name.startswith(".")
    ),
    min_size=1, max_size=6, unique=True,
)  # fmt: skip


@given(NAMES, st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans(), st.data())
def test_images_of_a_zip_come_back_sorted_with_their_labels(
    names, height, width, colour, with_labels, data
):
    shape = (height, width, 3) if colour else (height, width)
    pictures = {f"{name}.png": data.draw(hnp.arrays(np.uint8, shape)) for name in names}
    labels = {name: data.draw(LABELS) for name in pictures}
    files = {name: encoded(picture) for name, picture in pictures.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = write_zip(
            Path(folder, "a.zip"), files | (labels_json([*labels.items()]) if with_labels else {})
        )
        images, found, _ = read_image_files(path)
        assert (
            count_image_files(path)
            == images.shape
            == (len(names), 3 if colour else 1, height, width)
        )
        expected = np.stack(
            [pictures[name].reshape(height, width, -1) for name in sorted(pictures)]
        )
        np.testing.assert_array_equal(images, np.moveaxis(expected, -1, 1))
        assert (
            found is None
            if not with_labels
            else found.tolist() == [labels[name] for name in sorted(labels)]
        )
        prepare(
            path,
            Path(folder, "x.npy"),
            PrepareOptions(rgb=data.draw(st.booleans())),
            workers=1,
            block_images=2,
        )
        prepared = read_prepared(Path(folder, "x.npy"))
        np.testing.assert_array_equal(
            prepared.images.numpy(), np.broadcast_to(images, prepared.images.shape)
        )
        assert prepared.labels is None if found is None else (prepared.labels == found).all()
        verify(Path(folder, "x.npy"))


# Folders and zips of images


def test_folders_are_searched_without_hidden_and_other_files(tmp_path):
    pictures = pixels(3, 4, 6, 3)
    files = {
        name: encoded(pictures[i]) for i, name in ((1, "a/1.png"), (2, "b/0.PNG"), (0, "a/0.png"))
    }
    files |= {
        "a/notes.txt": b"not an image",
        "__MACOSX/a/._0.png": b"nor this",
        "a/.thumbnails/0.png": b"nor this",
    }
    files |= labels_json([["b/0.PNG", 7], ["a/0.png", 2**31 - 1], ["a/1.png", 6]])
    for path in both(tmp_path, files):
        images, labels, _ = read_image_files(path)
        assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
        assert labels.tolist() == [2**31 - 1, 6, 7]
        np.testing.assert_array_equal(images, np.moveaxis(pictures, -1, 1))
    path = write_zip(
        tmp_path / "above.zip", {f"../photos/{i}.png": encoded(pixels(4, 4)) for i in range(2)}
    )
    assert len(read_image_files(path)[0]) == 2


def test_a_palette_has_its_colours_and_jpeg_its_loss(tmp_path):
    palette = Image.fromarray(pixels(3, 5) % 4).convert("P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 8, 7])
    (tmp_path / "palette").mkdir()
    palette.save(tmp_path / "palette" / "0.png")
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 8, 7]], np.uint8)[
        np.asarray(palette)
    ]
    np.testing.assert_array_equal(
        read_image_files(tmp_path / "palette")[0][0], np.moveaxis(colours, -1, 0)
    )
    flat = np.full((8, 8, 3), (200, 100, 50), np.uint8)
    images, *_ = read_image_files(
        write_folder(tmp_path / "jpeg", {"0.jpeg": encoded(flat, "JPEG")})
    )
    assert np.abs(images[0].astype(int) - np.moveaxis(flat, -1, 0)).max() <= 3


def test_mixed_and_damaged_images_are_refused_by_name(tmp_path):
    for other, described in (
        (pixels(4, 5, 3), "a.png is 4x4 with 3 channels and b.png is 5x4 with 3 channels"),
        (pixels(4, 4), "3 channels and b.png is 4x4 with 1 channel"),
    ):
        files = {"a.png": encoded(pixels(4, 4, 3)), "b.png": encoded(other)}
        assert described in refusal(read_image_files, write_zip(tmp_path / "mixed.zip", files))
    good = pixels(32, 32, 3)
    for content in (b"not an image", encoded(good, "JPEG")[:-200], encoded(good)[:-200]):
        for path in both(tmp_path, {"a.png": encoded(good), "sub/bad.jpg": content}):
            assert f"{path}: sub/bad.jpg" in refusal(read_image_files, path)


def test_all_bad_files_are_named_at_once(tmp_path):
    cut, good = encoded(pixels(8, 8, 3))[:-40], encoded(pixels(8, 8, 3))
    files = {f"{i:02}.png": cut for i in range(13)} | {"empty.png": b"", "good.png": good}
    told = refusal(read_image_files, write_folder(tmp_path / "s", files))
    assert "14 of 15 image files are bad: 00.png cannot be read as an image" in told
    assert "09.png" in told
    assert "10.png" not in told
    assert told.endswith("; and 4 more; lit-knn prepare --skip-bad leaves such files out")


@pytest.mark.parametrize(
    ("folders", "line"),
    [
        (["one"], "labels from folders need several folders, there is only one"),
        (["\u00e9", "e\u0301", "b"], "two folders have the name \u00e9"),
    ],
)
def test_one_folder_and_two_of_a_name_are_no_classes(tmp_path, folders, line):
    files = {f"{name}/0.png": encoded(pixels(4, 4)) for name in folders}
    assert line in refusal(read_image_files, write_folder(tmp_path / "s", files), True)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["./a.png", ".\\a.png", "dataset.json"])
def test_zip_that_holds_a_name_twice_is_refused(tmp_path, name):
    image = encoded(pixels(4, 4))
    path = write_zip(tmp_path / "a.zip", {"a.png": image, **labels_json(None)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, image)
    line = refusal(read_image_files, path)
    assert "holds two files of the name" in line
    assert line.endswith(name[-5:])


def test_a_dataset_json_of_another_program_says_what_it_lacks(tmp_path):
    files = {"a.png": encoded(pixels(4, 4)), "dataset.json": b'{"images": [], "annotations": []}'}
    told = refusal(read_image_files, write_folder(tmp_path / "coco", files), labels_used=True)
    assert told.endswith(
        'cannot be read: it has no key labels; it must be {"labels": [[file name, integer], ...]}'
    )


@pytest.mark.parametrize(
    ("labels", "part"),
    [
        (5, 'it must be {"labels": [[file name, integer], ...]}'),
        ([["a.png", 1], ["b.png", 1.5]], "but has ['b.png', 1.5]"),
        ([["a.png", -1], ["b.png", 1]], "but has ['a.png', -1]"),
        ([["a.png", 1], ["a.png", 1]], "list each image once"),
        ([["b.png", 1]], "1 labels for 2 images; it lacks a.png"),
        ([["a.png", 1], ["b.png", 1], ["c.png", 2]], "it names c.png, which is no file"),
    ],
)
def test_labels_that_do_not_match_are_refused_if_they_are_used(tmp_path, labels, part, capsys):
    image = encoded(pixels(2, 2, 3))
    path = write_folder(tmp_path / "s", {"a.png": image, "b.png": image, **labels_json(labels)})
    assert part in refusal(read_image_files, path, labels_used=True)
    for found in (read_image_files(path)[1], prepare(path, tmp_path / "x.npy").labels):
        assert found is None
    said = capsys.readouterr().err
    assert said.count("it is left out, and the images have no labels\n") == 1
    assert part in said


def test_a_label_file_of_another_program_is_left_out(tmp_path):
    image = encoded(pixels(2, 2, 3))
    for name, content in (
        ("camera", [["a.png", [1.0, 0.0]]]),
        ("nnu-net", {"background": 0, "liver": 1}),
    ):
        path = write_folder(tmp_path / name, {"a.png": image, **labels_json(content)})
        assert read_image_files(path)[1] is None
    below = write_folder(tmp_path / "below", {"in/a.png": image} | {"in/dataset.json": b"{}"})
    assert read_image_files(below)[1] is None
    assert "dataset.json must be at the root" in refusal(read_image_files, below, labels_used=True)
    (below / "in" / "dataset.json").unlink()
    assert "has no labels: list them in dataset.json" in refusal(
        read_image_files, below, labels_used=True
    )


def test_names_agree_in_both_unicode_forms_and_with_backslashes(tmp_path):
    composed, apart = "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe\N{COMBINING ACUTE ACCENT}"
    image = encoded(pixels(2, 2, 3))
    for i, (stored, listed) in enumerate(((composed, apart), (apart, composed))):
        labels = labels_json([["b\\0.png", 3], [f"{listed}\\0.png", 5]])
        for path in both(
            tmp_path / str(i), {"b/0.png": image, f"{stored}\\0.png": image, **labels}
        ):
            assert read_image_files(path)[1].tolist() == [3, 5]
            # Keyboards write the composed form.
            assert read_image_files(path, True)[1:][1] == ["b", composed]


# Labels from folders. Sorted by full path, the images of "a" come after those of "a-b".
FOLDERS = {
    f"{folder}/{i}.png": encoded(pixels(4, 4, 3))
    for folder in ("dog", "a", "a-b", "10")
    for i in range(3)
}


def test_labels_of_folders_are_those_of_torchvision(tmp_path):
    folder = write_folder(tmp_path / "s", FOLDERS)
    theirs = sorted((image.tobytes(), label) for image, label in ImageFolder(folder))
    # A zip may have entries of folders, and dataset.json is not read.
    zipped = {
        "dog/": b"",
        "__MACOSX/dog/._0.png": b"",
        **FOLDERS,
        **labels_json([[name, 7] for name in FOLDERS]),
    }
    for path in (folder, write_zip(tmp_path / "s.zip", zipped)):
        data = ImageFiles(str(path), labels_from_folders=True)
        images, labels = data.load()
        ours = [
            (image.transpose(1, 2, 0).tobytes(), label)
            for image, label in zip(images, labels, strict=True)
        ]
        assert sorted(ours) == theirs
        assert data.stored() == ((12, 3, 4, 4), 1, True)
        out = tmp_path / f"{path.name}.npy"
        prepare(path, out, PrepareOptions(labels_from_folders=True))
        prepared = read_prepared(out)
        assert prepared.labels.tolist() == labels.tolist()
        assert prepared.class_names == data.class_names == ImageFolder(folder).classes
    assert ImageFiles(str(folder)).load()[1] is None


def test_class_folders_may_be_links(tmp_path):
    elsewhere, linked = write_folder(tmp_path / "elsewhere", FOLDERS), tmp_path / "linked"
    linked.mkdir()
    for folder in elsewhere.iterdir():
        (linked / folder.name).symlink_to(folder)
    for there, here in zip(
        *(read_image_files(path, True) for path in (elsewhere, linked)), strict=True
    ):
        np.testing.assert_array_equal(there, here)


def test_a_link_to_a_folder_above_it_is_refused(tmp_path):
    folder = write_folder(tmp_path / "images", FOLDERS)
    (folder / "again").symlink_to(folder)
    assert refusal(read_image_files, folder) == f"{folder / 'again'} is a link to a folder above it"


def test_a_folder_may_be_given_from_below(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "images", FOLDERS)
    expected, (first, *_) = (
        read_image_files(folder, True),
        (path for path in folder.iterdir() if path.is_dir()),
    )
    monkeypatch.chdir(first)
    for there, here in zip(expected, read_image_files("..", True), strict=True):
        np.testing.assert_array_equal(there, here)


def test_folders_that_are_no_classes_are_refused(tmp_path):
    image = encoded(pixels(4, 4, 3))
    cases = {
        "beside": (FOLDERS | {"b.png": image}, "b.png is in none"),
        "outer": (
            {f"all/{name}": image for name in FOLDERS},
            "10/0.png is 2 folders deep: give the folder all, or a zip",
        ),
        "deep": (FOLDERS | {"dog/big/7.png": image}, "dog/big/7.png is 2 folders deep"),
        "empty": (FOLDERS | {"notes/readme.txt": b""}, "the folder notes holds no image"),
    }
    for name, (files, words) in cases.items():
        for path in (
            write_folder(tmp_path / name, files),
            write_zip(tmp_path / f"{name}.zip", files),
        ):
            told = refusal(
                prepare, path, tmp_path / "x.npy", PrepareOptions(labels_from_folders=True)
            )
            assert words in told
            assert (
                refusal(ImageFiles(str(path), labels_from_folders=True).load)
                == f"data.path={path}: {told}"
            )


# Arrays

FLOATS = st.sampled_from(["<f2", "<f4", "<f8", ">f4", ">f8"])
SHAPES = hnp.array_shapes(min_dims=2, max_dims=5, max_side=5)


@given(st.data(), SHAPES, FLOATS, st.booleans(), st.sampled_from(["npy", "npz", "compressed"]))
def test_floats_come_back_in_float32_or_their_16_bits(data, shape, dtype, fortran, kind):
    array = data.draw(hnp.arrays(dtype, shape, elements=st.floats(-1, 1, width=16)))
    labels = data.draw(
        hnp.arrays(
            data.draw(st.sampled_from(["<i8", "<u4", ">i4", "<u8"])), shape[:1], elements=LABELS
        )
    )
    stored = np.asfortranarray(array) if fortran else array
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a.{'npy' if kind == 'npy' else 'npz'}")
        if kind == "npy":
            np.save(path, stored)
            assert array_file_shape(path) == (shape, min(array.itemsize, 4))
        else:
            (np.savez if kind == "npz" else np.savez_compressed)(path, images=stored, labels=labels)
        found, found_labels = read_array_file(path, floats_as_is=True)
    assert found.dtype == (torch.float16 if array.itemsize == 2 else np.float32)
    np.testing.assert_array_equal(found, array.astype(np.float32))
    assert found_labels is None if kind == "npy" else (found_labels == labels).all()


@given(
    st.data(),
    st.integers(1, 5),
    st.sampled_from([1, 3]),
    st.integers(1, 6),
    st.integers(1, 6),
    st.booleans(),
)
def test_pixels_come_back_with_the_channels_first(data, N, channels, height, width, last):
    array = data.draw(hnp.arrays(np.uint8, (N, channels, height, width)))
    # With one or three rows, channels last cannot be told from channels first.
    last = last and height not in (1, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.npy")
        np.save(path, np.moveaxis(array, 1, 3) if last else array)
        np.testing.assert_array_equal(read_array_file(path)[0], array)
        assert array_file_shape(path) == (array.shape, 1)


def test_the_shape_of_what_is_no_array_of_images_is_refused(tmp_path):
    np.save(tmp_path / "number.npy", np.float32(3))
    np.savez(tmp_path / "several.npz", np.zeros((2, 2)))
    renamed = (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    for path in (tmp_path / "number.npy", renamed):
        assert f"{path} cannot be read as NumPy arrays" in refusal(array_file_shape, path)


def test_of_several_arrays_images_come_first(tmp_path):
    images = pixels(5, 3, 4, 4)
    path = tmp_path / "a.npz"
    for arrays in (
        {"arr_0": images // 2, "images": images, "more": images // 2},
        {"arr_0": images},
        {"faces": images},
    ):
        np.savez(path, **arrays, labels=np.full(5, 2**31 - 1, np.uint32))
        array, labels = read_array_file(path)
        np.testing.assert_array_equal(array, images)
        assert (labels.dtype, labels.tolist()) == (np.int64, 5 * [2**31 - 1])
    np.savez(path, one=images, two=images)
    assert "found: one, two" in refusal(read_array_file, path)


def ends(shape, low, high):
    """Floats at the two ends of a range."""
    return np.concatenate([np.full(shape, low, np.float32), np.full(shape, high, np.float32)])


@pytest.mark.parametrize(
    ("array", "mistake"),
    [
        (ends((4, 3, 8, 8), 0, 255), "floats are never rescaled"),
        (ends((4, 3, 8, 8), 0, 1), "floats are never rescaled"),
        (ends((4, 8, 8, 3), -1, 1), "floats are never rearranged"),
        (ends((4, 3, 8, 8), -1, 1), None),
        (ends((4, 4, 8, 8), 0, 50), None),
    ],
)
def test_floats_that_look_like_images_by_mistake_need_a_word(tmp_path, array, mistake):
    path = tmp_path / "a.npy"
    np.save(path, array)
    assert mistake is None or mistake in refusal(read_array_file, path)
    as_is = mistake is not None
    for images in (
        Arrays(str(path), floats_as_is=as_is).load()[0],
        reference_from(path, floats_as_is=as_is).images,
    ):
        np.testing.assert_array_equal(images, array)


@pytest.mark.parametrize(
    ("array", "labels", "part"),
    [
        (
            np.zeros((4, 8, 8), np.uint8),
            [0] * 4,
            "got shape (4, 8, 8); gray images (N, H, W) are images[:, None]",
        ),
        (
            np.array([{}, {}]),
            [0, 0],
            "cannot be read as NumPy arrays: Object arrays cannot be loaded",
        ),
        (np.zeros((4, 4, 8, 8), np.uint8), [0] * 4, "transparency is not read"),
    ],
)
def test_arrays_that_cannot_be_meant_are_refused(tmp_path, array, labels, part):
    path = tmp_path / "a.npz"
    np.savez(path, images=array, labels=np.array(labels))
    message = refusal(read_array_file, path)
    assert part in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("labels", "part"),
    [
        ([0, 1, 2], "labels must be 4 integers"),
        ([0.0] * 4, "labels must be 4 integers"),
        (
            np.eye(4),
            "labels must be 4 integers, got float64 of shape (4, 4); for one-hot labels give labels.argmax(1)",
        ),
        # argmax(1) would make them all 0.
        (
            [[0], [1], [2], [0]],
            "labels must be 4 integers, got int64 of shape (4, 1); give labels[:, 0]",
        ),
        ([0, 1, 2, -1], "labels must be from 0 to 2147483647, got -1"),
        ([0, 1, 2, 2**31], "labels must be from 0 to 2147483647, got 2147483648"),
        (
            None,
            "has no labels: labels are read from the keys labels, label, arr_1 of an .npz file; the file has x, y",
        ),
    ],
)
def test_array_labels_that_are_no_classes_are_refused_if_used(tmp_path, labels, part, capsys):
    path = tmp_path / "a.npz"
    np.savez(
        path,
        images=pixels(4, 3, 2, 2),
        **({} if labels is None else {"labels": np.array(labels)}),
        y=np.zeros(4),
    )
    assert part.replace("x, y", "images, y") in refusal(read_array_file, path, labels_used=True)
    assert read_array_file(path)[1] is None
    said = capsys.readouterr().err
    assert labels is None or f"labels: left out, because {part}" in said
    assert said.endswith("; not read: y\n")


def test_one_line_says_what_was_taken_from_arrays(tmp_path, capsys):
    cases = {
        "adm.npz": (
            {"arr_0": pixels(4, 8, 6, 3), "arr_1": np.arange(4)},
            "arr_0: 4 images, NHWC, 6x8 with 3 channels; arr_1: labels",
        ),
        "own.npz": (
            {"x": pixels(4, 1, 8, 6), "label": np.arange(4)},
            "x: 4 images, NCHW, 6x8 with 1 channel; label: labels",
        ),
        "thin.npz": (
            {"x": pixels(4, 3, 8, 3)},
            "x: 4 images, NCHW (not NHWC), 3x8 with 3 channels",
        ),
        "more.npz": (
            {"arr_0": pixels(4, 3, 8, 8), "mu": np.zeros(4)},
            "arr_0: 4 images, NCHW, 8x8 with 3 channels; not read: mu",
        ),
        # Only beside arr_0 is arr_1 known to be labels.
        "named.npz": (
            {"images": pixels(4, 3, 8, 8), "arr_1": np.arange(4)},
            "images: 4 images, NCHW, 8x8 with 3 channels; not read: arr_1",
        ),
        "latents.npz": (
            {"z": np.zeros((4, 5, 2))},
            "z: 4 items of 5x2 values, float64, as they are",
        ),
    }
    for name, (arrays, line) in cases.items():
        np.savez(tmp_path / name, **arrays)
        _, labels = read_array_file(tmp_path / name)
        assert capsys.readouterr().err == f"{tmp_path / name}: {line}\n"
        assert (labels is None) == ("label" not in line) or labels.tolist() == [0, 1, 2, 3]


def test_array_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("1 2")
    for call in (read_array_file, array_file_shape, lambda path: Arrays(str(path)).stored()):
        assert "neither an .npy nor an .npz" in refusal(call, tmp_path / "a.txt")
    assert "missing.npz does not exist" in refusal(Arrays(str(tmp_path / "missing.npz")).stored)
    good = pixels(4, 3, 8, 8)
    np.save(tmp_path / "a.npy", good)
    np.savez(tmp_path / "a.npz", images=good)
    for kind in ("npy", "npz"):
        path = tmp_path / f"a.{kind}"
        content, flipped = path.read_bytes(), bytearray(path.read_bytes())
        flipped[400] ^= 1
        # A bit that flips in an .npy file is a pixel; an .npz file has checksums.
        for damaged in (
            content[:-10],
            b"no numpy file",
            b"",
            *([flipped] if kind == "npz" else []),
        ):
            path.write_bytes(damaged)
            assert f"a.{kind} cannot be read as NumPy arrays" in refusal(read_array_file, path)
