"""`python -m benchmarks.gpu` at small sizes on the CPU: it shows that the command works, not how fast a GPU is."""

import csv
import sys

import pytest
import torch

from benchmarks.common import Output
from benchmarks.gpu.__main__ import Results
from benchmarks.gpu.__main__ import main as benchmark
from benchmarks.gpu.checks import Check, outcome
from benchmarks.gpu.estimators import ENTRIES
from benchmarks.gpu.images import synthetic_images
from lit_knn.estimators import KNN, Exact
from lit_knn.index import TorchIndex
from tests.ranks import run_probe

CPU = torch.device("cpu")
# These packages are not needed; torchmetrics itself imports matplotlib if it is installed.
WITHOUT = ("faiss", "torch_fidelity", "torchvision", "matplotlib", "tensorboard", "sklearn", "PIL", "safetensors")
WITHOUT += ("jsonargparse",)


@pytest.mark.slow  # The next test runs the command, with less time.
def test_the_command_checks_and_measures_every_estimator(tmp_path, capsys):
    assert benchmark(["--output", str(tmp_path / "gpu"), "--images", "300", "--batch", "4", "--n", "16"]) == 0
    assert (tmp_path / "gpu.md").read_text().strip() in capsys.readouterr().out
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
    rows = list(csv.DictReader((tmp_path / "gpu.csv").open()))
    parts = {part: [row for row in rows if row["part"] == part] for part in ("check", "training", "estimator")}
    assert all(row["passed"] == "True" for row in parts["check"])
    assert [row["estimator"] for row in parts["estimator"]] == list(ENTRIES)
    assert all(float(row["ms"]) > 0 for row in parts["estimator"])
    assert all(float(row["images_per_s"]) > 0 for row in parts["training"])


def main(rank, ranks, folder, how):
    """Import the project anew, where these packages are missing, and run the benchmark without time."""
    packages = {name: name.partition(".")[0] for name in sys.modules}
    for name, package in packages.items():
        if package in ("lit_knn", "benchmarks", "callbacks", "main"):
            del sys.modules[name]
        elif package in WITHOUT:
            sys.modules[name] = None
    sys.modules.update(dict.fromkeys(WITHOUT))
    from benchmarks.gpu.__main__ import main as anew

    sys.exit(anew(["--output", str(folder / "gpu"), "--minutes", "1e-9"]))


def test_it_needs_no_package_beyond_four_and_ends_when_the_time_is_over(tmp_path):
    done = run_probe("tests.gpu.test_gpu_benchmark", tmp_path)
    assert done.codes == [0], done.stderr
    assert "matplotlib is missing" in done.stdout
    rows = list(csv.DictReader((tmp_path / "gpu.csv").open()))
    assert {row["note"] for row in rows if row["part"] != "check"} == {"no time left"}


class Wrong(Exact):
    """An exact mean that is wrong in its fourth digit, or fails as no one expects."""

    def __init__(self, fails=False):
        self.fails = fails

    def _posterior_mean(self, *args):
        if self.fails:
            raise KeyError("float8")
        return super()._posterior_mean(*args) + 1e-3


def test_a_wrong_path_does_not_pass_and_a_part_that_fails_ends_no_other(tmp_path):
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
    results = Results(Output(tmp_path / "gpu", "csv", "md", "png"))
    results.add("training", "training", lambda: images[61])
    (problem,) = results.problems()
    assert problem.startswith("training: failed: IndexError: index 61")
