"""The table of estimators: its standard errors on a few random images, and its stored results."""

import argparse
import csv

import torch

from benchmarks.common import Output
from benchmarks.estimators import PLAIN, entries, measure, pareto_figure, table
from benchmarks.gpu import estimators as on_a_gpu
from benchmarks.gpu.__main__ import Results
from lit_knn.common.tables import write_rows
from lit_knn.figures import save_figure
from lit_knn.modules import LitICT
from lit_knn.sampling import euler_step, heun_step
from tests.short_training import train
from tests.watched import Asked, Images, WatchedNet


def test_every_estimator_is_measured_with_standard_errors(tmp_path):
    images = torch.randint(0, 256, (600, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    args = argparse.Namespace(k=100, n=16, t=[0.1, 12.0], batch=8, repeats=2, estimators=list(entries(100, 16)))
    rows = measure(images, args)
    by_name = {(row["estimator"], row["t"]): row for row in rows}
    assert {name for name, _ in by_name} == set(entries(100, 16))
    assert (by_name[PLAIN, 12.0]["share"], by_name[PLAIN, 12.0]["share_se"]) == (1, 0)
    assert by_name["SubspaceKNN, r=512", 12.0]["mse"] < by_name[PLAIN, 12.0]["mse"]
    assert all(row["mse_se"] > 0 for row in rows if row["t"] == 12.0)
    # Images that are far apart give no error, so a share of the error does not exist.
    assert by_name[PLAIN, 0.1]["mse"] == by_name[PLAIN, 0.1]["mse_se"] == 0
    text = table(rows, dict.fromkeys(entries(100, 16), 0))
    (line,) = [line for line in text.splitlines() if line.startswith("| STF |") and "MiB" in line]
    stf = by_name["STF", 12.0]
    assert f"{stf['mse']:.1e} ± {stf['mse_se']:.1e}" in line
    write_rows(tmp_path / "x.csv", rows)
    assert table(list(csv.DictReader((tmp_path / "x.csv").open())), dict.fromkeys(entries(100, 16), 0)) == text
    save_figure(pareto_figure(rows), tmp_path / "x")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_the_share_of_a_training_step_counts_the_calls_of_its_solver():
    for name, solver in {"Euler": euler_step, "Heun": heun_step}.items():
        estimator = Asked()
        train(LitICT(WatchedNet(), estimator, solver=solver), Images(), 1)
        assert len(estimator.levels) == on_a_gpu.CALLS[name]
    common = {"N": 300, "d": 192, "B": 4, "k": 9, "n": 5, "least_ms": 1.0, "of_roofline": 1.0, "host_ms": 1.0}
    common["peak_mib"] = float("nan")
    rows = [{"estimator": "KNN", "ms": 10.0, "calls": 1}, {"estimator": "Heun's step of KNN", "ms": 20.0, "calls": 2}]
    printed = on_a_gpu.table([row | common for row in rows], lambda B, d: 30.0)
    # Of a step without estimator of 30 ms, one call of 10 ms is a quarter, and two are 2/5.
    assert printed.count("| 25.0% | 40.0% |") == 2


def test_a_set_that_a_small_gpu_cannot_hold_is_told_and_is_no_failure(capsys):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.66 GiB")

    results = Results(Output(None))
    results.add("estimator", "estimators on 1,281,167 images", full)
    assert "1,281,167 images: CUDA out of memory" in capsys.readouterr().err
    assert results.problems() == []
