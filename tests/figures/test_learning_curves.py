"""The report of the learning curves: intervals, verdicts and committed tables."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from benchmarks.learning_curves.__main__ import main
from benchmarks.learning_curves.claims import contrasts, judge
from benchmarks.learning_curves.picture import picture
from benchmarks.learning_curves.statistics import Curves, derived

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


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
        found = of_both.difference(
            of_both.last("fd_pixels"), "Exact", "OneSample", comparisons
        ).together
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


def test_without_noise_of_the_targets_there_are_no_ratios():
    row = {"gradient_variance": 0.0, "gradient_norm_sq": 0.0, "one_sample_variance": 0.0}
    row |= {"gradient_bias_sq": 0.0, "one_sample_bias_sq": 0.0}
    row |= {"estimator_seconds": 1.0, "seconds": 4.0}
    added = derived(row)
    assert math.isnan(added["variance_ratio"])
    assert math.isnan(added["relative_noise"])
    assert added["estimator_share"] == 0.25


def test_run_without_last_point_is_compared_one_point_before():
    runs = curves({("OneSample", 0): (8, 2), ("Exact", 0): (4,)})
    assert runs.difference(runs.last("fd_pixels"), "Exact", "OneSample").alone.mean == -4


def test_times_are_compared_on_one_processor_alone():
    runs = curves({("OneSample", 0): (8, 2), ("Exact", 0): (4, 1), ("KNN", 0): (3, 1)})
    assert {name: own.estimators for name, own in runs.by_hardware().items()} == {
        "fast": ["KNN", "Exact"],
        "slow": ["OneSample"],
    }


TUNED = "score_difference_cifar16"
STEMS = ("learning_curves", "mean_flow", "few_steps", "noise", "optimum", "sct", TUNED)
TABLES = [path for stem in STEMS for path in sorted(RESULTS.glob(f"{stem}_*cpu.md"))]


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("tables", TABLES, ids=lambda path: path.stem)
def test_committed_tables_are_those_of_the_committed_rows(tmp_path, tables):
    copy = tmp_path / f"{tables.stem}.csv"
    shutil.copy(tables.with_suffix(".csv"), copy)
    main(["--output", str(copy), "--report"])
    assert copy.with_suffix(".md").read_text() == tables.read_text()


@pytest.mark.usefixtures("blank_figures")
def test_each_module_with_kept_samples_gets_a_picture(tmp_path):
    name = f"{TUNED}_cpu"
    shutil.copy(RESULTS / f"{name}.csv", tmp_path)
    shutil.copytree(RESULTS / name, tmp_path / name)
    main(["--output", str(tmp_path / f"{name}.csv"), "--report"])
    pictures = {path.stem.removeprefix(name) for path in tmp_path.glob("*.png")}
    assert pictures == {"", "_iCT", "_score_difference"}


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
            "closed-form targets sample as well, or better",
            ("Exact", "OneSample"),
        ): "no significant difference",
        ("the least variance is not the best sample", ("STF", "Exact")): "holds",
    }
    (ratio,) = [each.difference for each in judged if "ln" in each.claim]
    assert math.exp(ratio.mean) == pytest.approx(0.75, rel=0.03)
    assert judge(curves({key: pair for key, pair in values.items() if key[1] == 0})) == []
