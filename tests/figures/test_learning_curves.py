"""The learning curves: the grid goes on where it stopped, and the variance of gradients is that of closed forms."""

import csv
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel
from torch import nn

from benchmarks.learning_curves.__main__ import main
from benchmarks.learning_curves.agreement import Agreement
from benchmarks.learning_curves.claims import contrasts, judge
from benchmarks.learning_curves.gradient_moments import gradient_moments
from benchmarks.learning_curves.kind import Latents
from benchmarks.learning_curves.kinds import KINDS
from benchmarks.learning_curves.measurements import Measurements
from benchmarks.learning_curves.picture import picture
from benchmarks.learning_curves.sets import Images, Lengths
from benchmarks.learning_curves.statistics import Curves
from benchmarks.learning_curves.table import CurveTable
from benchmarks.noise_sizes import posterior_variances
from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, OneSample
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import cross_sq_dist, log_posterior

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
]
TINY += ["--held", "20", "--pairs", "4", "--repeats", "2", "--seeds", "1"]
TINY += ["--modules", "EDM", "ECT", "--estimators", "OneSample", "KNN"]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TIMES = {"cpu_seconds", "seconds", "estimator_seconds"}


def test_finished_run_is_kept_and_missing_one_is_remade_equal(tmp_path):
    def rows_of(path):
        main(["--output", str(path), "--checkpoints", str(path.with_suffix("")), *TINY])
        return list(csv.DictReader(path.open()))

    whole, shorter = tmp_path / "whole.csv", tmp_path / "shorter.csv"
    kept = rows_of(whole)
    lines = whole.read_text().splitlines(keepends=True)
    # without ECT, OneSample: it starts from EDM, OneSample, again
    shorter.write_text("".join(lines[:5] + lines[7:]))
    again = rows_of(shorter)
    assert again[:6] == kept[:4] + kept[6:]
    for ours, theirs in zip(again[6:], kept[4:6], strict=True):
        assert {name for name in ours if ours[name] != theirs[name]} <= TIMES


def test_score_difference_starts_from_ict_and_mean_flow_takes_own_velocity(tmp_path):
    path = tmp_path / "few.csv"
    options = [*TINY[: TINY.index("--modules")], "--consistency-steps", "20"]
    options += ["--modules", "MeanFlow", "score difference"]
    options += ["--estimators", "OneSample, network", "128 images"]
    main(["--output", str(path), "--checkpoints", str(tmp_path / "runs"), *options])
    last = {(row["module"], row["estimator"]): row for row in csv.DictReader(path.open())}
    assert set(last) == {
        ("MeanFlow", "OneSample, network"),
        ("iCT", "OneSample"),
        ("score difference", "128 images"),
    }
    generator = last["score difference", "128 images"]
    # Two steps of four times sixteen samples, after twenty steps of sixteen images.
    assert (generator["images"], generator["images_before"]) == ("128", "320")
    assert math.isnan(float(generator["gradient_variance"]))
    assert math.isfinite(float(generator["fd_pixels"]))
    assert float(last["MeanFlow", "OneSample, network"]["gradient_variance"]) > 0


# The variance of gradients


class Linear(nn.Module):
    """A network that is a matrix: W times its flattened input."""

    def __init__(self, d):
        super().__init__()
        self.matrix = nn.Parameter(
            torch.randn(d, d, generator=torch.Generator().manual_seed(4)) / d
        )

    def forward(self, z, noise_label, class_label=None):
        return (z.flatten(1) @ self.matrix.T).reshape(z.shape)


@pytest.fixture
def seven():
    """A set of seven images."""
    return ReferenceSet(torch.rand(7, 1, 2, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1)


def posterior(reference, z, t):
    """Weights of the images, (B, N), in float64 by enumeration, and the images."""
    x = reference.gather(torch.arange(reference.N)).flatten(1).double()
    return log_posterior(cross_sq_dist(z.flatten(1).double(), x), t).exp(), x


def test_gradient_variance_of_linear_denoiser_is_closed_form(seven):
    lengths = {
        "steps": 2,
        "consistency_steps": 2,
        "measurements": 2,
        "batch_size": 16,
        "samples": 80,
    }
    kind = KINDS["EDM"]
    images = Images(seven, None, seven)
    measurements = Measurements(kind, images, Lengths(held=2, pairs=3, repeats=1500, **lengths))
    _, z, t, _, _ = measurements.pairs
    module = kind.make(Linear(4), {"estimator": OneSample()}, 0, 10, None)
    found = measurements.gradients(module)
    weights, x = posterior(seven, z, t)
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
    output = skip[:, None] * z.flatten(1) + c_out[:, None] * (
        z_in @ module.denoiser.model.matrix.T.double()
    )
    gradient = ((2 / c_out)[:, None, None] * (output - mean)[:, :, None] * z_in[:, None]).mean(0)
    assert found.norm_sq == pytest.approx(gradient.square().sum().item(), rel=0.05)
    # One sample is unbiased. The squared bias has a standard error of about variance/R.
    assert abs(found.bias_sq) < 8 * found.variance / 1500


def test_bias_of_a_gradient_is_its_distance_from_the_exact_one():
    shift = torch.tensor([3.0, 0.0, -4.0])
    draws = torch.randn(4000, 3, generator=torch.Generator().manual_seed(2))
    moments = gradient_moments(draws + 1 + shift, torch.ones(3))
    assert moments.variance == pytest.approx(3, rel=0.05)
    # The standard error is 2·5/√4000 = 0.16.
    assert moments.bias_sq == pytest.approx(25, abs=0.6)


def test_agreement_is_the_distance_to_enumerated_means_at_new_latents(seven):
    kind = KINDS["EDM"]
    new = ReferenceSet(torch.rand(5, 1, 2, 2, generator=torch.Generator().manual_seed(9)))
    latents = kind.latents(new, 30, 2)
    module = kind.make(Linear(4), {"estimator": OneSample()}, 0, 10, None)
    with torch.no_grad():
        row = Agreement(kind, latents, seven).distances(module)
        output = module.denoiser(latents.z, latents.t, None, None).flatten(1).double()
    weights, x = posterior(seven, latents.z, latents.t)
    weight = (latents.t.square() + 0.25) / (latents.t * 0.5).square()
    expected = (weight * (output - weights @ x).square().mean(1)).mean()
    assert row["distance_to_exact"] == pytest.approx(expected.item(), rel=1e-3)
    assert row["distance_to_smoothed"] != row["distance_to_exact"]
    assert all(map(math.isnan, Agreement(kind, None, seven).distances(module).values()))


def test_rows_of_earlier_code_are_kept_without_later_columns(tmp_path):
    source = RESULTS / "learning_curves_cifar16_1000_cpu.csv"
    copy = tmp_path / source.name
    shutil.copy(source, copy)
    rows = CurveTable(copy).load()
    assert len(rows) == len(list(csv.DictReader(source.open())))
    assert all(math.isnan(row["distance_to_exact"]) for row in rows)
    other = copy.read_text().replace("held_out_loss", "loss")
    copy.write_text(other)
    with pytest.raises(InputError, match="other columns"):
        CurveTable(copy).load()


@pytest.mark.parametrize("name", ["EDM", "flow"])
def test_regression_error_is_loss_with_enumerated_targets(name, seven):
    kind = KINDS[name]
    latents = kind.latents(seven, 40, 0)
    scale, sigma = kind.process.scale(latents.t), kind.process.sigma(latents.t)
    weights, x = posterior(seven, latents.z / scale.float()[:, None, None, None], sigma)
    wanted = kind.exact_output(latents, Exact().bind(seven))
    torch.testing.assert_close(wanted.flatten(1).double(), weights @ x, rtol=0, atol=1e-4)
    module = kind.make(Linear(4), {"estimator": Exact().bind(seven)}, 0, 10, None)
    losses = kind.losses(module, latents, latents.x, torch.Generator())
    torch.testing.assert_close(losses, kind.errors(module, latents, wanted), rtol=1e-4, atol=1e-4)


def test_the_posterior_of_two_images_has_the_variance_of_a_coin():
    x = torch.stack([torch.full((1, 2, 2), value) for value in (-0.25, 0.5)])
    t, z = torch.tensor([0.4, 1.5]), torch.randn(2, 1, 2, 2, generator=torch.Generator())
    found = posterior_variances(ReferenceSet(x), Latents(z, z, t, t, None))
    # The difference of the images has four parts of 0.75, and their midpoint is 0.125.
    odds = (0.75 * (z.double() - 0.125).flatten(1).sum(1) / t.double().square()).exp()
    share = odds / (1 + odds)
    assert found.tolist() == pytest.approx((share * (1 - share) * 0.75**2).tolist(), rel=1e-5)


# Statistics of the report


def curves(values, estimators=("OneSample", "STF", "KNN", "Exact")):
    """Two measurements of each run; `values` gives their Fréchet distances by (estimator, seed)."""
    rest = {"one_sample_variance": 2.0, "gradient_norm_sq": 4.0, "fd_features": math.nan}
    rest |= {"estimator_seconds": 1.0, "seconds": 4.0}
    rest |= {"gradient_bias_sq": 0.5, "one_sample_bias_sq": 0.0, "distance_to_patches": math.nan}
    rest |= {"val_error": math.nan}
    rows = [
        {
            "estimator": name,
            "seed": seed,
            "step": step,
            "images": 100 * step,
            "cpu_seconds": 10.0 * step,
            **rest,
        }
        | {
            "fd_pixels": value,
            "held_out_loss": value,
            "gradient_variance": 0.0 if name == "Exact" else 1.0,
        }
        | {"hardware": "slow" if name == "OneSample" else "fast"}
        for (name, seed), pair in values.items()
        for step, value in enumerate(pair, start=1)
    ]
    return Curves(rows, estimators)


def test_intervals_are_those_of_scipy_over_paired_seeds():
    own = {"Exact": [1.0, 1.3, 0.9, 1.2], "OneSample": [1.4, 1.5, 1.5, 1.6]}
    of_both = curves(
        {(name, i): (9, value) for name, values in own.items() for i, value in enumerate(values)}
    )
    for comparisons, confidence in ((1, 0.95), (5, 0.99)):
        found = of_both.difference(of_both.last("fd_pixels"), "Exact", "OneSample", comparisons)
        wanted = ttest_rel(*own.values()).confidence_interval(confidence)
        assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(
            tuple(wanted)
        )
        assert found.sign == (-1 if confidence < 0.99 else 0)


def test_pairs_of_a_mean_flow_are_pooled_by_seed():
    names = ["OneSample", "Exact", "OneSample, KNN", "OneSample, Exact", "Exact, OneSample"]
    names += ["OneSample, network"]
    values = np.random.default_rng(0).uniform(1, 2, size=(len(names), 4))
    runs = curves(
        {(name, seed): (9, values[i, seed]) for i, name in enumerate(names) for seed in range(4)},
        names,
    )
    targets, tangents = contrasts(names)
    groups = [(targets, [1, 4], [0, 2, 3]), (tangents, [2, 3], [0])]
    for pooled, better, plain in groups:
        difference = runs.contrast(runs.last("fd_pixels"), pooled.group, pooled.others)
        low, high = ttest_rel(values[better].mean(0), values[plain].mean(0)).confidence_interval()
        assert difference.mean - difference.half_width == pytest.approx(low)
        assert difference.mean + difference.half_width == pytest.approx(high)
    judged = {each.claim: each.pair for each in judge(runs)}
    assert judged["better samples at the end"] == ("better targets", "one-sample targets")
    claim = "the network's velocity as the tangent samples better"
    assert judged[claim] == ("OneSample, network", "OneSample")
    assert contrasts(["OneSample", "STF", "KNN", "Exact"]) is None


def test_equal_variances_are_no_claim_about_the_least():
    values = {(name, i): (9, 1 + i) for name in ("OneSample", "STF") for i in range(2)}
    claims = {each.claim for each in judge(curves(values, ("OneSample", "STF")))}
    assert "the least variance is not the best sample" not in claims


def test_claims_about_noise_are_judged_by_the_loss_at_new_images():
    losses = {"Exact": 3.0, "posterior 1": 2.0, "isotropic 1": 2.4, "shuffled 1": 1.9}
    losses["isotropic 6"] = 2.05
    spread = {"Exact": 0.1, "posterior 1": 0.0, "isotropic 1": 0.1, "shuffled 1": 0.5}
    spread["isotropic 6"] = 0.1
    values = {
        (name, seed): (9, loss + spread[name] * (seed - 1))
        for name, loss in losses.items()
        for seed in range(3)
    }
    judged = judge(curves(values, list(losses)))
    verdicts = {each.claim: each.verdict for each in judged}
    assert verdicts == {
        "the target's noise lowers the loss at new images": "holds",
        "the target's noise leaves the loss at new images": "does not hold",
        "its direction lowers that loss": "holds",
        "its place lowers that loss": "not significant",
        "noise of equal gradient variance lowers it as much": "no significant difference",
    }


def test_all_curves_are_drawn_but_those_of_mixtures():
    names = ["Exact", "posterior 1", "128 images", "0.5", "OneSample, 0.94", "OneSample, KNN"]
    own = curves({(name, seed): (9, 4) for name in names for seed in range(2)}, names)
    (legend,) = picture({"EDM": own}).legends
    drawn = {text.get_text() for text in legend.get_texts()}
    assert drawn == {"Exact", "posterior 1", "128 images", "OneSample, KNN"}


def test_images_to_a_value_are_interpolated_in_its_logarithm():
    runs = curves(
        {("OneSample", 0): (8, 2), ("Exact", 0): (4, 1), ("STF", 0): (9, 3), ("KNN", 0): (1, 1)}
    )
    share = runs.images_to_reach("fd_pixels", "OneSample")
    assert share("OneSample", 0) == 1
    assert share("Exact", 0) == pytest.approx(0.75)  # 2 is halfway from 4 to 1 in logarithms
    assert share("KNN", 0) == 0.5  # the first measurement
    assert np.isnan(share("STF", 0))
    assert runs.at_seconds("fd_pixels", 15.0)("OneSample", 0) == pytest.approx(4)
    # before the first measurement
    assert np.isnan(runs.at_seconds("fd_pixels", 9.0)("OneSample", 0))
    assert runs.last("relative_noise")("KNN", 0) == pytest.approx(0.5)


def test_run_without_last_point_is_compared_one_point_before():
    runs = curves({("OneSample", 0): (8, 2), ("Exact", 0): (4,)})
    assert runs.difference(runs.last("fd_pixels"), "Exact", "OneSample", 1).mean == -4


def test_times_are_compared_on_one_processor_alone():
    runs = curves({("OneSample", 0): (8, 2), ("Exact", 0): (4, 1), ("KNN", 0): (3, 1)})
    assert {name: own.estimators for name, own in runs.by_hardware().items()} == {
        "fast": ["KNN", "Exact"],
        "slow": ["OneSample"],
    }


STEMS = ("learning_curves", "mean_flow", "few_steps", "noise", "optimum")
TABLES = [path for stem in STEMS for path in sorted(RESULTS.glob(f"{stem}_*_cpu.md"))]


@pytest.mark.parametrize("tables", TABLES, ids=lambda path: path.stem)
def test_committed_tables_are_those_of_the_committed_rows(tmp_path, tables):
    copy = tmp_path / f"{tables.stem}.csv"
    shutil.copy(tables.with_suffix(".csv"), copy)
    main(["--output", str(copy), "--report"])
    assert copy.with_suffix(".md").read_text() == tables.read_text()


def test_claims_are_judged_by_the_side_of_their_intervals():
    own = {
        "OneSample": (2.0, 2.1, 1.9),
        "STF": (1.0, 1.1, 0.9),
        "KNN": (1.5, 1.6, 1.4),
        "Exact": (2.1, 2.0, 1.95),
    }
    values = {
        (name, i): (value, value) for name, seeds in own.items() for i, value in enumerate(seeds)
    }
    judged = judge(curves(values))
    assert {(each.claim, each.pair): each.verdict for each in judged} == {
        ("better samples at the end", ("KNN", "OneSample")): "holds",
        ("faster convergence (mean ln fd_pixels)", ("KNN", "OneSample")): "holds",
        (
            "stochastic and closed-form targets end equal",
            ("OneSample", "Exact"),
        ): "no significant difference",
        ("the least variance is not the best sample", ("STF", "Exact")): "holds",
    }
    (ratio,) = [each.difference for each in judged if "ln" in each.claim]
    assert math.exp(ratio.mean) == pytest.approx(0.75, rel=0.03)
    assert judge(curves({key: pair for key, pair in values.items() if key[1] == 0})) == []
