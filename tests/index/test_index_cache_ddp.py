"""The processes of a distributed run share one built file; no process waits for a failed one."""

import json
import re
import time

import pytest

from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet
from tests.cached_index import images, queries
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def run(folder, how, ranks=2):
    return run_ranks("tests.index_probe", folder, how, ranks)


def reports(folder, ranks):
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]


def assert_equal_to_one_process(seen):
    sq_dist, ids = ReferenceSet(images(), FaissIndex("IVF4,SQ8")).search(queries(), 50)
    for report in seen:
        assert report["ids"] == ids.tolist()
        assert report["sq_dist"] == sq_dist.tolist()


def test_one_process_builds_and_both_map_its_file(tmp_path):
    codes, errors = run(tmp_path, "well")
    assert codes == [0, 0], errors
    seen = reports(tmp_path, 2)
    assert [report["builds"] for report in seen] == [1, 0]
    assert seen[0]["mapped"] == seen[1]["mapped"] == [str(path) for path in (tmp_path / "cache").glob("*.index")]
    assert_equal_to_one_process(seen)


def test_one_process_of_each_machine_builds(tmp_path):
    codes, errors = run(tmp_path, "machines", ranks=4)
    assert codes == [0] * 4, errors
    seen = reports(tmp_path, 4)
    assert [report["builds"] for report in seen] == [1, 0, 1, 0]
    assert seen[0]["mapped"] == seen[1]["mapped"] != seen[2]["mapped"] == seen[3]["mapped"]
    assert_equal_to_one_process(seen)


def test_each_builds_for_itself_where_the_disk_is_full(tmp_path):
    codes, errors = run(tmp_path, "full")
    assert codes == [0, 0], errors
    assert [error.count("going on without") for error in errors] == [1, 0]
    seen = reports(tmp_path, 2)
    assert [report["builds"] for report in seen] == [1, 1]
    assert_equal_to_one_process(seen)


@pytest.mark.parametrize(
    ("how", "codes", "words"),
    [
        ("error", [2, 2], ["error: no room", "error: rank 0 on .* failed: MemoryError: no room"]),
        ("folder", [2, 2], ["error: cache_dir=.* cannot be made", "error: rank 0 on .* failed: cache_dir=.* cannot"]),
        ("killed", [-9, 2], ["", "error: another process ended while the reference set was made ready"]),
        ("absent", [2, 3], ["error: another process ended while the reference set was made ready", ""]),
        ("data", [2, 2], ["error: rank 1 on .* failed: data.path=x: no such file", "error: data.path=x: no such file"]),
    ],
)
def test_an_error_in_the_build_ends_both_with_its_message(tmp_path, how, codes, words):
    start = time.monotonic()
    seen, errors = run(tmp_path, how)
    assert seen == codes
    for error, pattern in zip(errors, words, strict=True):
        lines = [line for line in error.splitlines() if line.startswith("error")]
        assert len(lines) == (1 if pattern else 0), error
        assert not pattern or re.search(pattern, lines[0])
    assert time.monotonic() - start < 40
