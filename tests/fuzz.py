"""A fuzzer for readers of files: damaged inputs by number, read in a process of limited memory and time."""

import io
import json
import multiprocessing
import pickle
import resource
import signal
import struct
import tempfile
import traceback
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.memory import process_bytes
from lit_knn.data.array_files import array_file_shape, read_array_file
from lit_knn.data.image_files import count_image_files, read_image_files
from lit_knn.nets.published.edm_pickle import read_edm_pickle
from tests.edm_pickles import NUMPY_1, NUMPY_2, network, published, write
from tests.image_files import encoded, labels_json

# Bytes that a reader may take in addition to the process, and seconds of one input.
MEMORY, SECONDS = 2**30, 10
EXTREMES = [0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1]
FORK = multiprocessing.get_context("fork")
KINDS = ("zip", "json", "npz", "pickle")


def damaged(content, others, rng):
    """Damage `content` in one to three ways; `others` are valid files that pieces come from."""
    for _ in range(rng.integers(1, 4)):
        content = WAYS[rng.integers(len(WAYS))](bytearray(content), others, rng)
    return bytes(content)


def _flip(content, others, rng):
    for _ in range(rng.integers(1, 9) if content else 0):
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    return content


def _cut(content, others, rng):
    return content[: rng.integers(len(content) + 1)]


def _splice(content, others, rng):
    other = others[rng.integers(len(others))]
    return content[: rng.integers(len(content) + 1)] + other[rng.integers(len(other) + 1) :]


def _header_of_another(content, others, rng):
    other, length = others[rng.integers(len(others))], int(rng.integers(1, 129))
    return other[:length] + content[length:]


def _extreme_number(content, others, rng):
    if len(content) >= 4:
        place, order = int(rng.integers(len(content) - 3)), "<>"[rng.integers(2)]
        content[place : place + 4] = struct.pack(order + "L", EXTREMES[rng.integers(len(EXTREMES))])
    return content


def _repeat(content, others, rng):
    start, length = int(rng.integers(len(content) + 1)), int(rng.integers(1, 257))
    return content[:start] + content[start : start + length] * int(rng.integers(1, 20)) + content[start:]


def _insert(content, others, rng):
    place = int(rng.integers(len(content) + 1))
    return content[:place] + rng.bytes(int(rng.integers(1, 17))) + content[place:]


WAYS = [_flip, _flip, _cut, _splice, _header_of_another, _extreme_number, _extreme_number, _repeat, _insert]


# Valid files


def _zip(files, compression=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return buffer.getvalue()


def _picture(*shape, kind="PNG", **options):
    return encoded(np.random.default_rng(len(shape)).integers(0, 256, shape, dtype=np.uint8), kind, **options)


@cache
def valid(kind):
    """The valid files of a kind."""
    gray, colour, photo = _picture(9, 7), _picture(9, 7, 3), _picture(9, 7, 3, kind="JPEG")
    images = [gray, colour, photo, _picture(40, 33, 3), _picture(40, 33, 3, kind="JPEG", progressive=True)]
    names = {"a.png": colour, "b/c.jpg": photo}
    labels = labels_json([["a.png", 3], ["b/c.jpg", 0]])
    if kind == "image":
        return images
    if kind == "zip":
        ways = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)  # The last is refused.
        return [_zip(files, way) for way in ways for files in (names, names | labels, {"a.png": gray})]
    if kind == "json":
        entries = [["a.png", 3], ["b/c.jpg", 0]]
        contents = [
            {"labels": entries},
            {"labels": None},
            {"labels": entries * 2},
            {"labels": [["a\u2028", -1], ["é", 1e9]]},
        ]
        return [json.dumps(content).encode() for content in contents] + [b'{"labels": [["a.png", 1], ["b/c.jpg", 99]]}']
    if kind == "npy":
        arrays = [
            np.zeros((2, 3, 4, 4), np.uint8),
            np.ones((3, 5), np.float32),
            np.asfortranarray(np.ones((2, 3), ">f8")),
        ]
        return [_saved(np.save, array) for array in arrays]
    if kind == "npz":
        images = np.zeros((2, 3, 4, 4), np.uint8)
        sets = [{"images": images}, {"images": images, "labels": np.arange(2)}, {"x": np.ones((4, 2))}]
        return [_saved(save, **arrays) for save in (np.savez, np.savez_compressed) for arrays in sets]
    return _pickles()


def _saved(save, *arrays, **named):
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


def _pickles():
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        path = Path(folder, "a.pkl")
        writers = [(protocol, core) for protocol in (4, 5) for core in (NUMPY_1, NUMPY_2)]
        found = [write(path, published(network()[0]), *writer).read_bytes() for writer in writers]
    return [*found, pickle.dumps({"ema": [1, 2.5, None, {"a": (1, 2)}]})]


# Inputs and what reads them


def file_of(kind, number):
    """Return the damaged file `number` of a kind, and the end of its name."""
    rng = np.random.default_rng([KINDS.index(kind), number])
    inside = number % 2 == 0
    if kind == "pickle":
        return _one(kind, rng), ".pkl"
    if kind == "npz":
        if not inside:
            return _one("npz", rng), ".npz"
        # The damage is within an array, so that the checksums of the zip hold.
        array = _one("npy", rng)
        return (array, ".npy") if number % 4 else (_zip({"images.npy": array}), ".npz")
    if kind == "json":
        return _zip(
            {"a.png": valid("image")[1], "b/c.jpg": valid("image")[2], "dataset.json": _one("json", rng)}
        ), ".zip"
    return (_zip({"a.png": _one("image", rng)}) if inside else _one("zip", rng)), ".zip"


def _one(kind, rng):
    files = valid(kind)
    return damaged(files[rng.integers(len(files))], files, rng)


def read(path):
    """Read a file of any kind, as a run does."""
    if path.suffix == ".zip":
        count_image_files(path)
        return read_image_files(path)
    if path.suffix == ".pkl":
        return read_edm_pickle(path)
    if path.suffix == ".npy":
        array_file_shape(path)
    return read_array_file(path)


# The process


def fuzz(kind, numbers, folder):
    """Read the damaged files of some numbers in a process of its own.

    Returns:
        How many were `read` and `refused`, and the failures: a list of (number, what happened).
    """
    valid(kind)
    report = Path(folder, f"{kind}.json")
    child = FORK.Process(target=_limited, args=(kind, numbers, Path(folder), report))
    child.start()
    child.join()
    counts, failures, last = json.loads(report.read_text()) if report.exists() else ({}, [], None)
    if child.exitcode or last != "done":
        failures.append((last, f"the process ended with status {child.exitcode}"))
    return counts, failures


def _limited(kind, numbers, folder, report):
    def too_slow(*_):
        raise TimeoutError

    most = process_bytes("VmSize") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, too_slow)
    counts, failures = Counter(), []
    for number in numbers:
        content, suffix = file_of(kind, number)
        path = folder / f"{kind}{suffix}"
        path.write_bytes(content)
        # If the process ends here, the report names the input.
        report.write_text(json.dumps((counts, failures, number)))
        signal.alarm(SECONDS)
        try:
            counts[_outcome(path)] += 1
        except BaseException:
            failures.append((number, traceback.format_exc()[-1500:]))
        signal.alarm(0)
    report.write_text(json.dumps((counts, failures, "done")))


def _outcome(path):
    try:
        read(path)
    except InputError as error:
        message, cause = str(error), error.__cause__
    else:
        return "read"
    if isinstance(cause, MemoryError | TimeoutError):
        raise cause
    assert message.isprintable(), repr(message)
    assert str(path) in message
    assert len(message) < 1000
    return "refused"
