"""Memorisation over N: the command goes on where it stopped, and times and exponents are those of known curves."""

import csv
import math
import shutil

import numpy as np
import pytest
import torch

from benchmarks.memorisation import training
from benchmarks.memorisation.__main__ import main
from benchmarks.memorisation.runs import Lengths, Run, image_sets, runs_of
from benchmarks.memorisation.times import crossing, generation_time, growth, memorisation_time, overfitting_time, ratio
from benchmarks.memorisation.training import MeasureCopies

TINY = ["--images", "8", "12", "--estimators", "OneSample", "--seeds", "1", "--first", "1", "--per-doubling", "1"]
TINY += ["--batch-size", "8", "--samples", "6", "--held", "4", "--held-out", "6"]


def command(path, *more):
    main(["--output", str(path), "--checkpoints", str(path.with_suffix("")), *TINY, *more])


def numbers(path):
    """The rows without their times."""
    return [{**row, "cpu_seconds": ""} for row in csv.DictReader(path.open())]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("memorisation") / "x.csv"
    command(path, "--steps", "2")
    return path


def test_a_row_for_every_measurement_of_every_run(table):
    rows = numbers(table)
    assert [(row["N"], row["step"]) for row in rows] == [(N, step) for N in ("8", "12") for step in "12"]
    assert all(float(row[name]) > 0 for row in rows for name in ("fd_pixels", "train_error", "held_error"))
    assert {row["copied_fraction"] for row in rows} == {"0.0"}


def test_an_interrupted_run_goes_on_and_a_longer_one_too(table, tmp_path, monkeypatch):
    path = tmp_path / "x.csv"

    def interrupted(*_):
        raise KeyboardInterrupt

    # The first run has one of its two steps, the second one stops in its first measurement.
    command(path, "--images", "8", "--steps", "1")
    with monkeypatch.context() as patch:
        patch.setattr(MeasureCopies, "on_validation_epoch_end", interrupted)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            command(path, "--images", "12", "--steps", "2")
    first = path.read_text().splitlines()[1]
    command(path, "--steps", "2")
    assert numbers(path) == numbers(table)
    # The first row is that of the shorter run, with its time.
    assert path.read_text().splitlines()[1] == first
    assert len(list(tmp_path.glob("x/*/last.ckpt"))) == 2


def test_a_finished_run_is_not_repeated(table, tmp_path):
    path = tmp_path / "x.csv"
    # With half of its samples copied, a run has ended before its last step.
    lines = table.read_text().splitlines(keepends=True)
    copied = lines[1].split(",")
    copied[5] = "0.25"
    path.write_text("".join([lines[0], ",".join(copied), *lines[3:]]))
    before = path.read_text()
    command(path, "--steps", "2")
    assert path.read_text() == before
    assert not path.with_suffix("").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--held", "9"], "OneSample-8-0 has the settings"),
        (["--images", "1792"], "--images 1792 and --held-out 6 are more than the 1797 digits"),
        (["--images", "7"], "--images 7 is less than --batch-size 8"),
        (["--estimators", "KNN"], "--estimators KNN: there are OneSample, Exact"),
        (["--steps", "0"], "--steps 0 is before the first measurement, --first 1"),
        (["--samples", "1"], "--samples must be at least 2, got 1"),
        (["--until-copied", "0.1"], "--until-copied must be from 0.2 to 1, got 0.1"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
    ],
)
def test_bad_options_are_one_line_before_any_training(table, tmp_path, options, words, capsys):
    path = tmp_path / "x.csv"
    shutil.copy(table, path)
    with pytest.raises(SystemExit, match="2"):
        command(path, "--steps", "2", *options)
    assert words in capsys.readouterr().err.strip()
    assert path.read_text() == table.read_text()


def test_a_report_is_made_from_rows_alone(table, tmp_path, capsys):
    path = tmp_path / "x.csv"
    shutil.copy(table, path)
    command(path, "--report")
    assert "| OneSample | 12 | 0 | > 2 | > 2 |" in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.csv", "x.md", "x.pdf", "x.png"]


def test_training_sets_of_a_seed_are_nested_and_apart_from_the_held_out_images():
    sets = {(N, seed): image_sets(N, seed, 360) for N, seed in ((100, 0), (200, 0), (100, 1))}
    images = {key: [{row.tobytes() for row in each.images.numpy()} for each in own] for key, own in sets.items()}
    assert images[100, 0][0] < images[200, 0][0]
    assert images[100, 0][0] != images[100, 1][0]
    assert images[100, 0][1] == images[200, 0][1] == images[100, 1][1]
    assert [each.N for each in sets[200, 0]] == [200, 360]
    assert not images[200, 0][0] & images[200, 0][1]


def test_measurements_are_evenly_spaced_in_the_logarithm_and_runs_come_by_seed():
    assert Lengths(first=100, per_doubling=2).steps(566) == [100, 141, 200, 283, 400, 566]
    assert Lengths(first=1, per_doubling=3).steps(4) == [1, 2, 3, 4]  # 1.26 and 1.59 round to steps that are there
    runs = runs_of(["OneSample", "Exact"], [200, 100], 2, Lengths())
    assert runs[:3] == [Run("OneSample", 100, 0), Run("Exact", 100, 0), Run("OneSample", 200, 0)]
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4


# Times and exponents


def rows_of(steps, copied=0.0, distance=1.0):
    """Rows of a run that overfits in its last step."""
    columns = np.broadcast_arrays(steps, copied, distance, np.where(np.array(steps) < steps[-1], 1.0, 2.0))
    names = ("step", "copied_fraction", "fd_pixels", "held_error")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def test_times_of_curves_that_are_linear_in_the_logarithm_are_exact():
    steps = np.array([100, 150, 400, 1600])
    rows = rows_of(steps, 0.1 * np.log2(steps / 100), 3 - np.log2(steps / 100) / 4)
    assert memorisation_time(rows, 0.05) == pytest.approx(100 * 2**0.5)
    assert memorisation_time(rows, 0.3) == pytest.approx(800)
    assert math.isnan(memorisation_time(rows, 0.5))
    # The least distance is 2, and 2.2 comes at log2(step / 100) = 3.2.
    assert generation_time(rows, "fd_pixels") == pytest.approx(100 * 2**3.2)
    assert math.isnan(generation_time(rows[:3], "fd_pixels"))  # The distance may fall further.
    assert crossing([100, 200], [0.3, 0.4], 0.2) == 100


def test_a_distance_that_grows_again_has_its_time_on_the_way_down():
    assert generation_time(
        rows_of([1, 2, 4, 8, 16], 0.0, np.array([9.0, 5.0, 2.0, 2.1, 7.0])), "fd_pixels"
    ) == pytest.approx(2 * 2 ** ((5 - 2.2) / 3))


def test_overfitting_is_an_error_that_has_grown_by_a_tenth_from_its_least():
    rows = [{"step": step, "held_error": error} for step, error in zip((1, 2, 4, 8), (3.0, 2.0, 2.1, 2.3), strict=True)]
    assert overfitting_time(rows) == pytest.approx(4 * 2**0.5)
    assert math.isnan(overfitting_time(rows[:3]))


def test_the_exponent_is_that_of_least_squares_with_its_interval():
    generator = np.random.default_rng(0)
    N = np.array([100, 100, 200, 400, 800, 800])
    times = 7 * N**0.9 * np.exp(0.1 * generator.standard_normal(6))
    runs = {
        Run("OneSample", int(n), seed): [{"step": value}] for seed, (n, value) in enumerate(zip(N, times, strict=True))
    }
    found = growth(runs, lambda rows: rows[0]["step"])
    (slope, intercept), covariance = np.polyfit(np.log(N), np.log(times), 1, cov=True)
    assert found.exponent == pytest.approx(slope)
    assert found.factor == pytest.approx(math.exp(intercept))
    assert found.half_width == pytest.approx(
        2.7764451 * covariance[0, 0] ** 0.5
    )  # the quantile of 4 degrees of freedom
    assert found.points == 6


def test_an_n_with_a_run_that_has_not_memorised_is_not_in_the_fit():
    times = {Run("OneSample", N, seed): N * 3.0 for N in (100, 200, 400) for seed in (0, 1)}
    times[Run("OneSample", 400, 0)] = 5.0
    times[Run("OneSample", 400, 1)] = math.nan
    found = growth({run: [{"step": value}] for run, value in times.items()}, lambda rows: rows[0]["step"])
    assert (found.exponent, found.points) == (pytest.approx(1), 4)
    assert growth({run: [{"step": value}] for run, value in list(times.items())[:2]}, lambda rows: 3.0) is None


def test_ratios_are_geometric_means_over_pairs():
    times = {Run("OneSample", 100, 0): 8.0, Run("OneSample", 100, 1): 10.0, Run("Exact", 100, 0): 4.0}
    times |= {Run("OneSample", 200, 0): 8.0, Run("Exact", 200, 0): 16.0, Run("Exact", 200, 1): 1.0}
    runs = {run: [{"step": value}] for run, value in times.items()}
    found = ratio(runs, lambda rows: rows[0]["step"], "Exact", "OneSample")
    assert (found.mean, found.seeds) == (pytest.approx(0), 2)
    assert found.half_width == pytest.approx(12.7062 * math.log(2))  # the quantile of one degree of freedom


def test_a_run_ends_with_enough_copies(tmp_path, monkeypatch):
    path = tmp_path / "x.csv"
    monkeypatch.setattr(
        training,
        "memorisation",
        lambda *_: {"copied_fraction": 0.6, "mean_nearest_distance": 1.0},
    )
    command(path, "--images", "8", "--steps", "4")
    assert [row["step"] for row in numbers(path)] == ["1"]
    assert torch.load(next(tmp_path.glob("x/*/last.ckpt")), weights_only=True)["global_step"] == 1
