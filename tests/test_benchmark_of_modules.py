"""The benchmark of the training modules, at the smallest size."""

import pytest

from benchmarks import modules

SIZE = {"device": "cpu", "threads": 1, "side": 8, "images": 40, "channels": 16, "batch": 4, "warm_up": 1, "steps": 1}


def test_rows_have_ratios_to_ict():
    rows = modules.measure(["OneSample"], modules.Setting(**SIZE), 2, run=lambda work, *args: (work(*args), None))
    assert [row["module"] for row in rows] == list(modules.MODULES)
    first = rows[0]
    assert (first["module"], first["seconds_ratio"], first["bytes_ratio"]) == ("iCT", 1, 1)
    for row in rows:
        assert row["seconds"] > 0
        assert 0 <= row["estimator_share"] < 1
        for quantity in ("seconds", "bytes"):
            assert row[f"{quantity}_ratio"] == pytest.approx(row[quantity] / first[quantity])
    assert modules.table(rows).count("| OneSample |") == len(rows)
