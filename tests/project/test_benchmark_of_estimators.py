"""The table of estimators: its standard errors on a few random images."""

import argparse

import torch

from benchmarks.estimators import PLAIN, bound, entries, measure, pareto_figure, table
from lit_knn.figures import save_figure


def test_every_estimator_is_measured_with_standard_errors(tmp_path):
    images = torch.randint(
        0, 256, (600, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    args = argparse.Namespace(
        k=100, n=16, t=["0.1", "12", "EDM"], batch=8, repeats=2, estimators=list(entries(100, 16))
    )
    estimators = {name: bound(entry, images) for name, entry in entries(100, 16).items()}
    rows = measure(estimators, images, args)
    by_name = {(row["estimator"], row["t"]): row for row in rows}
    assert {name for name, _ in by_name} == set(entries(100, 16))
    assert (by_name[PLAIN, "12"]["share"], by_name[PLAIN, "12"]["share_se"]) == (1, 0)
    assert by_name["SubspaceKNN, r=512", "12"]["mse"] < by_name[PLAIN, "12"]["mse"]
    assert all(row["mse_se"] > 0 for row in rows if row["t"] == "12")
    assert by_name["Exact", "EDM"]["mse"] < 1e-12
    # Images that are far apart give no error, so a share of the error does not exist.
    assert by_name[PLAIN, "0.1"]["mse"] == by_name[PLAIN, "0.1"]["mse_se"] == 0
    text = table(rows, dict.fromkeys(entries(100, 16), 0))
    (line,) = [line for line in text.splitlines() if line.startswith("| STF |") and "MiB" in line]
    stf = by_name["STF", "12"]
    assert f"{stf['mse']:.1e} ± {stf['mse_se']:.1e}" in line
    save_figure(pareto_figure(rows), tmp_path / "x")
    assert (tmp_path / "x.png").stat().st_size > 10_000
