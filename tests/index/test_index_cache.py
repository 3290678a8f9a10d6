"""The cache of built indexes: hits, refused files, and the leftovers of killed processes."""

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.files import locked
from lit_knn.index import FaissIndex
from lit_knn.index.cache import file_name
from lit_knn.reference import ReferenceSet
from tests import ROOT
from tests.cached_index import LARGE, images, queries, started, started_large
from tests.ranks import SERVER

FACTORIES = ["Flat", "SQ8", "IVF4,Flat", "IVF4,SQ8", "PCA8,IVF4,SQ8"]


@contextmanager
def no_build(folder):
    """Check that the block builds no index: each build would write a file."""
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.index")}
    yield
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.index")} == before


def only_file(folder):
    (path,) = folder.glob("*.index")
    return path


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours.search(queries(), 50), theirs.search(queries(), 50), strict=True))


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_second_start_finds_the_index_and_searches_alike(tmp_path, factory):
    plain = ReferenceSet(images(), FaissIndex(factory))
    first = started(tmp_path / "new" / "folder", factory)
    with no_build(tmp_path / "new" / "folder"):
        second = started(tmp_path / "new" / "folder", factory)
    assert equal(plain, first)
    assert equal(plain, second)
    assert equal(plain, second.to("cpu"))


def test_the_file_is_mapped_and_may_be_replaced_or_removed(tmp_path):
    before = started(tmp_path)
    path = only_file(tmp_path)
    assert str(path) in Path("/proc/self/maps").read_text()
    path.unlink()
    assert equal(before, started(tmp_path))


def test_other_data_and_settings_have_files_of_their_own(tmp_path):
    started(tmp_path)
    started(tmp_path, "IVF5,SQ8")
    started(tmp_path, lossless=True)
    started(tmp_path, pictures=images(seed=5))
    started(tmp_path, pictures=images().float() / 255)
    assert len(list(tmp_path.glob("*.index"))) == 5
    assert len({file_name({"factory": f}) for f in ("IVF4,SQ8", "IVF4-SQ8", "a/b", "a b")}) == 4


@pytest.mark.parametrize("size", [0, 100, 3000])
def test_a_damaged_file_is_told_with_its_name(tmp_path, size):
    started(tmp_path)
    path = only_file(tmp_path)
    replacement = path.with_suffix(".tmp")
    replacement.write_bytes(path.read_bytes()[:size])
    replacement.rename(path)
    with pytest.raises(InputError, match=f"index cache: {path} is damaged, remove it: .") as error:
        started(tmp_path)
    assert "\n" not in str(error.value)


def test_an_index_of_another_faiss_is_not_taken(tmp_path, monkeypatch):
    import faiss

    first = started(tmp_path)
    monkeypatch.setattr(faiss, "__version__", "0.0")
    assert equal(first, started(tmp_path))
    assert len(list(tmp_path.glob("*.index"))) == 2


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_build(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"cache_dir={tmp_path / folder} cannot be made: "):
        # The cache must fail first: a build would refuse these images.
        started(tmp_path / folder, lossless=True, pictures=torch.randn(200, 1, 4, 6))


def test_a_killed_process_leaves_what_the_next_start_can_use(tmp_path):
    pictures = images(20_000)
    expected = ReferenceSet(pictures, FaissIndex(LARGE))
    draw = np.random.default_rng()
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        process = SERVER.Process(target=started_large, args=(folder,))
        process.start()
        while process.is_alive() and not list(folder.glob(".*.lock")):
            time.sleep(0.001)
        # From here, building and writing take about 0.3 s.
        time.sleep(draw.uniform(0, 0.4))
        process.kill()
        process.join()
        second = started(folder, LARGE, pictures)
        assert equal(expected, second)
        names = [path.name for path in folder.iterdir()]
        assert len(names) == 2, names  # the index and its lock


def test_a_lock_waits_and_says_so_and_ends_with_its_process(tmp_path):
    code = (
        "import sys, time, pathlib\nfrom lit_knn.common.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    print('in', flush=True)\n    time.sleep(0.5)\n    print('out', flush=True)"
    )
    path = tmp_path / "x.index"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "in\n"
    with pytest.warns(UserWarning, match=f"waiting for another process that is at work on {path}"), locked(path):
        assert process.stdout.readline() == "out\n"
    process.communicate()


def test_what_a_killed_writer_left_is_removed(tmp_path):
    started(tmp_path)
    path = only_file(tmp_path)
    path.unlink()
    (tmp_path / f".{path.stem}.99999.partial.index").write_bytes(b"half")
    started(tmp_path)
    assert not list(tmp_path.glob(".*partial*"))
