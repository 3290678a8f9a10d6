"""The benchmark of other people's code: its errors, its isolation, and its refusals.

Most tests write a folder in the form of another project. They prove that the benchmark calls the
code of a folder with the right images, noise levels and sources. They prove nothing about the code
of the authors. The last test runs it, where `LIT_KNN_CHECKOUTS` names a folder with checkouts.
"""

import csv
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.others.__main__ import main
from benchmarks.others.knn_score import KNNScore, KNNScoreSTF
from benchmarks.others.stf import STFTarget
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean
from tests.toys import noisy, pixels

CHECKOUTS = os.environ.get("LIT_KNN_CHECKOUTS")

# Each project has a module with this code. The shift tells whose module was imported.
SUMS = """
import torch
SHIFT = {shift}

def softmax_mean(z, x, sigma):
    sq_dist = torch.cdist(z.flatten(1).double(), x.flatten(1).double()).square()
    weights = torch.softmax(-sq_dist / (2 * sigma[:, None].double() ** 2), 1)
    return (weights @ x.flatten(1).double() + SHIFT).reshape(z.shape).float()
"""
DENOISERS = """
import torch
from training.sums import softmax_mean

class KNNDenoiser:
    def __init__(self, data, ref_size, k, gpu):
        assert len(data) == 60 and list(data.image_shape) == [1, 4, 4] and not gpu
        self.x = torch.stack([torch.as_tensor(image) for image, label in data]) / 127.5 - 1

    def __call__(self, z, sigma):
        return softmax_mean(z, self.x, sigma)

class STFDenoiser:
    def __init__(self, data, ref_size):
        pass

    def __call__(self, z, sigma, x):
        return x
"""
LOSS = """
from training.sums import softmax_mean

class EDMLoss:
    def stf_targets(self, sigmas, z, batch):
        assert len(batch) == 15
        return softmax_mean(z, batch[: len(z)], sigmas)
"""
GOLDDIFF = """
from types import SimpleNamespace
import torch
from training.sums import softmax_mean

class OursDenoiser:
    def __init__(self, data, device, num_steps, params):
        self.scheduler = SimpleNamespace(alphas_cumprod=torch.ones(3))

    def train(self, data):
        self.x = torch.cat(list(data.dataloader))
        return self

    def denoise(self, z, step):
        a = self.scheduler.alphas_cumprod[step]
        return softmax_mean(z / a.sqrt(), self.x, ((1 - a) / a).sqrt().expand(len(z)))
"""


def write(folder, file, code, shift):
    """Write a project with the module `file` and the module `training/sums.py`."""
    (folder / "training").mkdir(parents=True)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(code)
    (folder / "training" / "sums.py").write_text(SUMS.format(shift=shift))


@pytest.fixture
def options(tmp_path):
    """Options of the command that name data and three projects."""
    np.save(tmp_path / "data.npy", pixels(60, (1, 4, 4)).numpy())
    write(tmp_path / "knn-score", "training/denoisers.py", DENOISERS, shift=0)
    write(tmp_path / "stf", "training/loss.py", LOSS, shift=100)
    write(tmp_path / "golddiff", "methods/ours.py", GOLDDIFF, shift=0)
    projects = {f"--{name}": str(tmp_path / name) for name in ("knn-score", "stf", "golddiff")}

    return {"--data": str(tmp_path / "data.npy"), **projects}


def run(options, *more):
    pairs = [part for pair in options.items() for part in pair]
    main([*pairs, "--batch", "8", *more])


def refusal(options, capsys, *more):
    """Run a bad command line, and return its last line."""
    with pytest.raises(SystemExit, match="2"):
        run(options, *more)

    return capsys.readouterr().err.splitlines()[-1]


def mean_and_deviation(errors):
    """The mean of errors (B, 1, 4, 4), and the standard deviation of the mean over B."""
    values = errors.square().flatten(1).mean(1)
    return values.mean().item(), values.std().item() / len(values) ** 0.5


@pytest.mark.parametrize("t", [0.5, 3.0])
def test_rows_have_the_error_against_enumeration(t, options, tmp_path, capsys):
    run(options, "--t", str(t), "--repeats", "2", "--output", str(tmp_path / "out"))

    with (tmp_path / "out.csv").open() as file:
        rows = {row["estimator"]: row for row in csv.DictReader(file)}

    reference = ReferenceSet(pixels(60, (1, 4, 4)))
    images = reference.gather(torch.arange(60)).double()
    of_source, of_batch = [], []

    for repeat in (1, 2):
        z, x = NoisyLatents(reference, 8, repeat).batch(range(8), t)
        mu = posterior_mean(z.double(), images, t)
        of_source.append(x - mu)
        of_batch.append(posterior_mean(z.double(), x.double(), t) + 100 - mu)

    # `STFDenoiser` above returns the source that it gets.
    mse, deviation = mean_and_deviation(torch.cat(of_source))
    for name in ("OneSample", "knn-score: STFDenoiser"):
        assert float(rows[name]["mse"]) == pytest.approx(mse, rel=1e-5)
        assert float(rows[name]["mse_se"]) == pytest.approx(deviation, rel=1e-5)
    assert f"{mse:.1e} ± {deviation:.1e}" in capsys.readouterr().out

    # These two compute the exact mean, and round it to float32; the second one shrinks z before.
    assert float(rows["knn-score: KNNDenoiser"]["mse"]) < 1e-12
    assert float(rows["GoldDiff: OursDenoiser"]["mse"]) < 1e-10
    # `EDMLoss` above adds 100, so it has imported `training.sums` of its own folder.
    mse, _ = mean_and_deviation(torch.cat(of_batch))
    assert float(rows["stf: stf_targets"]["mse"]) == pytest.approx(mse, rel=1e-5)

    rivals = float(rows["three lines of PyTorch"]["seconds"])
    for row in rows.values():
        assert float(row["time_ratio"]) == pytest.approx(float(row["seconds"]) / rivals)


def test_imported_code_leaves_no_trace(options):
    path, modules = sys.path[:], set(sys.modules)
    run(options, "--t", "1", "--repeats", "1")
    assert sys.path == path
    left = {name.partition(".")[0] for name in set(sys.modules) - modules}
    assert not left & {"training", "methods"}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (None, " has no training/loss.py; clone github.com/Newbeeer/stf"),
        ("import not_there", "/training/loss.py needs the package not_there"),
        ("class Other: pass", "/training/loss.py has no EDMLoss"),
    ],
)
def test_a_folder_without_the_code_is_refused_in_one_line(code, reason, options, capsys):
    path = Path(options["--stf"]) / "training" / "loss.py"
    path.unlink()

    if code is not None:
        path.write_text(code)

    assert refusal(options, capsys) == f"error: {options['--stf']}{reason}"


def test_a_batch_as_large_as_n_is_refused(options, capsys):
    line = refusal(options, capsys, "--n", "8")
    assert line == "error: --batch 8 must be below n = 8; others share n images"


@pytest.mark.skipif(CHECKOUTS is None, reason="LIT_KNN_CHECKOUTS names no folder of checkouts")
def test_the_code_of_the_authors_estimates_the_mean():
    reference = ReferenceSet(pixels(120))
    images = reference.gather(torch.arange(120))
    x = images[:6]
    z, t = noisy(x, 1.0), 1.0
    mu = posterior_mean(z.double(), images.double(), t)
    knn_score, stf = (Path(CHECKOUTS) / name for name in ("knn-score", "stf"))
    estimators = [KNNScore(knn_score, 40, 4000), KNNScoreSTF(knn_score, 4000), STFTarget(stf, 100)]

    for estimator in estimators:
        estimator.bind(reference)
        generators = [torch.Generator().manual_seed(0) for _ in range(2)]
        mean, again = (estimator.posterior_mean(z, t, x, generator) for generator in generators)
        assert torch.equal(mean, again)
        # They average over all images, or most of them.
        assert (mean - mu).square().mean() < 0.2 * (x - mu).square().mean()
