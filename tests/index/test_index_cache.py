"""The cache of built indexes: hits, refused files, a full disk, and the processes of a distributed run."""

import errno
import fcntl
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.files import locked
from lit_knn.data.prepared import read_prepared
from lit_knn.data.prepared_writer import prepare
from lit_knn.index import FaissIndex
from lit_knn.index.cache import file_name
from lit_knn.reference import ReferenceSet
from tests import ROOT
from tests.image_files import image_folder
from tests.index_probe import images, queries, started
from tests.ranks import run_ranks


def written(folder):
    """The index files of a folder and when they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("*.index")}


def equal(ours, theirs):
    return all(map(torch.equal, ours.search(queries(), 50), theirs.search(queries(), 50)))


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "IVF4,Flat", "IVF4,SQ8", "PCA8,IVF4,SQ8"])
def test_a_second_start_maps_the_index_and_searches_alike(tmp_path, factory):
    folder, plain = tmp_path / "new" / "folder", ReferenceSet(images(), FaissIndex(factory))
    first = started(folder, factory)
    before = written(folder)
    second = started(folder, factory)
    assert written(folder) == before
    assert all(equal(plain, reference) for reference in (first, second, second.to("cpu")))
    (path,) = before
    assert str(path) in Path("/proc/self/maps").read_text()
    # A mapped file may be replaced or removed. A killed writer's file goes.
    path.unlink()
    (folder / f".{path.stem}.99999.partial.index").write_bytes(b"half")
    assert equal(plain, started(folder, factory))
    assert equal(plain, second)
    assert not list(folder.glob(".*partial*"))


def test_other_data_settings_and_versions_have_other_files(tmp_path, monkeypatch):
    import faiss

    first = started(tmp_path)
    started(tmp_path, "IVF5,SQ8")
    started(tmp_path, lossless=True)
    started(tmp_path, pictures=images(seed=5))
    started(tmp_path, pictures=images().float() / 255)
    # Mirrored images are searched in the index of the stored ones.
    ReferenceSet(
        images(), FaissIndex("IVF4,SQ8", cache_dir=str(tmp_path)), hflip=True
    ).build_index()
    assert len(written(tmp_path)) == 5
    monkeypatch.setattr(faiss, "__version__", "0.0")
    assert equal(first, started(tmp_path))
    assert len(written(tmp_path)) == 6
    assert len({file_name({"factory": f}) for f in ("IVF4,SQ8", "IVF4-SQ8", "a/b", "a b")}) == 4


@pytest.mark.parametrize("size", [0, 3000])
def test_a_damaged_file_is_told_with_its_name(tmp_path, size):
    started(tmp_path)
    (path,) = written(tmp_path)
    content = path.read_bytes()
    path.unlink()  # It is mapped.
    path.write_bytes(content[:size])
    with pytest.raises(InputError, match=f"index cache: {path} is damaged, remove it: .") as error:
        started(tmp_path)
    assert "\n" not in str(error.value)


def test_an_index_of_somebody_else_needs_no_lock(tmp_path):
    first = started(tmp_path)
    ((path, when),) = written(tmp_path).items()
    lock = path.with_name(f".{path.name}.lock")
    lock.unlink()
    lock.mkdir()  # as one that this user may not open
    assert equal(first, started(tmp_path))
    assert written(tmp_path) == {path: when}


def test_unwritable_index_is_used_and_leaves_no_file(tmp_path, monkeypatch):
    import faiss

    def fill_the_disk(index, writer):
        writer(b"half")
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(faiss, "PyCallbackIOWriter", lambda write, size: write)
    monkeypatch.setattr(faiss, "write_index", fill_the_disk)
    with pytest.warns(
        UserWarning, match="cannot be written: No space left on device; going on without"
    ):
        first = started(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    monkeypatch.undo()
    assert equal(first, started(tmp_path))


def test_a_lock_waits_and_says_so_and_ends_with_its_process(tmp_path):
    code = (
        "import sys, time, pathlib\nfrom lit_knn.common.files import locked\npath = pathlib.Path(sys.argv[1])\n"
        "with locked(path):\n    print('in', flush=True)\n    time.sleep(0.5)\n    path.touch()"
    )
    path = tmp_path / "x.index"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "in\n"
    with (
        pytest.warns(UserWarning, match=f"waiting for another process that is at work on {path}"),
        locked(path),
    ):
        assert path.exists()
    process.communicate()


def test_a_file_system_without_locks_goes_on_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert equal(started(tmp_path), started(tmp_path))
    prepare(image_folder(tmp_path / "source"), tmp_path / "images.npy")
    assert len(read_prepared(tmp_path / "images.npy").images) == 20


# Several processes


def run(folder, how, ranks=2):
    """Run processes that build one index. Returns what each reports, its exit status and its errors."""
    codes, _, errors = run_ranks("tests.index_probe", folder, how, ranks)
    reports = [folder / f"rank_{rank}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) for path in reports if path.exists()], codes, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "builds"),
    # "full": the disk is, so each builds for itself
    [("well", [1, 0]), ("machines", [1, 0, 1, 0]), ("full", [1, 1])],
)
def test_one_process_per_machine_builds_and_others_map_its_file(tmp_path, how, builds):
    seen, codes, errors = run(tmp_path, how, len(builds))
    assert codes == [0] * len(builds), errors
    assert [report["builds"] for report in seen] == builds
    sq_dist, ids = ReferenceSet(images(), FaissIndex("IVF4,SQ8")).search(queries(), 50)
    assert all(
        (report["sq_dist"], report["ids"]) == (sq_dist.tolist(), ids.tolist()) for report in seen
    )
    assert [error.count("going on without") for error in errors][:2] == [int(how == "full"), 0]
    for rank, report in enumerate(seen):
        folder = tmp_path / (f"cache-{rank // 2}" if how == "machines" else "cache")
        assert report["mapped"] == (
            [] if how == "full" else [str(path) for path in folder.glob("*.index")]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "codes", "words"),
    [
        ("error", [2, 2], ["error: no room", "error: rank 0 on .* failed: MemoryError: no room"]),
        (
            "folder",
            [2, 2],
            [
                "error: cache_dir=.* cannot be made",
                "error: rank 0 on .* failed: cache_dir=.* cannot",
            ],
        ),
        (
            "killed",
            [-9, 2],
            ["", "error: another process ended while the reference set was made ready"],
        ),
        (
            "absent",
            [2, 3],
            ["error: another process ended while the reference set was made ready", ""],
        ),
        (
            "data",
            [2, 2],
            [
                "error: rank 1 on .* failed: data.path=x: no such file",
                "error: data.path=x: no such file",
            ],
        ),
    ],
)
def test_an_error_in_the_build_ends_both_with_its_message(tmp_path, how, codes, words):
    start = time.monotonic()
    _, seen, errors = run(tmp_path, how)
    assert seen == codes
    for error, pattern in zip(errors, words, strict=True):
        lines = [line for line in error.splitlines() if line.startswith("error")]
        assert len(lines) == (1 if pattern else 0), error
        assert not pattern or re.search(pattern, lines[0])
    assert time.monotonic() - start < 40
