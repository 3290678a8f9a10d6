"""Image files of all kinds: which are read, which are left out and counted, and what they look like."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from lit_knn.data import ImageFiles, Prepared
from lit_knn.data.image_files import read_image_files
from lit_knn.data.prepare_options import PrepareOptions
from lit_knn.data.prepared import read_prepared
from lit_knn.data.prepared_writer import prepare
from tests.image_files import both, encoded, labels_json, pixels, refusal, write_folder

LOSSLESS = {
    "png": ("PNG", {}),
    "BMP": ("BMP", {}),
    "gif": ("GIF", {}),
    "tif": ("TIFF", {}),
    "tiff": ("TIFF", {"compression": "tiff_lzw"}),
    "webp": ("WEBP", {"lossless": True}),
}


def few_colours(*shape: int) -> np.ndarray:
    """A picture that a palette holds without a loss."""
    return pixels(*shape) // 64 * 64


def moving(kind: str) -> bytes:
    """A file of two frames."""
    second = Image.fromarray(few_colours(8, 8, 3))
    return encoded(few_colours(8, 8, 3), kind, save_all=True, append_images=[second])


def test_still_images_are_read_and_all_others_are_counted(tmp_path, capsys):
    picture = few_colours(8, 8, 3)
    files = {
        f"{i}.{suffix}": encoded(picture, kind, **options)
        for i, (suffix, (kind, options)) in enumerate(LOSSLESS.items())
    }
    lossless = len(files)
    files |= {
        f"x{i}.{suffix}": encoded(picture, "JPEG")
        for i, suffix in enumerate(("jfif", "JPG", "jpe"))
    }
    # The second picture in a phone's file is a preview.
    files["y.jpg"] = moving("MPO")
    read = len(files)
    files |= {
        "a.gif": moving("GIF"),
        "a.webp": moving("WEBP"),
        "a.tif": moving("TIFF"),
        "a.apng": moving("PNG"),
    }
    files |= {"b.HEIC": b"", "c.heic": b"", "d.svg": b"", "e.nef": b""}
    files |= {
        "._a.heic": b"",
        "Thumbs.db": b"",
        "@eaDir/a.jpg": b"",
        "in/__MACOSX/a.png": b"",
        "film.mp4": b"",
    }

    for path in both(tmp_path, files):
        prepare(path, tmp_path / f"{path.name}.npy")
        data = ImageFiles(str(path))
        assert data.stored().shape == (read, 3, 8, 8)
        images, _ = data.load()
        np.testing.assert_array_equal(
            images[:lossless], np.stack([picture.transpose(2, 0, 1)] * lossless)
        )
        np.testing.assert_array_equal(read_prepared(tmp_path / f"{path.name}.npy").images, images)
        said = capsys.readouterr().err
        counts = (
            "2 .heic, 1 .apng, 1 .gif of several frames, 1 .nef, 1 .svg, 1 .tif of several frames, "
        )
        line = f"{path}: 8 of 18 image files are left out: {counts}1 .webp of several frames\n"
        assert said.count("left out") == 1, "a line is said once"
        assert line in said


def test_labels_count_the_images_that_are_read(tmp_path):
    image = encoded(pixels(4, 4, 3))
    files = {"cat/0.png": image, "cat/1.gif": moving("GIF"), "dog/0.png": image}
    assert read_image_files(write_folder(tmp_path / "a", files), True)[1].tolist() == [0, 1]
    # A list may have labels of the others.
    labels = labels_json([["cat/0.png", 3], ["cat/1.gif", 4], ["dog/0.png", 5]])
    assert read_image_files(write_folder(tmp_path / "a", labels))[1].tolist() == [3, 5]
    files["heic/0.heic"] = b""
    assert "the folder heic holds no image" in refusal(
        read_image_files, write_folder(tmp_path / "b", files), True
    )


# Colours


def transparent(mode: str) -> bytes:
    """A picture whose left half is transparent and right half has the level 80. The hidden level is 200."""
    level = np.array([[200, 200, 80, 80]] * 4, np.uint8)
    alpha = np.array([[0, 0, 255, 255]] * 4, np.uint8)
    if mode == "LA":
        return encoded(np.stack([level, alpha], -1))
    if mode == "RGBA":
        return encoded(np.stack([level, level, level, alpha], -1))
    picture = Image.fromarray(level)
    key = (200, 200, 200) if mode == "RGB" else 200
    buffer = io.BytesIO()
    picture.convert(mode).save(
        buffer, "PNG", transparency=picture.convert("P").getpixel((0, 0)) if mode == "P" else key
    )
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_transparent_parts_are_refused_or_show_the_background(tmp_path, mode):
    folder = write_folder(tmp_path / "s", {"a.png": transparent(mode)})
    for call in (read_image_files, lambda path: prepare(path, tmp_path / "x.npy")):
        told = refusal(call, folder)
        assert f"a.png has mode {'palette' if mode == 'P' else mode}" in told
        assert "lit-knn prepare puts it on white with --rgb" in told
    for i, (options, ground) in enumerate(
        (({}, (255, 255, 255)), ({"background": "#0a141e"}, (10, 20, 30)))
    ):
        prepare(folder, tmp_path / f"{i}.npy", PrepareOptions(rgb=True, **options))
        image = read_prepared(tmp_path / f"{i}.npy").images[0]
        assert [tuple(image[:, 0, column].tolist()) for column in range(4)] == [
            ground,
            ground,
            (80,) * 3,
            (80,) * 3,
        ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"background": "black"}, "--background black goes with --rgb"),
        ({"rgb": True, "background": "foo"}, "--background: there is no colour 'foo'"),
        ({"rgb": True, "background": "#00000080"}, "--background must be an opaque colour"),
    ],
)
def test_a_background_that_cannot_be_is_refused(options, message):
    assert message in refusal(PrepareOptions, **options)


def png_of_16_bits(colour_type: int, channels: int) -> bytes:
    """A PNG file of 2x2 pixels of 16 bits; Pillow writes only gray ones."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    row = b"\0" + bytes(range(4 * channels))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, colour_type, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(2 * row)) + chunk(b"IEND", b"")
    )


def tiff_of_16_bits() -> bytes:
    """A TIFF file of one RGB pixel of 16 bits."""
    # Tags: width, height, bits, compression, RGB, place of the pixel, samples, rows, bytes.
    entries = [
        (256, 1),
        (257, 1),
        (258, 122),
        (259, 1),
        (262, 2),
        (273, 128),
        (277, 3),
        (278, 1),
        (279, 6),
    ]
    tags = b"".join(
        struct.pack("<HHII", tag, 3, 3 if tag == 258 else 1, value) for tag, value in entries
    )
    head = b"II*\0" + struct.pack("<IH", 8, len(entries)) + tags + struct.pack("<I", 0)
    return head.ljust(122, b"\0") + struct.pack("<6H", 16, 16, 16, 1000, 2000, 3000)


@pytest.mark.parametrize(
    "content",
    [
        png_of_16_bits(0, 1),
        png_of_16_bits(2, 3),
        png_of_16_bits(4, 2),
        png_of_16_bits(6, 4),
        tiff_of_16_bits(),
    ],
    ids=["gray", "RGB", "gray with alpha", "RGBA", "TIFF"],
)
def test_sixteen_bits_are_not_cut_off_without_a_word(tmp_path, content):
    folder = write_folder(tmp_path / "s", {"a.png": content})
    assert "a.png has 16 bits a channel" in refusal(read_image_files, folder)
    assert "a.png has 16 bits a channel" in refusal(
        prepare, folder, tmp_path / "x.npy", PrepareOptions(rgb=True)
    )


@pytest.mark.parametrize("mode", ["1", "CMYK", "F"])
def test_other_modes_name_the_way_out_if_there_is_one(tmp_path, mode):
    buffer = io.BytesIO()
    Image.fromarray(pixels(4, 4)).convert("RGB").convert("L").convert(mode).save(buffer, "TIFF")
    told = refusal(read_image_files, write_folder(tmp_path / "s", {"a.tif": buffer.getvalue()}))
    assert f"a.tif has mode {mode}" in told
    assert ("--rgb" in told) == (mode != "F")


# Photos


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_photos_are_turned_as_their_tag_says(tmp_path, kind):
    tag = Image.Exif()
    tag[0x0112] = 6  # Turn to the right: the top is then on the right.
    tall = np.zeros((16, 8, 3), np.uint8)
    tall[:8] = 255
    files = {"0": encoded(tall, kind, exif=tag), "1": encoded(tall, kind)}
    turned, stored = (
        write_folder(tmp_path / name, {f"a.{kind}": content}) for name, content in files.items()
    )
    expected = np.zeros((1, 3, 8, 16), np.uint8)
    expected[..., 8:] = 255
    # JPEG and WebP have losses at the edge.
    assert np.abs(read_image_files(turned)[0].astype(int) - expected).max() < 12
    assert read_image_files(stored)[0].shape == (1, 3, 16, 8)
    prepare(turned, tmp_path / "x.npy")
    assert (
        np.abs(read_prepared(tmp_path / "x.npy").images.numpy().astype(int) - expected).max() < 12
    )


def test_a_photo_with_damaged_tags_is_as_it_is_stored(tmp_path):
    tag = Image.Exif()
    tag[0x0112] = 6
    content = encoded(pixels(16, 8, 3), "JPEG", exif=tag)
    damaged = content.replace(b"Exif\0\0MM\0*", b"Exif\0\0ZZZZ").replace(
        b"Exif\0\0II*\0", b"Exif\0\0ZZZZ"
    )
    assert damaged != content
    assert read_image_files(write_folder(tmp_path / "s", {"a.jpg": damaged}))[0].shape == (
        1,
        3,
        16,
        8,
    )


# What is no folder and no zip of images


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "x.npy",
            "read it with --data Prepared, if lit-knn prepare made it, and otherwise with --data Arrays",
        ),
        ("x.npz", "read it with --data Arrays"),
        ("x.tar.gz", "unpack it into a folder"),
        ("x.png", "give the folder of the images"),
        ("x.h5", "write its images into a folder, or write a data module"),
    ],
)
def test_a_path_of_another_kind_gets_advice(tmp_path, name, advice):
    (tmp_path / name).write_bytes(b"")
    told = refusal(ImageFiles(str(tmp_path / name)).load)
    assert f"{name} is not a folder, zip, tar, parquet file or LMDB: {advice}" in told
    folder = write_folder(tmp_path / "folder", {name: b"", f"more/{name}": b""})
    if name != "x.png":
        told = refusal(ImageFiles(str(folder)).load)
        assert "folder holds no image files" in told
        assert f"2 of its files have .{name.split('.')[-1]}: {advice}" in told


def test_a_folder_without_images_says_what_it_has(tmp_path):
    cases = {
        "empty": ({}, "it is empty"),
        "hidden": ({".a.png": b""}, "it is empty"),
        "bare": (
            {"0": b"", "1": b""},
            "2 of its files have no suffix: images need that of their format",
        ),
        "zips": (
            {"train.zip": b"", "test.zip": b""},
            "2 of its files have .zip: give the zip itself",
        ),
        "photos": ({"a.heic": b"", "b.heic": b""}, "2 of 2 image files are left out: 2 .heic"),
        "cifar": ({"cifar-10-batches-py/data_batch_1": b""}, "CIFAR-10 is read by --data CIFAR10"),
    }
    for name, (files, words) in cases.items():
        (tmp_path / name).mkdir()
        assert words in refusal(read_image_files, write_folder(tmp_path / name, files))


def test_prepared_and_arrays_say_who_reads_a_folder(tmp_path):
    folder = write_folder(tmp_path / "s", {"a.png": b""})
    assert "read it with --data ImageFiles" in refusal(Prepared(str(folder)).load)
