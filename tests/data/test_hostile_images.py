"""Image and array files that would hang the reader or take all memory: each gives one line at once."""

import io
import os
import socket
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

from lit_knn.commands.prepare import main
from lit_knn.data.array_files import array_file_shape, read_array_file
from lit_knn.data.image_files import count_image_files, read_image_files
from lit_knn.data.image_source import Options
from lit_knn.data.prepared_writer import prepare
from lit_knn.sampling.loading import load
from tests.image_files import encoded, labels_json, pixels, refusal, write_folder, write_zip

GIB = 2**30


@pytest.fixture(autouse=True)
def _in_little_memory():
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20


def zip_of_zeros(path, name, size):
    """A zip with one entry of `size` zeros, whose own size is a thousandth."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as entry:
        for start in range(0, size, 2**22):
            entry.write(bytes(min(2**22, size - start)))
    return path


def with_size(path, name, size):
    """Change the size that a zip states for an entry, in its directory and before the entry."""
    content = bytearray(path.read_bytes())
    real = struct.pack("<L", zipfile.ZipFile(path).getinfo(name).file_size)
    for signature, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        place = content.index(signature) + offset
        assert content[place : place + 4] == real
        content[place : place + 4] = struct.pack("<L", size)
    path.write_bytes(content)
    return path


def png_of(width, height):
    """A PNG of one grey level with any size in its header; its pixels are cut."""

    def chunk(kind, data):
        return struct.pack(">L", len(data)) + kind + data + struct.pack(">L", zlib.crc32(kind + data))

    header = struct.pack(">LLBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def npy_header(shape, dtype="|u1", version=1):
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (63 - (len(text) + (10 if version == 1 else 12)) % 64) + b"\n"
    size = struct.pack("<H" if version == 1 else "<L", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text


# Pipes, sockets and devices


@pytest.mark.parametrize("name", ["a.png", "b.png", "dataset.json", "sub/c.jpg"])
def test_a_pipe_in_a_folder_is_refused_by_name(tmp_path, name):
    folder = write_folder(tmp_path / "f", {"a.png": encoded(pixels(4, 4)), "sub/d.png": encoded(pixels(4, 4))})
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for read in (read_image_files, lambda path: prepare(path, tmp_path / "x.npy")):
        message = refusal(read, folder)
        assert str(folder / name) in message
        assert "pipe" in message


def test_a_pipe_that_is_no_image_is_ignored(tmp_path):
    os.mkfifo(write_folder(tmp_path, {"a.png": encoded(pixels(4, 4))}) / "control")
    assert len(read_image_files(tmp_path)[0]) == 1


@pytest.mark.parametrize("name", ["a.zip", "a.npy", "a.npz", "a.pkl"])
def test_a_pipe_or_a_socket_instead_of_a_file_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    readers = {".zip": [read_image_files, count_image_files], ".npz": [read_array_file]}
    readers |= {".npy": [read_array_file, array_file_shape], ".pkl": [load]}
    for read in readers[name[1:]]:
        assert "pipe" in refusal(read, tmp_path / name)
    (tmp_path / name).unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / name))
        for read in readers[name[1:]]:
            refusal(read, tmp_path / name)
    refusal(readers[name[1:]][0], "/dev/zero")


def test_a_name_that_no_file_can_have_is_refused():
    assert "cannot be read" in refusal(read_image_files, "a\0b")
    assert "cannot be read" in refusal(read_array_file, "a" * 5000 + ".npy")


# Sizes


def test_large_entries_of_small_zips_are_refused_before_they_are_unpacked(tmp_path):
    good = encoded(pixels(4, 4))
    for name in ("a.png", "dataset.json"):
        path = write_zip(tmp_path / f"{name}.zip", {name: good, "b.png": good})
        # The entry states 2 GiB; it is stored, so that unpacking would end early.
        message = refusal(read_image_files, with_size(path, name, 2 * GIB))
        assert name in message
        assert f"{2 * GIB:,} bytes" in message
    path = zip_of_zeros(tmp_path / "zeros.zip", "a.png", 300 * 2**20)
    assert path.stat().st_size < 2**20
    assert "314,572,800 bytes" in refusal(read_image_files, path)


def test_large_files_of_a_folder_are_refused_before_they_are_read(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(pixels(4, 4)))
    os.truncate(tmp_path / "a.png", 5 * GIB)
    assert f"{5 * GIB:,} bytes" in refusal(read_image_files, tmp_path)


@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (2**31 - 1, 1), (2**14, 2**14), (2**30, 2**30)])
def test_images_with_too_many_pixels_are_refused(tmp_path, width, height):
    message = refusal(read_image_files, write_folder(tmp_path, {"a.png": png_of(width, height)}))
    assert "a.png" in message
    assert "pixels" in message or "decompression bomb" in message


def test_more_images_than_the_memory_holds_are_refused_with_both_sizes(tmp_path, monkeypatch):
    import lit_knn.data.files as files

    folder = write_folder(tmp_path, {f"{i}.png": encoded(pixels(10, 10, 3)) for i in range(4)})
    monkeypatch.setattr(files, "machine_bytes", lambda: 1199)
    message = refusal(read_image_files, folder)
    assert "4 images of 10x10 with 3 channels" in message
    assert "lit-knn prepare" in message
    monkeypatch.setattr(files, "machine_bytes", lambda: 1200)
    assert read_image_files(folder)[0].nbytes == 1200


@pytest.mark.parametrize("dtype", ["|u1", "<f8"])
@pytest.mark.parametrize(
    "shape", [(10**6, 3, 1000, 1000), (2**62, 2), (2**31, 2**31, 2**31), (10**300, 1), (-1, 3, 4, 4)]
)
@pytest.mark.parametrize("version", [1, 2])
def test_arrays_that_promise_more_than_their_file_are_refused(tmp_path, shape, dtype, version):
    content = npy_header(shape, dtype, version) + bytes(48)
    (tmp_path / "a.npy").write_bytes(content)
    write_zip(tmp_path / "a.npz", {"images.npy": content})
    for read, name in ((read_array_file, "a.npy"), (read_array_file, "a.npz"), (array_file_shape, "a.npy")):
        message = refusal(read, tmp_path / name)
        assert str(tmp_path / name) in message
        assert "cannot be read as NumPy arrays" in message


def test_a_large_array_in_a_small_npz_is_refused_with_its_size(tmp_path):
    shape = (2**21, 3, 1024, 1024)
    path = write_zip(tmp_path / "a.npz", {"images.npy": npy_header(shape)})
    # The directory states as many bytes as the header needs, with the fields of large files.
    with zipfile.ZipFile(path, "w") as archive:
        entry = zipfile.ZipInfo("images.npy")
        with archive.open(entry, "w", force_zip64=True) as file:
            file.write(npy_header(shape))
        entry.file_size = len(npy_header(shape)) + 3 * 2**41
    message = refusal(read_array_file, path)
    assert "need 6597.1 GB of memory, this machine has" in message
    assert "lit-knn prepare" in message


def test_a_sparse_npy_beyond_the_memory_is_refused_with_its_size(tmp_path):
    header = npy_header((2**20, 3, 2048, 2048))
    (tmp_path / "a.npy").write_bytes(header)
    os.truncate(tmp_path / "a.npy", len(header) + 12 * 2**40)
    assert "need 13194.1 GB of memory" in refusal(read_array_file, tmp_path / "a.npy")
    # Planning a run needs the shape alone.
    assert array_file_shape(tmp_path / "a.npy") == ((2**20, 3, 2048, 2048), 1)


def test_a_header_of_two_gigabytes_is_not_read(tmp_path):
    path = zip_of_zeros(tmp_path / "a.npz", "images.npy", 200 * 2**20)
    refusal(read_array_file, path)
    write_zip(tmp_path / "b.npz", {"images.npy": b"\x93NUMPY\x02\x00" + struct.pack("<L", 2**31 - 1) + bytes(100)})
    refusal(read_array_file, tmp_path / "b.npz")


def test_arrays_in_either_order_and_of_any_version_are_read(tmp_path):
    array = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    for version in ((1, 0), (2, 0)):
        for ordered in (array, np.asfortranarray(array)):
            file = io.BytesIO()
            np.lib.format.write_array(file, ordered, version)
            (tmp_path / "a.npy").write_bytes(file.getvalue())
            np.testing.assert_array_equal(read_array_file(tmp_path / "a.npy")[0], array)
    np.savez_compressed(tmp_path / "a.npz", images=np.asfortranarray(array))
    np.testing.assert_array_equal(read_array_file(tmp_path / "a.npz")[0], array)


def test_damage_inside_an_npz_is_found_by_its_checksum(tmp_path):
    np.savez(tmp_path / "a.npz", images=pixels(4, 3, 8, 8))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[400] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    assert "CRC" in refusal(read_array_file, tmp_path / "a.npz")


# Prepare


@pytest.mark.parametrize("size", [0, -3, 8193, 100_000, 10**12])
def test_sizes_that_no_image_has_are_refused_at_once(tmp_path, size, capsys):
    source = write_folder(tmp_path / "s", {"0.png": encoded(pixels(4, 4))})
    assert f"--size must be from 1 to 8192, got {size}" in refusal(lambda: Options(size=size))
    with pytest.raises(SystemExit) as caught:
        main([str(source), str(tmp_path / "x.npy"), "--size", str(size)])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: --size must be from 1 to 8192, got {size}\n"
    assert not list(tmp_path.glob("x.npy*"))


# Messages


def test_names_in_files_print_as_one_line(tmp_path):
    strange = "a\n\x1b[31m\u2028.png"
    image = encoded(pixels(4, 4))
    for files in (
        {strange: b"no image", "b.png": image},
        {"0.png": image, strange: encoded(pixels(5, 4))},
        {"b.png": image, **labels_json([[strange, -1], ["b.png", 1]])},
        {"b.png": image, **labels_json([[strange, 1], [strange, 1]])},
        {"b.png": image, **labels_json([[strange, 1], ["b.png", 1]])},
    ):
        message = refusal(read_image_files, write_zip(tmp_path / "a.zip", files))
        assert message.isprintable()
        assert "a\\n\\x1b[31m\\u2028.png" in message


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "EPS", "PPM"])
def test_only_png_and_jpeg_are_images(tmp_path, kind):
    # Other readers may start programs (EPS) or need far more memory than the file.
    files = {"a.png": encoded(pixels(4, 4, 3), kind)}
    assert "a.png is not an image" in refusal(read_image_files, write_folder(tmp_path, files))
