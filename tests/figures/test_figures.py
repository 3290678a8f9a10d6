"""Figures: the numbers that they draw, read back from matplotlib, and their common style."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from lit_knn import estimators
from lit_knn.commands.report_runs import read_run
from lit_knn.common.tables import write_rows
from lit_knn.data import Digits
from lit_knn.estimators import KNN, Estimator, Exact, OneSample
from lit_knn.figures import (
    average_curve,
    captioned,
    checkpoint_curve,
    figure1,
    figure2,
    figure3,
    figure4,
    figure5,
    image_grid,
    probe_figure,
    run_comparison,
)
from lit_knn.figures.figure4 import passes, varied
from lit_knn.figures.image_grid import pair_grid
from lit_knn.figures.probe import PANELS
from lit_knn.figures.style import PALETTE, dress, looks
from lit_knn.figures.training_curves import TrainingCurve, best_point
from lit_knn.metrics.mean_pictures import mean_pictures
from lit_knn.reference import ReferenceSet
from lit_knn.runs.record import Record
from main import main


def legend(owner):
    return [text.get_text() for text in owner.get_texts()]


def colour(artist):
    return to_hex(artist.get_color()).upper()


def test_figure_1_shows_the_posterior_and_the_proposal():
    # Three points have distances 0, 1 and 2 from z and likelihoods 1, e^(-1/2) and e^(-2); one is no neighbour.
    reference = ReferenceSet(torch.tensor([[1.0], [2.0], [3.0]]))
    figure = figure1(KNN(k=2, n=1).bind(reference), reference, 1.0, [1.0, 9.0])
    axes, _ = figure.axes
    likelihood = np.exp([0, -0.5, -2])
    stems = axes.collections[0]
    heights = [segment[1, 1] for segment in stems.get_segments()]
    np.testing.assert_allclose(heights, likelihood / likelihood.sum(), rtol=1e-6)
    assert [segment[0].tolist() for segment in stems.get_segments()] == [[1, 0], [2, 0], [3, 0]]
    near, _, other = (to_hex(shade) for shade in stems.get_colors())
    assert [near, other] == [
        to_hex(handle.get_color()) for handle in figure.legends[0].get_lines()[:2]
    ]
    capped = np.exp([0, -0.5, -0.5])
    dots, latent = axes.lines
    np.testing.assert_allclose(dots.get_ydata(), capped / capped.sum(), rtol=1e-6)
    assert dots.get_xdata().tolist() == [1, 2, 3]
    assert list(latent.get_xdata()) == [1, 1]
    assert axes.get_ylim()[1] > max(*heights, *dots.get_ydata())
    assert f"{capped.sum() / likelihood.sum():.2f}" in axes.get_title()
    assert "$k = 2$" in "".join([axes.get_title(), figure.get_suptitle()])


def test_the_rows_of_figure_2_and_their_places():
    data = Digits()
    data.setup()
    rows = mean_pictures(
        {"exact": Exact(), "source": OneSample()}, data.reference, [0.01, 1e4], num_images=3
    )
    assert list(rows) == ["$z$", "true mean", "exact", "source"]
    assert torch.equal(rows["exact"], rows["true mean"])
    # Without noise the mean is the source of z; with much noise it is the mean of the data.
    torch.testing.assert_close(rows["true mean"][0], rows["source"][0])
    mean = np.rint(load_digits().images * (255 / 16)).mean(0) / 127.5 - 1
    for image in rows["true mean"][1]:
        np.testing.assert_allclose(image[0], mean, atol=1e-3)
    # The picture of z has unit scale at every noise level.
    assert 0.7 < rows["$z$"][1].std() < 1.3
    rows = {
        "a": torch.full((3, 1, 2, 2), -1.0),
        "b": torch.tensor([1.0, 1.0, 0.0]).reshape(3, 1, 1, 1),
    }
    grid = np.array(figure2(rows, [0.25, 2.0, 40.0]).axes).reshape(2, 3)
    assert [axes.get_title() for axes in grid[0]] == ["$t = 0.25$", "$t = 2$", "$t = 40$"]
    assert [axes.get_ylabel() for axes in grid[:, 0]] == ["a", "b"]
    assert [[axes.images[0].get_array()[0, 0, 0] for axes in row] for row in grid] == [
        [0, 0, 0],
        [255, 255, 128],
    ]
    (axes,) = figure2(
        {"a": torch.tensor([[-1.0, 1.0, 0.0], [1.0, -1.0, -1.0]]).expand(1, 1, 2, 3)}, [1.0]
    ).axes
    assert axes.images[0].get_array()[..., 1].tolist() == [[0, 255, 128], [255, 0, 0]]


# Figure 3


LEVELS = [0.002, 0.05, 1.0, 20.0]


def row(name, t, mse, se=0.0, bias=None, variance=""):
    """A row of the table; the errors of the score are a hundred times those of the posterior mean."""
    found = {"estimator": name, "t": t}
    values = {"mse": mse, "bias_sq_corrected": mse if bias is None else bias, "variance": variance}
    for prefix, factor in (("mu", 1), ("score", 100)):
        for place, (quantity, value) in enumerate(values.items(), start=1):
            found[f"{prefix}_{quantity}"] = value and factor * value
            found[f"{prefix}_{quantity}_se"] = place * factor * se
    return found


def curves(values):
    """Rows of the estimators {name: MSE at each of the levels}."""
    return [
        row(name, t, mse)
        for name, own in values.items()
        for t, mse in zip(LEVELS, own, strict=True)
    ]


def lower(rows):
    """The panels of the posterior mean: MSE, squared bias and variance."""
    return figure3(rows).axes[3:]


def marks(axes):
    """The noise levels marked at the foot, by estimator."""
    found = [line for line in axes.lines if line.get_transform() == axes.get_xaxis_transform()]
    assert {line.get_marker() for line in found} <= {"x"}
    return {colour(line): list(line.get_xdata()) for line in found}


def limits(axes):
    """The hollow marks that are not at the foot, (t, value), by estimator."""
    hollow = [
        line
        for line in axes.lines
        if line.get_fillstyle() == "none" and line.get_transform() == axes.transData
    ]
    return {
        colour(line): list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in hollow
    }


def drawn(axes):
    return {
        line.get_label(): list(line.get_ydata())
        for line in axes.lines
        if line.get_fillstyle() != "none"
    }


def test_figure_3_has_scores_above_means_below_and_error_bands():
    rows = [row("KNN", t, mse, 1e-5, 0.2 * mse, 0.8 * mse) for t, mse in ((0.5, 1e-2), (5.0, 2e-2))]
    grid = np.array(figure3(rows).axes).reshape(2, 3)
    assert [axes.get_title() for axes in grid[0]] == ["MSE", "squared bias", "variance"]
    assert [axes.get_ylabel() for axes in grid[:, 0]] == [
        "score, per dimension",
        "posterior mean, per dimension",
    ]
    for panels, factor in zip(grid, (100, 1), strict=True):
        for axes, share, error in zip(panels, (1, 0.2, 0.8), (1e-5, 2e-5, 3e-5), strict=True):
            (line,) = axes.lines
            assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
            assert line.get_xdata().tolist() == [0.5, 5.0]
            assert list(line.get_ydata()) == pytest.approx(
                [share * factor * mse for mse in (1e-2, 2e-2)]
            )
            heights = axes.collections[0].get_paths()[0].vertices[:, 1]
            assert heights.min() == pytest.approx((share * 1e-2 - error) * factor)
            assert heights.max() == pytest.approx((share * 2e-2 + error) * factor)
    # A band that would reach below 0 ends at a tenth of the value.
    (band,) = lower([row("KNN", 1.0, 1e-3, 5e-3)])[0].collections
    assert band.get_paths()[0].vertices[:, 1].min() == pytest.approx(1e-4)


def test_zeros_are_marks_at_the_foot_and_gaps_in_the_curve():
    knn, stf = (PALETTE[name][0] for name in ("KNN", "STF"))
    rows = [
        row("KNN", t, mse, variance=mse)
        for t, mse in zip(LEVELS, (0.0, 0.0, 1e-9, 1e-3), strict=True)
    ]
    rows += [
        row("STF", t, mse, variance=0.0)
        for t, mse in zip(LEVELS, (0.0, 1e-8, 1e-2, 1e-3), strict=True)
    ]
    mse, _, variance = lower(rows)
    assert marks(mse) == {knn: LEVELS[:2], stf: LEVELS[:1]}
    assert marks(variance) == {knn: LEVELS[:2], stf: LEVELS}
    # Each estimator has a row of its own.
    rows = [set(line.get_ydata()) for line in variance.lines if line.get_marker() == "x"]
    assert sorted(map(max, rows)) == pytest.approx([0.03, 0.06])
    assert [len(row) for row in rows] == [1, 1]
    assert [math.isnan(value) for value in drawn(mse)["KNN"]] == [True, True, False, False]
    assert 0 < mse.get_ylim()[0] < mse.get_ylim()[1] < math.inf


def test_bias_within_error_is_a_hollow_mark_at_its_limit():
    # An estimate of squared bias is unbiased, so it can be negative; two standard errors above it, or 0, is the limit.
    rows = [
        row("KNN", t, 1e-3, 5e-5, bias)
        for t, bias in {0.5: -1e-5, 1.0: 1.9e-4, 2.0: 2.1e-4}.items()
    ]
    mse, bias, variance = lower([*rows, row("STF", 1.0, 1e-3, bias=5e-4)])
    assert drawn(bias)["KNN"] == pytest.approx([math.nan, math.nan, 2.1e-4], nan_ok=True)
    assert limits(bias) == {
        PALETTE["KNN"][0]: [(0.5, pytest.approx(2e-4)), (1.0, pytest.approx(3.9e-4))]
    }
    assert limits(mse) == limits(variance) == marks(bias) == {}
    # The legend explains the marks where there are some.
    assert len(legend(bias.figure.legends[0])) == 3
    assert legend(figure3([row("STF", 1.0, 1e-3, bias=5e-4)]).legends[0]) == ["STF"]


def test_outlying_curves_leave_the_picture_and_others_stay():
    usual = {
        "KNN": (0, 1e-20, 1e-7, 1e-8),
        "SubspaceKNN": (0, 1e-25, 1e-9, 1e-10),
        "STF": (0, 1e-20, 1e-5, 1e-8),
    }
    # Each of these curves keeps four decades below its peak.
    low, high = lower(curves(usual))[0].get_ylim()
    assert low == pytest.approx(1e-9 / 1e4)
    assert high == pytest.approx(3e-5)
    # At small t a linear estimate's score error grows as t^-4; an exact estimate has only rounding errors.
    far = {"Wiener": (1e6, 1e2, 1e-2, 1e-9), "exact": (1e-30, 1e-31, 1e-32, 1e-33)}
    low, high = lower(curves(usual | far))[0].get_ylim()
    assert low < 1e-11
    assert high > 1e-4
    assert high / low < 1e16 * 1.001


# Trainings


def leave_run(folder, estimator, values, **options):
    folder.mkdir(parents=True)
    config = {"class_path": f"lit_knn.estimators.{estimator}", "init_args": options}
    config = {"model": {"init_args": {"estimator": config}}, "data": {}, "trainer": {}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    Record(status="finished").write(folder)
    rows = [
        {"images_seen": f"{number}000000", "fid": str(v), "kid": ""}
        for number, v in enumerate(values, start=1)
    ]
    write_rows(folder / "fidelity.csv", rows)
    return str(folder)


def test_figure_4_varies_one_option_per_panel_in_the_report(tmp_path, monkeypatch):
    runs = [
        leave_run(tmp_path / "0", "OneSample", (9.0, 4.0, 5.0)),
        leave_run(tmp_path / "1", "KNN", (8.0, 3.5, 3.0), k=2048, n=256),
        leave_run(tmp_path / "2", "KNN", (3.0, 2.5), k=512, n=256),
        leave_run(tmp_path / "3", "KNN", (7.0, 4.5), k=2048, n=64),
        leave_run(tmp_path / "4", "KNN", (7.0, 4.5), k=64, n=8),
        leave_run(tmp_path / "5", "STF", (9.0, 8.0), n=256),
    ]
    upper, under = figure4([read_run(run).curve for run in runs]).axes
    shared = ["OneSample", "STF n=256"]
    assert legend(upper.get_legend()) == [*shared, "KNN k=512, n=256", "KNN k=2048, n=256"]
    assert legend(under.get_legend()) == [*shared, "KNN k=2048, n=64", "KNN k=2048, n=256"]
    curve = upper.lines[0]
    assert [*curve.get_xdata(), *curve.get_ydata()] == [1.0, 2.0, 3.0, 9.0, 4.0, 5.0]
    assert (upper.get_yscale(), under.get_xlabel()) == ("log", "Training images seen (millions)")
    best, passed = (
        [line for line in upper.lines if line.get_linestyle() == style] for style in (":", "--")
    )
    assert [line.get_ydata()[0] for line in best] == [4.0, 8.0, 2.5, 3.0]
    # k=512 falls below 4 after one million images, k=2048 after two, n=64 never.
    assert [line.get_xdata()[0] for line in passed] == [1.0, 2.0]
    assert [line.get_xdata()[0] for line in under.lines if line.get_linestyle() == "--"] == [2.0]
    monkeypatch.chdir(tmp_path)
    main(["report", *runs, "--output", "out"])
    written = ["out.md", "out.png", "out.pdf", "out_figure4.png", "out_figure4.pdf"]
    assert all((tmp_path / name).stat().st_size > 500 for name in written)
    main(["report", *runs[:2], "--output", "two"])
    assert not list(tmp_path.glob("two_figure4*"))


def test_panel_has_runs_of_commonest_or_larger_other_option():
    runs = [TrainingCurve(f"{k} {n}", "KNN", k, n) for n in (64, 256) for k in (64, 512)]
    assert [(run.k, run.n) for run in varied(runs, "k")] == [(64, 256), (512, 256)]
    runs.append(TrainingCurve("more", "KNN", 8, 64))
    assert [(run.k, run.n) for run in varied(runs, "k")] == [(8, 64), (64, 64), (512, 64)]
    assert [(run.k, run.n) for run in varied(runs, "n")] == [(512, 64), (512, 256)]
    # A user's own estimator may have k alone.
    runs = [
        TrainingCurve("", "KNN", 64, 256),
        *(TrainingCurve("", "Nearest", k, None) for k in (64, 128)),
    ]
    assert [(run.k, run.n) for run in varied(runs, "k")] == [(64, None), (128, None)]
    assert [(run.k, run.n) for run in varied(runs, "n")] == [(64, None), (64, 256)]
    assert [(run.k, run.n) for run in varied(runs[:2], "k")] == [(64, 256)]


def test_highest_score_is_best_and_a_tie_passes_nothing():
    higher, lower = [(1, 7.0), (2, 9.0), (3, 8.0)], [(1, 6.0), (2, 7.5)]
    for score in ("inception_score", "recall_held_out"):
        assert best_point(higher, score) == (2, 9.0)
        assert passes(higher, lower, score) == 2
        assert passes(lower, higher, score) is passes(lower, lower, score) is None


def test_runs_side_by_side_have_their_values_times_and_colours():
    distances = {"fid": [(1_000_000, 3.0), (2_500_000, 0.5)], "recall": [(2_500_000, 0.0)]}
    first = TrainingCurve("a", "KNN", 8, 4, distances, ms_per_image=(2.0, 5.0))
    second = TrainingCurve(
        "b", "STF", n=3, distances={"fid": [(1_000_000, 2.0)]}, ms_per_image=(1.0, 4.0)
    )
    figure = run_comparison([first, second])
    fid, recall, times = figure.axes
    drawn_runs = [[*zip(line.get_xdata(), line.get_ydata(), strict=True)] for line in fid.lines]
    assert drawn_runs == [[(1.0, 3.0), (2.5, 0.5)], [(1.0, 2.0)]]
    assert fid.get_xlabel() == "Training images seen (millions)"
    # A value of 0 has no logarithm.
    assert (fid.get_yscale(), recall.get_yscale()) == ("log", "linear")
    bars = [(bar.get_x(), bar.get_width()) for bar in times.patches]
    assert bars == [(0.0, 5.0), (5.0, 2.0), (0.0, 4.0), (4.0, 1.0)]
    shades = [to_hex(bar.get_facecolor()).upper() for bar in times.patches[::2]]
    assert shades == [PALETTE["KNN"][0], PALETTE["STF"][0]] == [colour(line) for line in fid.lines]
    assert legend(figure.legends[0]) == ["a KNN k=8, n=4", "b STF n=3"]


def test_a_run_has_the_look_of_its_estimator_between_others():
    names, colours = ["KNN k=8", "STF", "KNN k=16"], [PALETTE[name][0] for name in ("KNN", "STF")]
    runs = [TrainingCurve("a", "KNN", 8), TrainingCurve("b", "STF"), TrainingCurve("c", "KNN", 16)]
    runs = [replace(run, distances={"fid": [(1000, 1.0 + i)]}) for i, run in enumerate(runs)]
    figure = run_comparison(runs)
    lines, bars = figure.axes[0].lines, figure.axes[1].patches
    assert [line.get_ydata()[0] for line in lines] == [1.0, 2.0, 3.0]
    # The second KNN is a lighter blue, and neither STF's orange nor a square.
    assert [line.get_marker() for line in lines] == [
        PALETTE[name][1] for name in ("KNN", "STF", "KNN")
    ]
    assert [colour(line) for line in lines[:2]] == colours
    lighter = [max(to_rgb(lines[2].get_color())[i], to_rgb(colours[0])[i]) for i in range(3)]
    assert to_rgb(lines[2].get_color()) == pytest.approx(lighter)
    assert colour(lines[2]) not in colours
    assert [to_hex(bar.get_facecolor()).upper() for bar in bars[::2]] == [
        colour(line) for line in lines
    ]

    upper, _ = figure4(runs).axes
    labels, expected = legend(upper.get_legend()), dict(zip(names, lines, strict=True))
    assert sorted(labels) == sorted(names)
    for handle, label in zip(upper.get_legend().get_lines(), labels, strict=True):
        assert handle.get_marker() == expected[label].get_marker()
    of_stf = next(line for line in upper.lines if line.get_label() == "STF")
    assert (colour(of_stf), of_stf.get_ydata()[0]) == (colours[1], 2.0)


def test_the_estimators_part_of_a_bar_is_what_the_axis_says():
    runs = [TrainingCurve(name, name, ms_per_image=(2.0, 5.0)) for name in ("KNN", "Exact")]
    runs = [replace(run, distances={"fid": [(1000, 1.0)]}) for run in runs]
    times = run_comparison(runs).axes[-1]
    assert times.get_xlabel() == "ms per image (hatched: estimator)"
    rest, estimator = times.patches[::2], times.patches[1::2]
    assert [(bar.get_x(), bar.get_width(), bar.get_hatch()) for bar in rest] == 2 * [(0, 5, None)]
    assert [(bar.get_x(), bar.get_width(), bar.get_hatch()) for bar in estimator] == 2 * [
        (5, 2, "////")
    ]
    # The pattern is seen beside every colour: it is in the run's colour on white.
    for bar, plain in zip(estimator, rest, strict=True):
        assert to_hex(bar.get_facecolor()) == "#ffffff"
        assert bar.get_edgecolor() == plain.get_facecolor()


def test_checkpoint_and_average_curves_mark_the_best():
    axes = checkpoint_curve(
        [(500_000, 9.0), (5_000_000, 4.0), (7_500_000, 6.0)], (5_000_000, 4.0), "fid", ""
    ).axes[0]
    curve, best = axes.lines
    assert curve.get_xdata().tolist() == [0.5, 5.0, 7.5]
    assert list(curve.get_ydata()) == [9.0, 4.0, 6.0]
    assert (best.get_xdata()[0], best.get_ydata()[0]) == (5.0, 4.0)
    assert ("millions" in axes.get_xlabel(), axes.get_yscale()) == (True, "log")
    assert legend(axes.get_legend()) == ["best: 4 at 5,000,000 images"]
    short = checkpoint_curve([(250_000, 9.0), (999_999, 4.0)], (999_999, 4.0), "fid", "run").axes[0]
    assert short.lines[0].get_xdata().tolist() == [250, 999.999]
    assert ("thousands" in short.get_xlabel(), short.get_title()) == (True, "run")
    axes = average_curve([(0.05, 3.0), (0.1, 2.5)], (0.1, 2.5), "fid", "").axes[0]
    assert [[*line.get_xdata(), *line.get_ydata()] for line in axes.lines] == [
        [0.05, 0.1, 3.0, 2.5],
        [0.1, 2.5],
    ]
    assert (axes.get_ylabel(), axes.get_yscale(), *legend(axes.get_legend())) == (
        "FID",
        "linear",
        "best: 2.5 at 0.1",
    )


def test_probe_picture_has_its_columns_and_training_levels():
    columns = {name: label for panel in PANELS.values() for name, label in panel.items()}
    rows = [
        {"t": t, "collapsed": 1 - t / 80, "collapsed_tenth": 1 - t / 90} for t in (0.1, 1.0, 10.0)
    ]
    for place, name in enumerate(columns, start=1):
        for own in rows:
            own |= {name: place * own["t"], f"{name}_se": place / 100}
    *panels, training = probe_figure(rows, np.array([1.0, 1.0, 5.0])).axes
    drawn_bars = {bars.get_label(): bars for axes in panels for bars in axes.containers}
    assert set(drawn_bars) == set(columns.values())
    for name in ("STF", "KNN", "SubspaceKNN"):
        line = drawn_bars[name].lines[0]
        assert (colour(line), line.get_marker()) == PALETTE[name]
    for place, label in enumerate(columns.values(), start=1):
        line, _, (error,) = drawn_bars[label].lines
        assert [*zip(*line.get_data(), strict=True)] == [(t, place * t) for t in (0.1, 1.0, 10.0)]
        assert error.get_segments()[1][:, 1] == pytest.approx([place * 0.99, place * 1.01])
    values, edges, _ = training.patches[0].get_data()
    assert {round(value, 3) for value in values} == {0.0, 0.5, 1.0}
    (start,) = np.flatnonzero(values == 1)
    assert edges[start] <= 1 <= edges[start + 1]
    assert [list(line.get_ydata()) for line in training.lines] == [
        [own[name] for own in rows] for name in ("collapsed", "collapsed_tenth")
    ]
    assert {axes.get_xscale() for axes in (*panels, training)} == {"log"}
    assert training.get_yscale() == "linear"


def test_the_legend_of_a_probe_names_what_is_below_the_axis():
    columns = [name for panel in PANELS.values() for name in panel]
    values = {
        "STF": [math.nan, 0.5, 0.1],
        "KNN": [math.nan, 1e-12, 1e-2],
        "SubspaceKNN": [math.nan, 2e-15, 0.0],
    }
    values |= {"irreducible": [0.0, 1e-10, 0.2], "images": [1.0, 2.0, 9.0]}
    rows = [{"t": t, "collapsed": 1, "collapsed_tenth": 1} for t in (0.1, 1.0, 10.0)]
    for name in columns:
        for own, value in zip(rows, values.get(name, [0.1] * 3), strict=True):
            own |= {name: value, f"{name}_se": math.nan}
    left, right, lower_left, _ = probe_figure(rows, np.ones(3)).axes
    assert legend(lower_left.get_legend()) == [
        "STF",
        "KNN\n(below the axis at 1 of 2 levels)",
        "SubspaceKNN\n(below the axis, at most 2e-15)",
    ]
    assert legend(left.get_legend())[2] == (
        "least loss on this set = noise of OneSample\n(below the axis at 2 of 3 levels)"
    )
    assert left.get_ylim()[0] == lower_left.get_ylim()[0] == 1e-6
    assert legend(right.get_legend()) == ["exponential of the exact posterior's entropy"]


# Samples and networks


def test_figure_5_has_distance_and_copies_by_t_switch():
    values = {("KNN", 5.0): (30.0, 0.1), ("forward", 0.1): (2.0, 0.9), ("KNN", 0.1): (3.0, 0.8)}
    values |= {("forward", 5.0): (20.0, 0.2)}
    rows = [
        {"method": method, "t_switch": t, "fid": fid, "copied_fraction": copied}
        for (method, t), (fid, copied) in values.items()
    ]
    left, right = figure5(rows, "fid", "forward").axes
    for place, axes in enumerate((left, right)):
        for line in axes.lines:
            assert list(line.get_xdata()) == [0.1, 5.0]
            assert list(line.get_ydata()) == [
                values[line.get_label(), t][place] for t in (0.1, 5.0)
            ]
    assert [(axes.get_xscale(), axes.get_yscale()) for axes in (left, right)] == [
        ("log", "linear")
    ] * 2
    assert (left.get_ylim()[0], right.get_ylim()[0] < 0 < 1 < right.get_ylim()[1]) == (0, True)
    assert {line.get_label(): line.get_linestyle() for line in left.lines} == {
        "KNN": "-",
        "forward": "--",
    }
    assert (left.get_ylabel(), right.get_ylabel()) == ("FID", "copied fraction")
    assert {line.get_label(): colour(line) for line in right.lines} == {
        "KNN": PALETTE["KNN"][0],
        "forward": "#808080",
    }


# One style


def test_estimators_keep_one_colour_in_all_pictures():
    # ByClass wraps any estimator and has its colour; the other two are bases.
    wraps = {"ByClass", "Estimator", "DrawingEstimator"}
    kinds = {name: getattr(estimators, name) for name in estimators.__all__ if name not in wraps}
    names = [
        name
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Estimator)
    ]
    assert set(names) == set(PALETTE)
    lines = lower(curves(dict.fromkeys(names, [1e-3] * 4)))[0].lines
    assert {line.get_label(): colour(line) for line in lines} == {
        name: PALETTE[name][0].upper() for name in names
    }
    # Figure 5's baseline is grey.
    assert len({"#808080", *map(colour, lines)}) == len(names) + 1


def test_variants_are_lighter_and_the_first_is_on_top():
    names = [
        "KNN, k=8",
        "my own",
        "KNN",
        "authors' KNNDenoiser",
        "another",
        "SubspaceKNN",
        "single Monte_Carlo",
    ]
    found = looks(names)
    colours = {name: to_rgb(look["color"]) for name, look in found.items()}
    assert sum(colours["KNN"]) < sum(colours["KNN, k=8"]) < sum(colours["authors' KNNDenoiser"])
    assert colours["KNN"] == to_rgb(PALETTE["KNN"][0])
    assert colours["single Monte_Carlo"] == to_rgb(PALETTE["MonteCarlo"][0])
    assert len(set(colours.values())) == len(names)
    assert sorted(names, key=lambda name: -found[name]["zorder"]) == names
    # They get lighter in the order that is given.
    names = ["KNN k=64", "KNN k=256", "KNN k=1024"]
    found = looks(names)
    shades = [sum(to_rgb(found[name]["color"])) for name in names]
    assert shades == sorted(shades)
    assert to_rgb(looks(["Exact above KNN"])["Exact above KNN"]["color"]) == to_rgb(
        PALETTE["Exact"][0]
    )


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.31, 0.46, ["0.32", "0.34", "0.36", "0.38", "0.4", "0.42", "0.44", "0.46"]),
        (0.5, 8, ["0.6", "1", "2", "3", "4", "6"]),
        (1, 1e6, [rf"$\mathdefault{{10^{{{power}}}}}$" for power in range(7)]),
    ],
    ids=str,
)
def test_log_axis_numbers_differ_and_are_plain_if_short(low, high, wanted):
    figure = Figure()
    axes = figure.subplots()
    dress(axes, "y", ylim=(low, high))
    figure.savefig(io.BytesIO())
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    shown = sorted(
        (tick.get_loc(), tick.label1.get_text()) for tick in ticks if low <= tick.get_loc() <= high
    )
    assert [text for _, text in shown if text] == wanted


def test_grids_show_black_as_0_white_as_1_and_pairs_stacked():
    levels = torch.tensor([-1.0, 1.0, 0.0, 0.5]).reshape(4, 1, 1, 1).expand(-1, 1, 20, 20)
    # People can see small images: a side has at least 32 pixels, and so these are twice as large.
    grid = image_grid(levels)[0, 10::42, 10::42]
    assert grid.flatten().tolist() == pytest.approx([0, 1, 128 / 255, 191 / 255])
    # Nine pairs fill a row of eight and begin a second one; the shades say which image is where.
    upper, under = (
        torch.linspace(low, low + 0.8, 9).reshape(9, 1, 1, 1).expand(9, 1, 32, 32)
        for low in (-0.9, 0.1)
    )
    shades = pair_grid(upper, under)[0, 17::34, 17::34] * 2 - 1
    expected = torch.ones(4, 8)  # Free places are white.
    expected[0], expected[1] = upper[:8, 0, 0, 0], under[:8, 0, 0, 0]
    expected[2, 0], expected[3, 0] = upper[8, 0, 0, 0], under[8, 0, 0, 0]
    # a step of 8-bit pixels
    torch.testing.assert_close(shades[:4, :8], expected, atol=1 / 127, rtol=0)


def test_a_caption_is_dark_text_below_the_unchanged_picture():
    picture = torch.rand(3, 20, 30)
    written = captioned(picture, "a longer line than the picture")
    assert torch.equal(written[:, :20, :30], picture)
    beside, below = written[:, :20, 30:], written[:, 20:]
    assert beside.numel() > 0
    assert (beside == 1).all()
    assert below.min() < 0.1
    assert (below[:, -2:] == 1).all()
