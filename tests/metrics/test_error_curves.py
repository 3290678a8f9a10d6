"""Figure 3's picture: curves, bands, and zeros, which a logarithmic axis cannot show."""

import csv
import io
import math

import pytest
from matplotlib.colors import to_hex

from lit_knn.figures import figure3
from lit_knn.figures.figure3 import PREFIXES, QUANTITIES
from lit_knn.figures.style import PALETTE
from tests import ROOT

RESULTS = ROOT / "benchmarks" / "results"
KNN, STF = (PALETTE[name][0] for name in ("KNN", "STF"))


def row(name, t, mse, se=0.0, bias=None, variance=None):
    """One row of the table, with the same numbers for posterior mean and score."""
    values = {"mse": mse, "bias_sq_corrected": mse if bias is None else bias, "variance": variance}
    found = {"estimator": name, "t": t}
    for prefix in PREFIXES:
        for quantity, value in values.items():
            found |= {f"{prefix}_{quantity}": "" if value is None else value, f"{prefix}_{quantity}_se": se}
    return found


def drawn(rows):
    """The axes of the figure."""
    figure = figure3(rows)
    figure.savefig(io.BytesIO(), format="png")
    return figure.axes


def marks(axes):
    """The noise levels marked at the foot, by colour."""
    return {
        to_hex(line.get_color()).upper(): list(line.get_xdata())
        for line in axes.lines
        if line.get_marker() == "x" and line.get_transform() == axes.get_xaxis_transform()
    }


def limits(axes):
    """The hollow marks that are not at the foot: (t, value) of each, by colour."""
    return {
        to_hex(line.get_color()).upper(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.lines
        if line.get_fillstyle() == "none" and line.get_transform() == axes.transData
    }


def curves(axes):
    """Each curve's values, by its name."""
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines if line.get_fillstyle() != "none"}


LEVELS = [0.002, 0.05, 1.0, 20.0]


def test_zeros_are_marks_at_the_foot_and_gaps_in_the_curve():
    rows = [row("KNN", t, mse, variance=mse) for t, mse in zip(LEVELS, (0.0, 0.0, 1e-9, 1e-3), strict=True)]
    rows += [row("STF", t, mse, variance=0.0) for t, mse in zip(LEVELS, (0.0, 1e-8, 1e-2, 1e-3), strict=True)]
    mse, bias, variance = drawn(rows)[:3]
    assert marks(mse) == {KNN: LEVELS[:2], STF: LEVELS[:1]}
    assert marks(variance) == {KNN: LEVELS[:2], STF: LEVELS}
    assert [math.isnan(value) for value in curves(mse)["KNN"]] == [True, True, False, False]
    assert 0 < mse.get_ylim()[0] < mse.get_ylim()[1] < math.inf
    assert any("foot" in text.get_text() for text in bias.figure.legends[0].get_texts())


def test_a_bias_that_may_be_none_is_a_hollow_mark_at_its_upper_limit():
    # An estimate of squared bias is unbiased, so it can be negative; two standard errors above it, or 0, is the limit.
    biases = {0.5: -1e-5, 1.0: 1.9e-4, 2.0: 2.1e-4}
    rows = [row("KNN", t, 1e-3, se=1e-4, bias=bias) for t, bias in biases.items()]
    mse, bias, variance = figure3([*rows, row("STF", 1.0, 1e-3, bias=5e-4)]).axes[:3]
    assert curves(bias)["KNN"] == pytest.approx([math.nan, math.nan, 2.1e-4], nan_ok=True)
    (colour,), (found,) = limits(bias), limits(bias).values()
    assert colour == KNN
    assert found == [(0.5, pytest.approx(2e-4)), (1.0, pytest.approx(3.9e-4))]
    assert limits(mse) == limits(variance) == marks(bias) == {}
    assert any("below this" in text.get_text() for text in bias.figure.legends[0].get_texts())
    told = figure3([row("STF", 1.0, 1e-3, bias=5e-4)]).legends[0].get_texts()
    assert [text.get_text() for text in told] == ["STF"]


def test_curves_far_from_the_others_leave_the_picture_and_not_the_others_theirs():
    # At small t a linear estimate's score error grows as t^-4; an exact estimate has only rounding errors.
    rows = [row("KNN", t, mse) for t, mse in zip(LEVELS, (0.0, 1e-20, 1e-7, 1e-8), strict=True)]
    rows += [row("SubspaceKNN", t, mse) for t, mse in zip(LEVELS, (0.0, 1e-25, 1e-9, 1e-10), strict=True)]
    rows += [row("STF", t, mse) for t, mse in zip(LEVELS, (0.0, 1e-20, 1e-5, 1e-8), strict=True)]
    rows += [row("Wiener", t, mse) for t, mse in zip(LEVELS, (1e6, 1e2, 1e-2, 1e-9), strict=True)]
    rows += [row("exact", t, mse) for t, mse in zip(LEVELS, (1e-30, 1e-31, 1e-32, 1e-33), strict=True)]
    low, high = drawn(rows)[0].get_ylim()
    assert low < 1e-11
    assert high > 1e-4
    assert high / low < 1e16 * 1.001


@pytest.mark.parametrize("path", sorted(RESULTS.glob("figure3_*.csv")), ids=lambda path: path.stem)
def test_kept_results_can_be_drawn(path):
    with path.open() as file:
        text = {"estimator"}
        rows = [
            {key: value if key in text or value == "" else float(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]
    assert {row["estimator"] for row in rows} >= {"KNN", "STF"}
    for axes, quantity in zip(drawn(rows), [*QUANTITIES] * len(PREFIXES), strict=True):
        # A bias that is not told from 0 is no curve.
        assert quantity == "bias_sq_corrected" or any(map(math.isfinite, curves(axes)["KNN"]))
