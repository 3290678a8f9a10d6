"""Files that are whole or absent, and tables in them."""

import os

import pytest

from lit_knn.common.files import written_whole
from lit_knn.common.tables import read_rows, undamaged_rows, write_rows


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, flush, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append(os.fstat(number).st_size), flush(number)))
    monkeypatch.setattr(os, "replace", lambda source, target: (done.append("named"), replace(source, target)))
    with written_whole(tmp_path / "a.txt") as partial:
        partial.write_text("seven 7")
    with written_whole(tmp_path / "b.txt", flush=False) as partial:
        partial.write_text("many small files need no flush")
    assert done == [7, "named", "named"]


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail():
        with written_whole(path) as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a.txt", "old")]


def test_a_table_has_the_columns_of_all_its_rows(tmp_path):
    rows = [{"step": 1, "fid": 3.5}, {"step": 2, "kid": "x, y"}, {"note": "line\nbreak"}]
    write_rows(tmp_path / "a.csv", rows)
    read = read_rows(tmp_path / "a.csv")
    assert list(read[0]) == ["step", "fid", "kid", "note"]
    assert [{name: value for name, value in row.items() if value} for row in read] == [
        {name: str(value) for name, value in row.items()} for row in rows
    ]


def test_each_damaged_table_is_kept_beside_those_before(tmp_path):
    path = tmp_path / "a.csv"
    for number in (1, 2, 3):
        path.write_text(f"step,fid\n{number}\n")
        with pytest.warns(UserWarning, match=rf"a\.damaged-{number}\.csv"):
            assert undamaged_rows(path) == []
    assert [(tmp_path / f"a.damaged-{number}.csv").read_text()[-2] for number in (1, 2, 3)] == ["1", "2", "3"]
    assert undamaged_rows(path) == []
