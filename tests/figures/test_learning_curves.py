"""The learning curves: the grid goes on where it stopped, and the variance of gradients is that of closed forms."""

import csv
import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.learning_curves.__main__ import main
from benchmarks.learning_curves.claims import judge
from benchmarks.learning_curves.kinds import KINDS
from benchmarks.learning_curves.measurements import Measurements
from benchmarks.learning_curves.sets import Images, Lengths
from benchmarks.learning_curves.statistics import Curves, interval
from lit_knn.estimators import Exact, OneSample
from lit_knn.reference import ReferenceSet

LENGTHS = Lengths(steps=2, consistency_steps=2, measurements=2, batch_size=16, samples=80, held=20, pairs=6, repeats=3)
TINY = [
    "--steps",
    "2",
    "--consistency-steps",
    "2",
    "--measurements",
    "2",
    "--batch-size",
    "16",
    "--samples",
    "80",
    "--held",
    "20",
    "--pairs",
    "4",
]
TINY += ["--repeats", "2", "--seeds", "1"]


def rows_of(path):
    return list(csv.DictReader(path.open()))


def curves_command(path, *more):
    main(["--output", str(path), "--checkpoints", str(path.with_suffix("")), *TINY, *more])


def same_numbers(rows, others):
    """Compare rows without their times."""
    times = {"cpu_seconds", "seconds", "estimator_seconds"}
    return [{k: v for k, v in row.items() if k not in times} for row in rows] == [
        {k: v for k, v in row.items() if k not in times} for row in others
    ]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("curves") / "x.csv"
    curves_command(path, "--modules", "EDM", "iCT", "--estimators", "OneSample", "KNN")
    return path


def test_a_finished_run_is_not_repeated_and_a_missing_one_is_made_again_the_same(table, tmp_path):
    kept = rows_of(table)
    shorter = tmp_path / "x.csv"
    lines = table.read_text().splitlines(keepends=True)
    shorter.write_text("".join(lines[:5] + lines[7:]))  # without the run iCT, OneSample
    curves_command(shorter, "--modules", "EDM", "iCT", "--estimators", "OneSample", "KNN")
    again = rows_of(shorter)
    assert again[:6] == kept[:4] + kept[6:]
    assert same_numbers(again[6:], kept[4:6])


# The variance of gradients


class Linear(nn.Module):
    """A network that is a matrix: W times its flattened input."""

    def __init__(self, d):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(d, d, generator=torch.Generator().manual_seed(4)) / d)

    def forward(self, z, noise_label, class_label=None):
        return (z.flatten(1) @ self.matrix.T).reshape(z.shape)


def tiny_set():
    generator = torch.Generator().manual_seed(1)
    return ReferenceSet(torch.rand(7, 1, 2, 2, generator=generator) * 2 - 1)


def posterior(reference, z, t):
    """Weights of the images, (B, N), in float64 by enumeration."""
    x = reference.gather(torch.arange(reference.N)).flatten(1).double()
    sq_dist = torch.cdist(z.flatten(1).double(), x).square()
    return torch.softmax(-sq_dist / (2 * t[:, None].square()), 1), x


def test_the_gradient_variance_of_a_linear_denoiser_is_its_closed_form():
    reference = tiny_set()
    lengths = LENGTHS._replace(repeats=1500, pairs=3, held=2)
    kind = KINDS["EDM"]
    measurements = Measurements(kind, Images(reference, None, reference), lengths)
    _, z, t, _, _ = measurements.pairs
    module = kind.make(Linear(4), {"estimator": OneSample()}, 0, 10, None)
    found = measurements.gradients(module)
    weights, x = posterior(reference, z, t)
    mean = weights @ x
    trace = (weights * x.square().sum(1)).sum(1) - mean.square().sum(1)
    # D = c_skip·z + c_out·W·(c_in·z), so dL_i/dW = 2 λ c_out (D − target) (c_in·z)ᵀ for the sum over pixels, and λ is
    # 1/c_out². The batch averages three independent items.
    c_out = t * 0.5 / (t.square() + 0.25).sqrt()
    z_in = z.flatten(1).double() / (t.square() + 0.25).sqrt()[:, None]
    variance = (4 / c_out.square() * z_in.square().sum(1) * trace).sum() / 9
    assert found.variance == pytest.approx(variance.item(), abs=4 * found.variance_se)
    assert found.variance_se < 0.05 * found.variance
    skip = 0.25 / (t.square() + 0.25)
    output = skip[:, None] * z.flatten(1) + c_out[:, None] * (z_in @ module.denoiser.model.matrix.T.double())
    gradient = ((2 / c_out)[:, None, None] * (output - mean)[:, :, None] * z_in[:, None]).mean(0)
    assert found.norm_sq == pytest.approx(gradient.square().sum().item(), rel=0.05)


@pytest.mark.parametrize("name", ["EDM", "flow"])
def test_the_error_of_a_regression_is_its_loss_with_enumerated_targets(name):
    reference, kind = tiny_set(), KINDS[name]
    latents = kind.latents(reference, 40, 0)
    scale, sigma = kind.process.scale(latents.t), kind.process.sigma(latents.t)
    weights, x = posterior(reference, latents.z / scale.float()[:, None, None, None], sigma)
    wanted = kind.exact_output(latents, Exact().bind(reference))
    torch.testing.assert_close(wanted.flatten(1).double(), weights @ x, rtol=0, atol=1e-4)
    module = kind.make(Linear(4), {"estimator": Exact().bind(reference)}, 0, 10, None)
    generator = torch.Generator()
    losses = kind.losses(module, latents, latents.x, generator)
    torch.testing.assert_close(losses, kind.errors(module, latents, wanted), rtol=1e-4, atol=1e-4)


# Statistics of the report


def made_rows(values):
    """Rows of two measurements; `values` gives the Fréchet distances by (estimator, seed)."""
    rest = {"gradient_variance": 1.0, "one_sample_variance": 2.0, "gradient_norm_sq": 4.0, "fd_features": math.nan}
    rest |= {"estimator_seconds": 1.0, "seconds": 4.0}
    return [
        {"estimator": name, "seed": seed, "step": step, "images": 100 * step, "cpu_seconds": 10.0 * step}
        | {"fd_pixels": value, **rest}
        for (name, seed), pair in values.items()
        for step, value in enumerate(pair, start=1)
    ]


def test_intervals_are_those_of_scipy_over_paired_seeds():
    from scipy.stats import ttest_rel

    a, b = [1.0, 1.3, 0.9, 1.2], [1.4, 1.5, 1.5, 1.6]
    rows = made_rows(
        {("OneSample", i): (9, v) for i, v in enumerate(b)} | {("Exact", i): (9, v) for i, v in enumerate(a)}
    )
    curves = Curves(rows, ["OneSample", "Exact"])
    found = curves.difference(curves.last("fd_pixels"), "Exact", "OneSample")
    wanted = ttest_rel(a, b).confidence_interval(0.95)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(tuple(wanted))
    assert found.sign == -1
    assert interval([1.0, -1.1, 0.2]).sign == 0
    chosen = curves.difference(curves.last("fd_pixels"), "Exact", "OneSample", comparisons=5)
    wider = ttest_rel(a, b).confidence_interval(0.99)
    assert (chosen.mean - chosen.half_width, chosen.mean + chosen.half_width) == pytest.approx(tuple(wider))


def test_images_to_reach_a_value_are_interpolated_in_its_logarithm():
    rows = made_rows({("OneSample", 0): (8, 2), ("Exact", 0): (4, 1), ("STF", 0): (9, 3), ("KNN", 0): (1, 1)})
    curves = Curves(rows, ["OneSample", "STF", "KNN", "Exact"])
    share = curves.images_to_reach("fd_pixels", "OneSample")
    assert share("OneSample", 0) == 1
    assert share("Exact", 0) == pytest.approx(0.75)  # 2 is halfway from 4 to 1 in logarithms
    assert share("KNN", 0) == 0.5  # the first measurement
    assert np.isnan(share("STF", 0))
    assert curves.at_seconds("fd_pixels", 15.0)("OneSample", 0) == pytest.approx(4)
    assert np.isnan(curves.at_seconds("fd_pixels", 9.0)("OneSample", 0))  # before the first measurement
    assert curves.last("relative_noise")("KNN", 0) == pytest.approx(0.5)


def test_claims_are_judged_by_the_side_of_their_intervals():
    noise = [0.0, 0.1, -0.1]
    values = {"OneSample": 2.0, "STF": 1.0, "KNN": 1.5, "Exact": 2.01}
    rows = made_rows({(name, i): (value, value + noise[i]) for name, value in values.items() for i in range(3)})
    wobble = {0: 0.1, 1: -0.1, 2: 0.02}
    rows = [row | {"gradient_variance": 0.0} if row["estimator"] == "Exact" else row for row in rows]
    rows = [
        row | {"fd_pixels": row["fd_pixels"] + (wobble[row["seed"]] if row["estimator"] == "Exact" else 0.0)}
        for row in rows
    ]
    judged = {(each.claim, each.pair): each for each in judge(Curves(rows, list(values)))}
    verdicts = {key: each.verdict for key, each in judged.items()}
    assert verdicts == {
        ("better samples at the end", ("KNN", "OneSample")): "holds",
        ("faster convergence (mean ln fd_pixels)", ("KNN", "OneSample")): "holds",
        ("stochastic and closed-form targets end equal", ("OneSample", "Exact")): "no difference told",
        ("the least variance is not the best sample", ("STF", "Exact")): "holds",
    }
    (ratio,) = [each.difference for (claim, _), each in judged.items() if "ln" in claim]
    assert math.exp(ratio.mean) == pytest.approx(0.75, rel=0.03)
    alone = [row for row in rows if row["seed"] == 0]
    assert judge(Curves(alone, list(values))) == []
