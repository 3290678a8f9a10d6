"""Differences of trained networks, paired by seed, over several tables of runs."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from benchmarks.learning_curves.difference_pictures import (
    EQUAL_ERROR,
    LEAST_LOSS,
    fit_picture,
    picture,
)
from benchmarks.learning_curves.differences import compare, main, read
from benchmarks.learning_curves.table import COLUMNS
from lit_knn.common.tables import write_rows

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LARGER_SETS = ("noise_cifar16_5000", "learning_curves_cifar16", "noise_cifar16")
COMMITTED = {
    "noise_differences": ("noise_cifar16_1000", *LARGER_SETS),
    "noise_differences_posterior": ("noise_cifar16_1000",),
    "noise_levels": ("noise_levels_cifar16_1000",),
    "noise_new_seeds": ("noise_new_seeds_cifar16_1000", *LARGER_SETS),
}
ARGUMENTS = ["--module", "EDM", "--reference", "Exact"]


def write_table(path, runs, of="cifar16_1000"):
    """Write rows of EDM; `runs` gives error and loss at the steps 10 and 20 by estimator and seed."""
    rows = [
        {name: 1 if kind is int else 1.0 if kind is float else "" for name, kind in COLUMNS.items()}
        | {"set": of, "module": "EDM", "estimator": estimator, "seed": seed}
        | {"step": step, "val_error": error, "held_out_loss": loss}
        for (estimator, seed), points in runs.items()
        for step, (error, loss) in zip((10, 20), points, strict=True)
    ]
    write_rows(path, rows)
    return path


def random_runs(estimators, seeds=4):
    drawn = np.random.default_rng(0)
    return {
        (name, seed): drawn.uniform(1, 2, size=(2, 2))
        for name in estimators
        for seed in range(seeds)
    }


@pytest.mark.parametrize(("step", "point"), [(None, 1), (20, 1), (10, 0)])
def test_differences_are_those_of_scipy_over_paired_seeds(tmp_path, step, point):
    names = ["Exact", "OneSample", "posterior 1", "isotropic 1"]
    runs = random_runs(names)
    (curves,) = read([write_table(tmp_path / "a.csv", runs)], "EDM").values()
    compared = compare(curves, "EDM", "Exact", step).differences
    assert list(compared) == ["OneSample", "posterior 1", "isotropic 1"]
    for name, own in compared.items():
        for column, measure in enumerate(("val_error", "held_out_loss")):
            one, other = (
                [runs[each, seed][point, column] for seed in range(4)] for each in (name, "Exact")
            )
            test = ttest_rel(one, other)
            for interval, confidence in zip(own[measure], (0.95, 1 - 0.05 / 3), strict=True):
                low, high = test.confidence_interval(confidence)
                assert interval.mean - interval.half_width == pytest.approx(low)
                assert interval.mean + interval.half_width == pytest.approx(high)


def test_at_an_equal_error_the_loss_is_that_of_the_reference(tmp_path):
    # The reference's loss rises as its error falls: 5 - 2 * error.
    runs = {("Exact", seed): [(2.0, 1.0 + seed), (1.0, 3.0 + seed)] for seed in range(2)}
    # The first lies on the reference's line, and the second 0.25 above it. The third fits more than the reference ever
    # does, so there is nothing to compare it with.
    runs |= {("OneSample", seed): [(3.0, 9.0), (1.5, 2.0 + seed)] for seed in range(2)}
    runs |= {("posterior 1", seed): [(3.0, 9.0), (1.25, 2.75 + seed)] for seed in range(2)}
    runs |= {("isotropic 1", seed): [(3.0, 9.0), (0.5, 2.0 + seed)] for seed in range(2)}
    (curves,) = read([write_table(tmp_path / "a.csv", runs)], "EDM").values()
    at_last_step = compare(curves, "EDM", "Exact", None).differences
    found = {name: own[EQUAL_ERROR].alone.mean for name, own in at_last_step.items()}
    assert math.isnan(found.pop("isotropic 1"))
    assert found == {"OneSample": 0, "posterior 1": 0.25}
    # The reference has its least loss, 1, at the first step, the others at the last.
    least = {name: own[LEAST_LOSS].alone.mean for name, own in at_last_step.items()}
    assert least == {"OneSample": 1, "posterior 1": 1.75, "isotropic 1": 1}
    # The loss of a consistency model is not that of denoising.
    assert EQUAL_ERROR not in compare(curves, "ECT", "Exact", None).measures


def test_a_run_of_two_tables_counts_once_and_sets_stay_apart(tmp_path, capsys):
    runs = random_runs(["Exact", "OneSample"])
    first = write_table(tmp_path / "first.csv", runs)
    changed = {key: value + 7 for key, value in runs.items()} | random_runs(["posterior 1"])
    second = write_table(tmp_path / "second.csv", changed)
    other = write_table(tmp_path / "other.csv", runs, of="cifar16")
    main([*map(str, (first, second, other)), *ARGUMENTS, "--output", str(tmp_path / "out")])
    text = (tmp_path / "out.md").read_text()
    assert text in capsys.readouterr().out
    of_first, of_other = text.split("## ")[1:]
    assert of_first.count("\n| posterior 1 | 4 |") == 1
    assert "posterior" not in of_other
    one_sample = [line for line in text.splitlines() if line.startswith("| OneSample")]
    assert one_sample[0].replace("†", "") == one_sample[1].replace("†", "")
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert (tmp_path / "out_fit.png").stat().st_size > 10_000


def test_each_interval_is_drawn_at_its_mean_in_its_row(tmp_path):
    runs = random_runs(["Exact", "OneSample", "posterior 1"])
    (curves,) = read([write_table(tmp_path / "a.csv", runs)], "EDM").values()
    compared = compare(curves, "EDM", "Exact", None)
    panel = picture({"cifar16_1000": compared}, "Exact").axes[0]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["OneSample", "posterior 1"]
    drawn = {
        line.get_ydata()[0]: line.get_xdata()[0]
        for line in panel.lines
        if len(line.get_xdata()) == 1
    }
    means = [own["held_out_loss"].alone.mean for own in compared.differences.values()]
    assert [drawn[place] for place in panel.get_yticks()] == pytest.approx(means)


def test_an_estimator_has_one_look_in_all_panels(tmp_path):
    # In the two sets, isotropic 6 is at other places among the estimators.
    names = {"cifar16_1000": ["posterior 2"], "cifar16_5000": ["posterior 1", "shuffled 1"]}
    by_set = {}
    for of, others in names.items():
        runs = random_runs(["Exact", *others, "isotropic 6"])
        (curves,) = read([write_table(tmp_path / f"{of}.csv", runs, of)], "EDM").values()
        by_set[of] = compare(curves, "EDM", "Exact", None)
    figure = fit_picture(by_set)
    drawn = [{line.get_color() for line in panel.lines} for panel in figure.axes]
    legend = figure.legends[0]
    colours = {}
    for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True):
        colours[text.get_text()] = line.get_color()
    assert len(set(colours.values())) == len(colours) == 5
    for panel, of in zip(drawn, names, strict=True):
        assert panel == {colours[name] for name in ("Exact", *names[of], "isotropic 6")}


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_differences_are_those_of_the_committed_rows(capsys, name):
    tables = [str(RESULTS / f"{stem}_cpu.csv") for stem in COMMITTED[name]]
    main([*tables, "--reference", "posterior 1" if "posterior" in name else "Exact"])
    assert capsys.readouterr().out == (RESULTS / f"{name}.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--module", "flow"], "has no rows of flow"),
        (["--reference", "KNN"], "--reference: no run has a pair with 'KNN'"),
        (["--step", "15"], "--step 15: measured were [10, 20]"),
        (["--output", "there"], "there.md exists; nothing is overwritten"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("there.md").write_text("earlier")
    write_table(Path("a.csv"), random_runs(["Exact", "OneSample"]))
    with pytest.raises(SystemExit):
        main(["a.csv", *arguments])
    assert message in capsys.readouterr().err
