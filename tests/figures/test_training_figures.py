"""Pictures of trainings and of the probe: the numbers that they draw, read back from matplotlib."""

import math
from dataclasses import replace

import numpy as np
import pytest
import yaml
from matplotlib.colors import to_hex, to_rgb

from lit_knn.commands.report_runs import read_run
from lit_knn.common.tables import write_rows
from lit_knn.figures import (
    average_curve,
    checkpoint_curve,
    figure4,
    probe_figure,
    run_comparison,
)
from lit_knn.figures.figure4 import passes, varied
from lit_knn.figures.probe import PANELS
from lit_knn.figures.style import PALETTE
from lit_knn.figures.training_curves import TrainingCurve, best_point
from lit_knn.runs.record import Record
from main import main
from tests.figures.reading import colour, legend


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
    for score in ("inception_score", "recall_held_out", "density", "coverage"):
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
