"""The table of estimators: its standard errors on a few random images, and its stored results."""

import argparse
import csv

import numpy as np
import pytest
import torch

from benchmarks.estimators import PLAIN, entries, measure, pareto_figure, table
from lit_knn.common.tables import write_rows
from lit_knn.figures import save_figure
from lit_knn.metrics.estimator_error import mean_and_error, share_and_error


def test_standard_errors_are_the_spread_of_repeated_measurements():
    # At the same latents two methods' errors rise and fall together, so their ratio is more precise than either.
    generator = torch.Generator().manual_seed(0)
    common = torch.rand(1000, 64, dtype=torch.float64, generator=generator)
    values = 0.3 * common * (0.8 + 0.4 * torch.rand(1000, 64, dtype=torch.float64, generator=generator))
    means = np.array([mean_and_error(row) for row in values])
    assert means[:, 1].mean() == pytest.approx(means[:, 0].std(), rel=0.1)
    shares = np.array([share_and_error(*pair) for pair in zip(values, common, strict=True)])
    assert shares[:, 0].mean() == pytest.approx(0.3, rel=0.01)
    assert shares[:, 1].mean() == pytest.approx(shares[:, 0].std(), rel=0.1)
    # Closed form: uniform numbers have variance 1/12.
    assert means[:, 1].mean() == pytest.approx((0.09 * (1 / 3 * (1 + 0.16 / 12) - 1 / 4) / 64) ** 0.5, rel=0.03)


def test_every_estimator_is_measured_with_standard_errors(tmp_path):
    images = torch.randint(0, 256, (600, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    args = argparse.Namespace(k=100, n=16, t=[0.1, 12.0], batch=8, repeats=2, estimators=list(entries(100, 16)))
    rows = measure(images, args)
    by_name = {(row["estimator"], row["t"]): row for row in rows}
    assert {name for name, _ in by_name} == set(entries(100, 16))
    assert by_name[PLAIN, 12.0]["share"] == 1
    assert by_name[PLAIN, 12.0]["share_se"] == 0
    assert by_name["SubspaceKNN, r=512", 12.0]["mse"] < by_name[PLAIN, 12.0]["mse"]
    assert all(row["mse_se"] > 0 for row in rows if row["t"] == 12.0)
    # Images that are far apart give no error, so a share of the error does not exist.
    assert by_name[PLAIN, 0.1]["mse"] == by_name[PLAIN, 0.1]["mse_se"] == 0
    text = table(rows, dict.fromkeys(entries(100, 16), 0))
    (line,) = [line for line in text.splitlines() if line.startswith("| STF |") and "MiB" in line]
    stf = by_name["STF", 12.0]
    assert f"{stf['mse']:.1e} ± {stf['mse_se']:.1e}" in line
    write_rows(tmp_path / "x.csv", rows)
    again = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert table(again, dict.fromkeys(entries(100, 16), 0)) == text
    save_figure(pareto_figure(rows), tmp_path / "x")
    assert (tmp_path / "x.png").stat().st_size > 10_000
