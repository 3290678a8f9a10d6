"""Image and array files that would hang the reader or take all memory: each gives one line at once."""

import os
import socket
import struct
import tracemalloc
import zipfile
import zlib

import pytest

from lit_knn.data.array_files import array_file_shape, read_array_file
from lit_knn.data.image_files import count_image_files, read_image_files
from lit_knn.sampling.loading import load
from tests.image_files import encoded, pixels, refusal, write_folder, write_zip

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


def test_a_pipe_or_a_socket_instead_of_a_file_is_refused(tmp_path):
    readers = {"zip": [read_image_files, count_image_files], "npz": [read_array_file], "pkl": [load]}
    readers |= {"npy": [read_array_file, array_file_shape]}
    for kind, those in readers.items():
        os.mkfifo(tmp_path / f"pipe.{kind}")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / f"socket.{kind}"))
            for read in those:
                assert "pipe" in refusal(read, tmp_path / f"pipe.{kind}")
                refusal(read, tmp_path / f"socket.{kind}")
                refusal(read, "/dev/zero")


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


@pytest.mark.parametrize(("width", "height"), [(2**31 - 1, 1), (2**14, 2**14), (2**30, 2**30)])
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


@pytest.mark.parametrize(
    ("shape", "dtype", "version"),
    [
        ((10**6, 3, 1000, 1000), "|u1", 1),
        ((2**62, 2), "<f8", 1),
        ((2**31, 2**31, 2**31), "|u1", 2),
        ((10**300, 1), "<f8", 2),
        ((-1, 3, 4, 4), "|u1", 1),
    ],
)
def test_arrays_that_promise_more_than_their_file_are_refused(tmp_path, shape, dtype, version):
    content = npy_header(shape, dtype, version) + bytes(48)
    (tmp_path / "a.npy").write_bytes(content)
    write_zip(tmp_path / "a.npz", {"images.npy": content})
    for read, name in ((read_array_file, "a.npy"), (read_array_file, "a.npz"), (array_file_shape, "a.npy")):
        message = refusal(read, tmp_path / name)
        assert str(tmp_path / name) in message
        assert "cannot be read as NumPy arrays" in message
