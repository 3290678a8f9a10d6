"""The picture of `lit-knn probe`: what better targets would bring on a data set."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lit_knn.figures.style import dress, looks

# Title, and columns with their names in the picture, which also say the colour.
PANELS: dict[str, dict[str, str]] = {
    "Squared error of denoisers, per dimension": {
        "wiener_held_out": "linear denoiser (Wiener), at images held out",
        "held_out": "mean of this set (Exact), at images held out",
        "irreducible": "least loss on this set = noise of OneSample",
    },
    "Noise that an estimator leaves, as a share of OneSample's": {name: name for name in ("STF", "KNN", "SubspaceKNN")},
    "Over how many images the posterior spreads": {"images": "exponential of the exact posterior's entropy"},
}


def probe_figure(rows: Sequence[Mapping[str, Any]], sigma: np.ndarray) -> Figure:
    """Draw the rows of `probe.csv` over the noise level, with the noise levels `sigma` of a training."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    *panels, training = figure.subplots(2, 2, sharex=True).T.flat
    t, curve = [row["t"] for row in rows], {name: [row[name] for row in rows] for name in rows[0]}
    for axes, (title, columns) in zip(panels, PANELS.items(), strict=True):
        for (name, label), style in zip(columns.items(), looks(columns.values()).values(), strict=True):
            if name in curve:
                axes.errorbar(t, curve[name], curve[f"{name}_se"], label=label, **style)
        dress(axes, "xy", title=title)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-9))
        axes.legend(frameon=False)
    counts, edges = np.histogram(sigma, np.geomspace(t[0], t[-1], 80))
    training.stairs(counts / max(counts.max(), 1), edges, fill=True, color="0.8", label="noise levels of the training")
    training.plot(t, curve["collapsed"], "k-", label="posteriors that are one image: better targets buy nothing")
    training.plot(t, curve["collapsed_tenth"], "k:", label="the same with a tenth of the images")
    dress(training, "x", title="What a training meets", ylim=(0, 1.4), yticks=(0, 0.5, 1))
    training.legend(frameon=False, loc="upper right")
    figure.supxlabel("noise level $t$", fontsize="medium")
    return figure
