"""Errors of estimators at latents of their own sampling beside those of the forward process."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_knn.common.tables import Row, number
from lit_knn.figures.style import dress, looks

COLUMN = "mu_mse"


def trajectory_error(forward: Sequence[Row], sampled: Sequence[Row]) -> Figure:
    """Draw the squared error of the posterior mean over t, and the ratio of the two errors.

    Args:
        forward: rows of `estimator_error.csv`, at latents of the forward process: solid lines on the left.
        sampled: rows of `sampler_error.csv`, at latents of the estimators' own sampling: dashed lines.
    """
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    left.set_ylabel("MSE of the posterior mean, per dimension")
    right.set_ylabel("MSE, sampler / forward process")
    for axes in (left, right):
        dress(axes, "xy")
        axes.set_xlabel("noise level $t$")
    right.axhline(1.0, color="0.6", linewidth=0.8)

    by_look = looks([str(row["estimator"]) for row in sampled])
    for name, look in by_look.items():
        at_forward, at_sampled = _by_level(forward, name), _by_level(sampled, name)
        levels = sorted(at_sampled)
        errors = [at_sampled[t] for t in levels]
        left.plot(levels, [at_forward[t] for t in levels], **look, label=name)
        (dashed,) = left.plot(levels, errors, **look)
        dashed.set(linestyle="--", fillstyle="none")
        # An error of 0 has no ratio.
        compared = [t for t in levels if at_forward[t] > 0]
        right.plot(compared, [at_sampled[t] / at_forward[t] for t in compared], **look)

    handles, labels = left.get_legend_handles_labels()
    handles.append(Line2D([], [], color="0.4", linestyle="-"))
    handles.append(Line2D([], [], color="0.4", linestyle="--"))
    labels += ["forward process", "own sampling"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _by_level(rows: Sequence[Row], name: str) -> dict[float, float]:
    """Return the errors of an estimator by noise level."""
    return {number(row, "t"): number(row, COLUMN) for row in rows if row["estimator"] == name}
