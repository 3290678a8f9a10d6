"""Figure 3: errors over noise levels, read back from matplotlib."""

import math

import numpy as np
import pytest

from lit_knn import estimators
from lit_knn.estimators import Estimator
from lit_knn.figures import (
    figure3,
)
from lit_knn.figures.style import PALETTE
from tests.figures.reading import colour, legend

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
