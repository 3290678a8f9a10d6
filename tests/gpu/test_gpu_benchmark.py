"""`python -m benchmarks.gpu` at small sizes on the CPU: it shows that the command works, not how fast a GPU is."""

import csv

import pytest
import torch

from benchmarks.common import Output
from benchmarks.gpu.__main__ import Results
from benchmarks.gpu.__main__ import main as benchmark
from benchmarks.gpu.checks import Check, outcome
from benchmarks.gpu.estimators import CALLS, ENTRIES, table
from benchmarks.gpu.images import synthetic_images
from lit_knn.estimators import KNN, Exact
from lit_knn.index import TorchIndex
from lit_knn.modules import LitICT
from lit_knn.sampling import euler_step, heun_step
from tests.short_training import train
from tests.watched import Asked, Images, WatchedNet

CPU = torch.device("cpu")


def run(stem, *args):
    """Run the command; return its rows by part."""
    assert (
        benchmark(["--output", str(stem), "--images", "300", "--batch", "4", "--n", "16", *args])
        == 0
    )
    rows = list(csv.DictReader(stem.with_name(f"{stem.name}.csv").open()))
    return {
        part: [row for row in rows if row["part"] == part]
        for part in ("check", "training", "estimator")
    }


@pytest.mark.slow  # The next test runs the command, with less time.
def test_the_command_checks_and_measures_every_estimator(tmp_path, capsys):
    parts = run(tmp_path / "gpu")
    assert (tmp_path / "gpu.md").read_text().strip() in capsys.readouterr().out
    assert all(row["passed"] == "True" for row in parts["check"])
    assert [row["estimator"] for row in parts["estimator"]] == list(ENTRIES)
    assert all(float(row["ms"]) > 0 for row in parts["estimator"])
    assert all(float(row["images_per_s"]) > 0 for row in parts["training"])


def test_it_ends_when_the_time_is_over(tmp_path):
    parts = run(tmp_path / "gpu", "--minutes", "1e-9")
    assert len(parts["check"]) > 10
    assert {row["note"] for row in (*parts["training"], *parts["estimator"])} == {"no time left"}


class Wrong(Exact):
    """An exact mean that is wrong in its fourth digit, or fails as no one expects."""

    def __init__(self, fails=False):
        self.fails = fails

    def _posterior_mean(self, *args):
        if self.fails:
            raise KeyError("float8")
        return super()._posterior_mean(*args) + 1e-3


def test_wrong_path_fails_and_a_failed_part_ends_no_other(tmp_path):
    images = synthetic_images(60, (3, 8, 8), CPU)
    assert outcome(Check(lambda N: Exact(), exact=True), images, CPU)["passed"]
    for check, measured in (
        (Check(lambda N: Wrong(), exact=True), "1e-06 squared error"),
        (Check(lambda N: Wrong(fails=True), exact=True), "failed: KeyError: 'float8'"),
        (Check(lambda N: KNN(k=61), TorchIndex), "k=61 is more"),
    ):
        found = outcome(check, images, CPU)
        assert not found["passed"]
        assert measured in found["measured"]
    results = Results(Output(tmp_path / "gpu", "csv", "md"))
    results.add("training", "training", lambda: images[61])
    (problem,) = results.problems()
    assert problem.startswith("training: failed: IndexError: index 61")


def test_training_share_counts_the_calls_of_its_solver():
    for name, solver in {"Euler": euler_step, "Heun": heun_step}.items():
        estimator = Asked()
        train(LitICT(WatchedNet(), estimator, solver=solver), Images(), 1)
        assert len(estimator.levels) == CALLS[name]
    common = {
        "N": 300,
        "d": 192,
        "B": 4,
        "k": 9,
        "n": 5,
        "least_ms": 1.0,
        "of_roofline": 1.0,
        "host_ms": 1.0,
    }
    common["peak_mib"] = float("nan")
    rows = [
        {"estimator": "KNN", "ms": 10.0, "calls": 1},
        {"estimator": "Heun's step of KNN", "ms": 20.0, "calls": 2},
    ]
    printed = table([row | common for row in rows], lambda B, d: 30.0)
    # A step without estimator takes 30 ms. One call of 10 ms is a quarter of the whole, and two are two fifths.
    assert printed.count("| 25.0% | 40.0% |") == 2


def test_set_beyond_a_small_gpu_is_said_and_is_no_failure(capsys):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.66 GiB")

    results = Results(Output(None))
    results.add("estimator", "estimators on 1,281,167 images", full)
    assert "1,281,167 images: CUDA out of memory" in capsys.readouterr().err
    assert results.problems() == []
