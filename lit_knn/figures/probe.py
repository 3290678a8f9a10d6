"""The picture of `lit-knn probe`: what better targets would bring on a data set."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lit_knn.figures.style import dress, looks

# The estimators that these losses belong to, and their names in the picture.
LOSSES = {
    "wiener_held_out": ("Wiener", "linear denoiser, at images held out"),
    "held_out": ("Exact", "mean of this set, at images held out"),
    "irreducible": ("OneSample", "least loss on this set = noise of one sample"),
}


def probe_figure(rows: Sequence[Mapping[str, Any]], estimators: Sequence[str], sigma: Tensor, findings: Any) -> Figure:
    """Draw four panels over the noise level: losses, the posterior, what estimators leave, the levels of the training.

    Args:
        rows: those of `probe.csv`.
        estimators: names of columns with the share of the noise that an estimator leaves.
        sigma: draws from the noise levels of the training.
        findings: has `collapse` and `stf_level`, which are marked.
    """
    figure = Figure(figsize=(11, 7), layout="constrained")
    (losses, spread), (left, training) = figure.subplots(2, 2, sharex=True)
    t = [row["t"] for row in rows]
    styles = looks([own for own, _ in LOSSES.values()])
    for name, (own, label) in LOSSES.items():
        if name in rows[0]:
            _band(losses, rows, name, {**styles[own], "label": label}, floor=1e-9)
    dress(losses, "xy", title="Squared error of denoisers, per dimension")
    losses.set_ylim(bottom=max(min(row["wiener"] for row in rows) / 100, 1e-9))
    losses.legend(frameon=False)

    _band(spread, rows, "images", {"color": "black", "label": "images that a posterior spreads over"}, floor=1.0)
    dress(spread, "xy", title="Over how many images the posterior spreads")
    chance = spread.twinx()
    for name, label, line in (("collapsed", "all images", "-"), ("collapsed_tenth", "a tenth of them", ":")):
        chance.plot(t, [row[name] for row in rows], color="0.5", linestyle=line, label=label)
    chance.set_ylabel("chance that one image has 99 % of it", color="0.5")
    chance.legend(frameon=False, loc="center right")

    shares = [row[name] for row in rows for name in estimators if row[name] != ""]
    floor = max(min([share for share in shares if share > 0], default=1e-3) / 2, 1e-9)
    for name, style in looks(estimators).items():
        _band(left, rows, name, {**style, "label": name}, floor)
    dress(left, "xy", title="Noise that an estimator leaves, as a share of one sample's", xlabel="noise level $t$")
    left.set_ylim(floor, 3)
    left.legend(frameon=False)

    counts, *_ = training.hist(sigma.numpy(), np.geomspace(t[0], t[-1], 80), color="0.75")
    training.set_ylim(0, 1.25 * max(np.max(counts), 1))  # The notes stand above the bars.
    dress(training, "x", title="Noise levels of the training", xlabel="noise level $t$")
    training.set_yticks([])
    for axes in (losses, left, training):
        for level, line in ((findings.collapse, "-"), (findings.stf_level, "--")):
            if level is not None:
                axes.axvline(level, color="0.3", linestyle=line, linewidth=1)
    top = training.get_xaxis_transform()
    if findings.collapse is not None:
        text = "below: one image,\nbetter targets buy nothing "
        training.text(findings.collapse, 0.97, text, transform=top, ha="right", va="top", fontsize="small")
    if findings.stf_level is not None:
        training.text(findings.stf_level, 0.97, " above: STF\n is as good", transform=top, va="top", fontsize="small")
    return figure


def _band(axes: Axes, rows: Sequence[Mapping[str, Any]], name: str, style: dict[str, Any], floor: float) -> None:
    """Draw a column with its standard error. Values below `floor` are at the floor."""
    t, values = [row["t"] for row in rows], np.array([row[name] if row[name] != "" else np.nan for row in rows])
    errors = np.nan_to_num([row[f"{name}_se"] or 0.0 for row in rows])
    (line,) = axes.plot(t, np.maximum(values, floor), **style)
    low, high = np.maximum(values - errors, floor), np.maximum(values + errors, floor)
    axes.fill_between(t, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
