import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_knn.data.array_files import read_array_file
from lit_knn.data.image_files import read_image_files
from tests.image_files import encoded, labels_json, pixels, refusal, write_folder, write_zip


def both(tmp_path: Path, files: dict[str, bytes]) -> list[Path]:
    return [write_folder(tmp_path / "folder", files), write_zip(tmp_path / "images.zip", files)]


def test_zip_and_folder_give_the_images_sorted_by_name_with_their_labels(tmp_path):
    pictures = pixels(3, 4, 6, 3)
    files = {name: encoded(pictures[i]) for i, name in ((1, "a/1.png"), (2, "b/0.PNG"), (0, "a/0.png"))}
    files |= {"a/notes.txt": b"not an image", "__MACOSX/a/._0.png": b"nor this", "a/.thumbnails/0.png": b"nor this"}
    files |= labels_json([["b/0.PNG", 7], ["a/0.png", 5], ["a/1.png", 6]])
    for path in both(tmp_path, files):
        images, labels, _ = read_image_files(path)
        assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
        assert labels.tolist() == [5, 6, 7]
        np.testing.assert_array_equal(images, np.moveaxis(pictures, -1, 1))


def test_grayscale_has_one_channel_a_palette_its_colours_and_jpeg_its_loss(tmp_path):
    gray = pixels(3, 5)
    folder = write_folder(tmp_path / "gray", {"0.png": encoded(gray)})
    np.testing.assert_array_equal(read_image_files(folder)[0], gray[None, None])
    palette = Image.fromarray(pixels(3, 5) % 4).convert("P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 8, 7])
    (tmp_path / "palette").mkdir()
    palette.save(tmp_path / "palette" / "0.png")
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 8, 7]], np.uint8)[np.asarray(palette)]
    np.testing.assert_array_equal(read_image_files(tmp_path / "palette")[0][0], np.moveaxis(colours, -1, 0))
    flat = np.full((8, 8, 3), (200, 100, 50), np.uint8)
    images, *_ = read_image_files(write_folder(tmp_path / "jpeg", {"0.jpeg": encoded(flat, "JPEG")}))
    assert np.abs(images[0].astype(int) - np.moveaxis(flat, -1, 0)).max() <= 3


def test_mixed_and_damaged_images_are_refused_by_name(tmp_path):
    for i, (other, described) in enumerate(
        [
            (pixels(4, 5, 3), "4x4 with 3 channels and b.png is 5x4 with 3 channels"),
            (pixels(4, 4), "3 channels and b.png is 4x4 with 1 channel"),
        ]
    ):
        files = {"a.png": encoded(pixels(4, 4, 3)), "b.png": encoded(other)}
        message = refusal(read_image_files, write_folder(tmp_path / str(i), files))
        assert "a.png is 4x4" in message
        assert described in message
    good = pixels(32, 32, 3)
    for content in (b"", b"not an image", encoded(good, "JPEG")[:-200], encoded(good)[:-200]):
        for path in both(tmp_path, {"a.png": encoded(good), "sub/bad.jpg": content}):
            message = refusal(read_image_files, path)
            assert str(path) in message
            assert "sub/bad.jpg" in message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "dataset.json cannot be read"),
        (b"[]", 'it must be {"labels": [[file name, integer], ...]}'),
        (b" " * 30_000, "30,000 bytes, too many for 2 labels"),
        (b'{"labels": {"a.png": 1}}', "[file name, integer from 0], but has 'a.png'"),
        (b'{"labels": [["a.png", 1], ["b.png", 1.5]]}', "but has ['b.png', 1.5]"),
        (b'{"labels": [["a.png", true], ["b.png", 1]]}', "but has ['a.png', True]"),
        (b'{"labels": [["a.png", -1], ["b.png", 1]]}', "but has ['a.png', -1]"),
        (b'{"labels": [["a.png", 1], ["a.png", 1]]}', "list each image once"),
        (b'{"labels": [["a.png", 1]]}', "1 labels for 2 images; it lacks b.png"),
        (b'{"labels": [["b.png", 1], ["c.png", 2]]}', "2 labels for 2 images; it lacks a.png"),
        (b'{"labels": [["a.png", 1], ["b.png", 1], ["c.png", 2]]}', "it names c.png, which is no image"),
    ],
)
def test_labels_that_do_not_match_the_images_are_refused(tmp_path, content, part):
    image = encoded(pixels(2, 2, 3))
    assert part in refusal(
        read_image_files, write_folder(tmp_path, {"a.png": image, "b.png": image, "dataset.json": content})
    )


def test_npy_and_npz_give_array_and_labels(tmp_path):
    images = pixels(5, 3, 4, 6)
    np.save(tmp_path / "a.npy", images)
    np.testing.assert_array_equal(read_array_file(tmp_path / "a.npy")[0], images)
    assert read_array_file(tmp_path / "a.npy")[1] is None
    for key in ("images", "arr_0", "faces"):
        np.savez(tmp_path / "a.npz", **{key: images, "labels": np.arange(5, dtype=np.uint8)})
        array, labels = read_array_file(tmp_path / "a.npz")
        np.testing.assert_array_equal(array, images)
        assert labels.dtype == np.int64
        assert labels.tolist() == [0, 1, 2, 3, 4]


def test_uint8_channels_are_moved_first_only_where_that_is_unambiguous_and_floats_stay(tmp_path):
    for shape, moves in (((2, 8, 6, 3), True), ((2, 8, 6, 1), True), ((2, 3, 8, 6), False), ((2, 3, 8, 3), False)):
        images = pixels(*shape)
        np.save(tmp_path / "a.npy", images)
        read, _ = read_array_file(tmp_path / "a.npy")
        np.testing.assert_array_equal(read, np.moveaxis(images, -1, 1) if moves else images)
    for shape, scale in (((7, 2), 50), ((7, 4, 8, 8), 50), ((7, 3, 8, 8), 1)):
        array = np.random.default_rng(0).uniform(-scale, scale, shape)
        np.save(tmp_path / "a.npy", array)
        read, _ = read_array_file(tmp_path / "a.npy")
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, array.astype(np.float32))


@pytest.mark.parametrize(
    ("shape", "scale", "part"),
    [
        ((4, 3, 8, 8), 255.0, "floats are never rescaled"),
        ((4, 1, 8, 8), -1.5, "floats are never rescaled"),
        ((4, 3, 8, 8), 0.5, "floats are never rescaled"),
        ((4, 8, 8, 3), 1.0, "floats are never rearranged"),
    ],
)
def test_floats_that_look_like_images_by_mistake_need_a_word(tmp_path, shape, scale, part):
    array = np.full(shape, scale, np.float32)
    np.save(tmp_path / "a.npy", array)
    message = refusal(read_array_file, tmp_path / "a.npy")
    assert part in message
    assert "floats_as_is" in message
    np.testing.assert_array_equal(read_array_file(tmp_path / "a.npy", floats_as_is=True)[0], array)


@pytest.mark.parametrize(
    ("array", "part"),
    [
        (np.array([[1.0, 2.0], [np.nan, 1.0]]), "first in item 1"),
        (np.array([[1.0, np.inf], [2.0, 1.0]]), "first in item 0"),
        (np.array([[1.0], [1e300]]), "first in item 1"),
        (np.zeros((4, 2), np.int64), "must be uint8 or float, got int64"),
        (np.zeros(4), "(N, *shape)"),
        (np.zeros((0, 3, 8, 8), np.uint8), "not empty"),
        (np.zeros((4, 8, 8), np.uint8), "must be (N, C, H, W) with 1 or 3 channels, got shape (4, 8, 8)"),
    ],
)
def test_arrays_that_cannot_be_meant_are_refused(tmp_path, array, part):
    np.save(tmp_path / "a.npy", array)
    message = refusal(read_array_file, tmp_path / "a.npy")
    assert part in message
    assert str(tmp_path / "a.npy") in message


def test_array_files_that_cannot_be_read_are_refused(tmp_path):
    assert "does not exist" in refusal(read_array_file, tmp_path / "absent.npy")
    (tmp_path / "a.txt").write_text("1 2")
    assert "neither an .npy nor an .npz" in refusal(read_array_file, tmp_path / "a.txt")
    good, objects = pixels(4, 3, 8, 8), np.array([{}, {}])
    np.save(tmp_path / "objects.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "objects.npz", images=objects)
    np.save(tmp_path / "a.npy", good)
    np.savez(tmp_path / "a.npz", images=good)
    for kind in ("npy", "npz"):
        assert "pickled objects" in refusal(read_array_file, tmp_path / f"objects.{kind}")
        path = tmp_path / f"a.{kind}"
        for content in (path.read_bytes()[:-10], b"no numpy file", b""):
            path.write_bytes(content)
            assert f"a.{kind} cannot be read" in refusal(read_array_file, path)
    np.savez(tmp_path / "a.npz", images=good)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[400] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    assert "CRC" in refusal(read_array_file, tmp_path / "a.npz")
    for labels in (np.arange(3), np.zeros(4), np.ones(4, bool), np.zeros((4, 1), int)):
        np.savez(tmp_path / "a.npz", images=good, labels=labels)
        assert "labels must be 4 integers" in refusal(read_array_file, tmp_path / "a.npz")


def test_of_several_arrays_images_come_first_and_other_entries_do_not_count(tmp_path):
    images = pixels(2, 3, 4, 4)
    np.savez(tmp_path / "a.npz", arr_0=images // 2, images=images, more=images)
    np.testing.assert_array_equal(read_array_file(tmp_path / "a.npz")[0], images)
    np.savez(tmp_path / "b.npz", only=images)
    with zipfile.ZipFile(tmp_path / "b.npz", "a") as archive:
        archive.writestr("readme.txt", "two images")
    np.testing.assert_array_equal(read_array_file(tmp_path / "b.npz")[0], images)


def test_a_zip_of_a_folder_above_has_images(tmp_path):
    path = write_zip(tmp_path / "a.zip", {f"../photos/{i}.png": encoded(pixels(4, 4)) for i in range(2)})
    assert len(read_image_files(path)[0]) == 2


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["a.png", "./a.png", "dataset.json"])
def test_a_zip_that_holds_a_name_twice_is_refused(tmp_path, name):
    image = encoded(pixels(4, 4))
    path = write_zip(tmp_path / "a.zip", {"a.png": image, "b.png": image, **labels_json(None)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, image)
    assert f"holds two files of the name {name.removeprefix('./')}" in refusal(read_image_files, path)
