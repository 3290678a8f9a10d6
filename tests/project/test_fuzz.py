"""Damaged files are read or refused with one line, in bounded time and memory; `tests/fuzz.py` makes them by number."""

import numpy as np
import pytest

from tests.fuzz import KINDS, file_of, fuzz, read, valid

# Numbers of inputs that once ended in something else.
FOUND = {"zip": [499, 9449, 9461], "json": [], "npz": [18, 4573], "pickle": [1334]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_hundred_damaged_files_are_read_or_refused(tmp_path, kind):
    counts, failures = fuzz(kind, [*FOUND[kind], *range(200)], tmp_path)
    assert not failures, failures[0]
    assert counts["refused"] > 100
    assert sum(counts.values()) == 200 + len(FOUND[kind])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_damaged_files_are_read_or_refused(tmp_path, kind):
    counts, failures = fuzz(kind, range(10_000), tmp_path)
    print(f"{kind}: {dict(counts)}, {len(failures)} failures")
    assert not failures, failures[:5]
    assert sum(counts.values()) == 10_000


@pytest.mark.parametrize("kind", KINDS)
def test_the_inputs_are_the_same_each_time_and_begin_with_files_that_are_read(tmp_path, kind):
    assert file_of(kind, 7) == file_of(kind, 7)
    assert file_of(kind, 7) != file_of(kind, 8)
    suffix = {"zip": ".zip", "npz": ".npz", "pickle": ".pkl"}
    if kind in suffix:
        # The last pickle is no network, and the last zips are packed by LZMA.
        for content in valid(kind)[: {"pickle": -1, "zip": -3}.get(kind)]:
            path = tmp_path / f"a{suffix[kind]}"
            path.write_bytes(content)
            assert len(read(path)) == 2


def test_a_reader_that_fails_hangs_or_takes_memory_is_noticed(tmp_path, monkeypatch):
    import tests.fuzz as fuzzer

    def bad(path):
        if path.stat().st_size % 3 == 0:
            raise KeyError("a bug")
        if path.stat().st_size % 3 == 1:
            return np.ones(2**32)
        while True:
            pass

    monkeypatch.setattr(fuzzer, "read", bad)
    monkeypatch.setattr(fuzzer, "SECONDS", 1)
    counts, failures = fuzz("json", range(6), tmp_path)
    assert not counts
    assert len(failures) == 6
    assert {what.splitlines()[-1].split(":")[0] for _, what in failures} <= {
        "KeyError", "numpy._core._exceptions._ArrayMemoryError", "TimeoutError",
    }  # fmt: skip
