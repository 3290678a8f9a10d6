"""Files that are whole or absent, tables in them, descriptions of settings, errors of the first rank, memory."""

import os
from contextlib import suppress

import pytest
import torch
from torch import nn

from lit_knn.common import memory
from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError
from lit_knn.common.exchange import Exchange
from lit_knn.common.files import written_whole
from lit_knn.common.settings import RecordsArguments, describe, fingerprint
from lit_knn.common.tables import ResultsTable, read_rows, undamaged_rows, write_rows
from lit_knn.theory.noise import VP


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, flush, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (done.append(os.fstat(number).st_size), flush(number))
    )
    monkeypatch.setattr(
        os, "replace", lambda source, target: (done.append("named"), replace(source, target))
    )
    with written_whole(tmp_path / "a.txt") as partial:
        partial.write_text("seven 7")
    with written_whole(tmp_path / "b.txt", flush=False) as partial:
        partial.write_text("many small files need no flush")
    assert done == [7, "named", "named"]


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with suppress(ZeroDivisionError), written_whole(path) as partial:
        partial.write_text("half")
        _ = 1 / 0
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a.txt", "old")]


def test_a_table_has_the_columns_of_all_its_rows(tmp_path):
    rows = [{"step": 1, "fid": 3.5}, {"step": 2, "kid": "x, y"}, {"note": "line\nbreak"}]
    write_rows(tmp_path / "a.csv", rows)
    read = read_rows(tmp_path / "a.csv")
    assert list(read[0]) == ["step", "fid", "kid", "note"]
    expected = [{name: str(value) for name, value in row.items()} for row in rows]
    assert [{name: value for name, value in row.items() if value} for row in read] == expected


def test_each_damaged_table_is_kept_beside_those_before(tmp_path):
    path = tmp_path / "a.csv"
    # a row that was cut short, and one with too much
    for number, row in enumerate(("1", "2,3,4", "5"), start=1):
        path.write_text(f"step,fid\n{row}\n")
        with pytest.warns(UserWarning, match=rf"a\.csv\.damaged-{number}"):
            assert undamaged_rows(path) == []
        assert (tmp_path / f"a.csv.damaged-{number}").read_text() == f"step,fid\n{row}\n"
    assert undamaged_rows(path) == []


def test_a_row_that_another_process_has_added_is_not_added_again(tmp_path):
    first, second = (
        ResultsTable(tmp_path / "t.csv", {"name": str, "value": float}, ("name",)) for _ in range(2)
    )
    first.append({"name": "a", "value": 1.0})
    second.append({"name": "a", "value": 2.0})
    second.append({"name": "b", "value": 3.0})
    assert read_rows(tmp_path / "t.csv") == [
        {"name": "a", "value": "1.0"},
        {"name": "b", "value": "3.0"},
    ]


class Thing(RecordsArguments):
    def __init__(self, value):
        self.value = value


def test_equal_values_of_other_types_are_described_apart():
    values = [
        0,
        False,
        None,
        0.0,
        "0",
        [0],
        {"a": 0},
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int32),
    ]
    values += [VP(beta_min=0.1), VP(beta_min=0.2)]
    values += [torch.zeros(1, 2), torch.zeros(4, dtype=torch.float16), torch.float32, torch.float64]
    # without weights
    values += [nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), nn.Sequential(nn.LeakyReLU(0.2)), nn.ELU(0.2)]
    described = [fingerprint(describe(Thing(value))) for value in values]
    assert len(set(described)) == len(values)
    assert described == [fingerprint(describe(Thing(value))) for value in values]
    # A network that was made from the name of a file counts with its weights.
    things = [Thing("file") for _ in range(2)]
    for thing in things:
        thing.network = nn.Linear(2, 2)
    assert describe(things[0]) != describe(things[1])


@pytest.mark.parametrize("error", [InputError("told"), OSError("told")])
def test_an_error_of_the_first_rank_is_one_of_input_everywhere(error):
    def fail():
        raise error

    # An error of another type would leave the other ranks waiting for the result.
    with pytest.raises(InputError, match=r"^told$"):
        on_first_rank(fail)


def test_values_of_the_first_rank_are_those_of_rank_0():
    sent, values = [], [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]

    class OfTwo(Exchange):
        """Delivers what the ranks have sent so far; after the last rank, this is everything."""

        def all_gather(self, rows):
            sent.append(rows)
            return sent

    exchange = OfTwo()
    for exchange.rank, exchange.size in ((0, 2), (1, 2)):
        received = exchange.of_first(values[exchange.rank])
    assert torch.equal(received, values[0])


@pytest.mark.parametrize(("limit", "share"), [("max", 1), ("{half}", 0.5), ("{double}", 1)])
def test_the_memory_is_that_of_the_container_if_it_has_less(limit, share, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", ())
    whole = memory.machine_bytes()
    (tmp_path / "limit").write_text(limit.format(half=whole // 2, double=2 * whole) + "\n")
    monkeypatch.setattr(
        memory, "CONTAINER_LIMITS", (str(tmp_path / "none"), str(tmp_path / "limit"))
    )
    assert memory.machine_bytes() == int(whole * share)
