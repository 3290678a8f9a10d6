"""Figures 1 and 2 (a posterior and its proposal on a line, posterior means as pictures), agreement, and one style."""

import io

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_knn import estimators
from lit_knn.data import Digits
from lit_knn.estimators import KNN, Estimator, Exact, OneSample
from lit_knn.figures import (
    TrainingCurve,
    agreement_curves,
    figure1,
    figure3,
    figure5,
    pair_grid,
    run_comparison,
    size_calibration,
)
from lit_knn.figures.style import PALETTE, dress, looks
from lit_knn.metrics import mean_pictures
from lit_knn.reference import ReferenceSet
from main import main
from tests import ROOT

CONFIGS = ROOT / "configs"
QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.logger.save_dir"]


def validate(config, folder, *options):
    main(["validate", "-c", str(CONFIGS / config), *QUIET, str(folder), *options])


def check_files(folder, *names):
    for name in names:
        assert Image.open(folder / f"{name}.png").size[0] > 500
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert not list(folder.glob(".*"))
    events = EventAccumulator(str(folder))
    events.Reload()
    return events.Tags()["images"]


def test_figure_1_is_saved_and_shown(tmp_path):
    validate("figure1/toy.yaml", tmp_path)
    assert check_files(tmp_path / "figure1_toy" / "estimator_0", "figure1") == ["figure1"]


def test_figure_1_shows_the_posterior_and_the_proposal():
    # Three points have distances 0, 1 and 2 from z and likelihoods 1, e^(-1/2) and e^(-2); one is a neighbour.
    reference = ReferenceSet(torch.tensor([[0.0], [1.0], [2.0]]))
    figure = figure1(KNN(k=2, n=1).bind(reference), reference, 0.0, [1.0])
    (axes,) = figure.axes
    likelihood = np.exp([0, -0.5, -2])
    stems = [segment[1, 1] for segment in axes.collections[0].get_segments()]
    np.testing.assert_allclose(stems, likelihood / likelihood.sum(), rtol=1e-6)
    capped = np.exp([0, -0.5, -0.5])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), capped / capped.sum(), rtol=1e-6)
    assert f"{capped.sum() / likelihood.sum():.2f}" in axes.get_title()
    assert "k = 2" in figure.get_suptitle()
    assert "N = 3" in figure.get_suptitle()


def test_the_rows_of_figure_2():
    data = Digits()
    data.setup()
    estimators = {"exact": Exact(), "source": OneSample()}
    rows = mean_pictures(estimators, data.reference, [0.01, 1e4], num_images=3)
    assert list(rows) == ["$z$", "true mean", "exact", "source"]
    assert torch.equal(rows["exact"], rows["true mean"])
    # Without noise the mean is the source of z; with much noise it is the mean of the data.
    torch.testing.assert_close(rows["true mean"][0], rows["source"][0])
    mean = np.rint(load_digits().images * (255 / 16)).mean(0) / 127.5 - 1
    for image in rows["true mean"][1]:
        np.testing.assert_allclose(image[0], mean, atol=1e-3)
    # The picture of z has unit scale at every noise level.
    assert 0.7 < rows["$z$"][1].std() < 1.3


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("figure1/toy.yaml", ["--data", "Digits"], "the data must have one dimension, it has 64"),
        ("figure1/toy.yaml", ["--trainer.callbacks.k", "41"], "k=41 is more than the 40 images"),
        ("figure1/toy.yaml", ["--trainer.callbacks.noise_levels", "[0]"], "must be finite and above 0, got 0.0"),
        ("figure1/toy.yaml", ["--data.num_points", "0"], "num_points must be at least 1, got 0"),
        ("figure2/digits.yaml", ["--data", "PointsOnALine"], "must be images of 1 or 3 channels, not (1,)"),
        ("figure2/digits.yaml", ["--trainer.callbacks.num_images", "0"], "num_images must be at least 1, got 0"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_said_in_one_line(config, options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        validate(config, tmp_path, *options)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert message in line


def test_fit_is_refused(tmp_path, capsys):
    picture = tmp_path / "picture.yaml"
    picture.write_text(
        "trainer:\n  callbacks:\n    - class_path: lit_knn.callbacks.MeanPicture\n"
        "      init_args: {estimators: {a: {class_path: Exact}}}\n"
    )
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(CONFIGS / "demo.yaml"), "-c", str(picture), *QUIET, str(tmp_path)])
    assert "MeanPicture is for validate, not for fit" in capsys.readouterr().err


def test_curves_of_agreement_show_values_errors_and_the_range_over_networks():
    rows = [
        {"images": kind, "estimator": name, "t": t, "r2": r2 - t / 100, "mse": 1 - r2, "r2_se": 0.01, "mse_se": 0.02}
        | {"r2_low": r2 - 0.1, "r2_high": r2 + 0.05, "mse_low": 0.01, "mse_high": 0.5}
        for kind in ("training", "generated")
        for name, r2 in (("KNN", 0.8), ("Exact", 0.6))
        for t in (3.0, 1.0)
    ]
    training, _, below, _ = agreement_curves(rows).axes
    assert (training.get_title(), training.get_ylabel()) == ("training images", "R² to the network")
    names = [container.get_label() for container in training.containers]
    assert names == ["KNN", "Exact"]
    for axes, measure, edges in ((training, "r2", (0.7, 0.85)), (below, "mse", (0.01, 0.5))):
        line, _, (bars,) = axes.containers[0].lines
        expected = {row["t"]: row[measure] for row in rows[:2]}
        assert dict(zip(*line.get_data(), strict=True)) == expected
        error = rows[0][f"{measure}_se"]
        ends = [[end[1] for end in bar] for bar in bars.get_segments()]
        assert ends == [pytest.approx([expected[t] - error, expected[t] + error]) for t in (1.0, 3.0)]
        corners = axes.collections[1].get_paths()[0].vertices[:, 1]
        assert (corners.min(), corners.max()) == pytest.approx(edges)


# One style


def test_an_estimator_has_one_colour_in_all_pictures_and_no_two_have_the_same():
    # ByClass wraps any estimator and has its colour; the other two are bases.
    wraps = {"ByClass", "Estimator", "DrawingEstimator"}
    kinds = {name: getattr(estimators, name) for name in estimators.__all__ if name not in wraps}
    names = [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Estimator)]
    assert set(names) == set(PALETTE)
    numbers = dict.fromkeys(("r2", "mse", "r2_low", "r2_high", "mse_low", "mse_high", "r2_se", "mse_se"), 0.5)
    rows = [{"images": "training", "estimator": name, "t": 1.0, **numbers} for name in names]
    agreement = {bar.get_label(): bar.lines[0].get_color() for bar in agreement_curves(rows).axes[0].containers}
    rows = [{"method": name, "t_switch": 1.0, "fid": 2.0, "copied_fraction": 0.1} for name in names[::-1]]
    figure = figure5([*rows, rows[0] | {"method": "forward"}], "fid", "forward")
    hybrid = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert agreement.items() <= hybrid.items()
    assert len(set(hybrid.values())) == len(names) + 1


def test_variants_of_an_estimator_are_lighter_and_other_names_differ():
    names = ["KNN, k=8", "my own", "KNN", "authors' KNNDenoiser", "another", "SubspaceKNN", "single Monte_Carlo"]
    colours = {name: to_rgb(look["color"]) for name, look in looks(names).items()}
    assert list(colours) == list(looks(names))
    assert sum(colours["KNN"]) < sum(colours["KNN, k=8"]) < sum(colours["authors' KNNDenoiser"])
    (plain,), (other,) = looks(["KNN"]).values(), looks(["MonteCarlo"]).values()
    assert colours["KNN"] == to_rgb(plain["color"])
    assert colours["single Monte_Carlo"] == to_rgb(other["color"])
    assert len(set(colours.values())) == len(names)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.31, 0.46, ["0.32", "0.34", "0.36", "0.38", "0.4", "0.42", "0.44", "0.46"]),
        (0.5, 8, ["0.6", "1", "2", "3", "4", "6"]),
        (1, 1e6, [rf"$\mathdefault{{10^{{{power}}}}}$" for power in range(7)]),
    ],
    ids=str,
)
def test_the_numbers_of_a_logarithmic_axis_differ_and_are_plain_on_a_short_one(low, high, wanted):
    figure = Figure()
    axes = figure.subplots()
    dress(axes, "y", ylim=(low, high))
    figure.savefig(io.BytesIO())
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    shown = sorted((tick.get_loc(), tick.label1.get_text()) for tick in ticks if low <= tick.get_loc() <= high)
    assert [text for _, text in shown if text] == wanted


def test_pairs_stand_above_each_other():
    # Nine pairs fill a row of eight and begin a second one; the shades say which image is where.
    upper, lower = (torch.linspace(low, low + 0.8, 9).reshape(9, 1, 1, 1).expand(9, 1, 32, 32) for low in (-0.9, 0.1))
    picture = pair_grid(upper, lower)
    side = 32 + 2
    shades = picture[0, side // 2 :: side, side // 2 :: side] * 2 - 1
    expected = torch.ones(4, 8)  # Free places are white.
    expected[0], expected[1] = upper[:8, 0, 0, 0], lower[:8, 0, 0, 0]
    expected[2, 0], expected[3, 0] = upper[8, 0, 0, 0], lower[8, 0, 0, 0]
    torch.testing.assert_close(shades[:4, :8], expected, atol=1 / 127, rtol=0)  # a step of 8-bit pixels


def test_the_best_size_is_marked_at_each_level():
    errors = {0.5: {3: 2.0, 5: 1.0, 7: 3.0}, 2.0: {3: 4.0, 5: 3.0, 7: 2.0}}
    rows = [{"t": t, "size": size, "mse": mse} for t, own in errors.items() for size, mse in own.items()]
    left = size_calibration(rows, {"calibrated": {0.5: 5, 2.0: 7}}).axes[0]
    marks = [tuple(np.ravel(line.get_data())) for line in left.lines if line.get_marker() == "o"]
    assert marks == [(5, 1.0), (7, 2.0)]


def test_the_time_of_the_estimator_follows_that_of_the_rest():
    runs = [
        TrainingCurve("a", "KNN", 8, 4, ms_per_image=(2.0, 5.0)),
        TrainingCurve("b", "STF", ms_per_image=(1.0, 4.0)),
    ]
    bars = run_comparison(runs).axes[-1].patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0.0, 5.0), (5.0, 2.0), (0.0, 4.0), (4.0, 1.0)]


def test_a_bias_within_its_error_is_shown_by_its_upper_limit():
    def row(t, bias):
        values = {"mse": 1.0, "bias_sq_corrected": bias, "variance": 1.0}
        columns = {f"{kind}_{name}{end}": value for kind in ("mu", "score") for name, value in values.items()
                   for end, value in (("", value), ("_se", 0.1))}  # fmt: skip
        return {"estimator": "KNN", "t": t, **columns}

    # Two standard errors above the estimate; a negative estimate counts as 0.
    bias = figure3([row(1.0, 0.5), row(2.0, 0.15), row(3.0, -0.15)]).axes[1]
    hollow = [line for line in bias.lines if line.get_fillstyle() == "none" and len(line.get_xdata()) == 2]
    np.testing.assert_allclose(hollow[0].get_xdata(), [2.0, 3.0])
    np.testing.assert_allclose(hollow[0].get_ydata(), [0.35, 0.2])
