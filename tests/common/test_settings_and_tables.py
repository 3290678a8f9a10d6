"""Descriptions of settings that differ, differ; a table that several processes write has each row once."""

import torch
from torch import nn

from lit_knn.common.settings import RecordsArguments, describe, fingerprint
from lit_knn.common.tables import ResultsTable, read_rows


class Thing(RecordsArguments):
    def __init__(self, value):
        self.value = value


def test_values_that_python_or_memory_holds_alike_are_described_apart():
    values = [0, False, None, 0.0, "0", [0], {"a": 0}, torch.zeros(2), torch.zeros(2, dtype=torch.int32)]
    values += [torch.zeros(1, 2), torch.zeros(4, dtype=torch.float16), torch.float32, torch.float64]
    values += [nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), nn.Sequential(nn.LeakyReLU(0.2)), nn.ELU(0.2)]  # without weights
    described = [fingerprint(describe(Thing(value))) for value in values]
    assert len(set(described)) == len(values)
    assert described == [fingerprint(describe(Thing(value))) for value in values]


def test_a_row_that_another_process_has_added_is_not_added_again(tmp_path):
    first, second = (ResultsTable(tmp_path / "t.csv", {"name": str, "value": float}, ("name",)) for _ in range(2))
    first.append({"name": "a", "value": 1.0})
    second.append({"name": "a", "value": 2.0})
    second.append({"name": "b", "value": 3.0})
    assert read_rows(tmp_path / "t.csv") == [{"name": "a", "value": "1.0"}, {"name": "b", "value": "3.0"}]
