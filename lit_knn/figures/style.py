"""The common style of all figures, and their files."""

import re
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation

from lit_knn.common.files import written_whole

# One colour and one marker for each estimator, in all pictures; the first seven colours are those of Okabe and Ito.
# Other marks have other meanings: "x" is a zero, a hollow marker an upper limit, and "*" the best.
PALETTE: dict[str, tuple[str, Any]] = {
    "KNN": ("#0072B2", "o"), "STF": ("#D55E00", "s"), "MonteCarlo": ("#009E73", "D"), "OneSample": ("#CC79A7", "^"),
    "UniformSNIS": ("#E69F00", "P"), "SubspaceKNN": ("#56B4E9", "v"), "Exact": ("#000000", "p"),
    "Wiener": ("#8C510A", ">"), "PatchPosterior": ("#6A3D9A", "h"), "PCALocality": ("#C2185B", "<"),
    "Smoothed": ("#999933", (4, 1)), "Switched": ("#66A61E", "d"), "Mixed": ("#8B0000", "H"),
    "Network": ("#666666", (6, 1)),
}  # fmt: skip
# For names without an estimator, such as those of networks.
OTHERS = (("#C9A227", "o"), ("#AA4499", "s"), ("#44AA99", "D"), ("#117733", "^"), ("#708090", "v"))
# The lightest variant of an estimator has this share of white.
WHITEST = 0.6
PNG_DPI = 200


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return colour, marker, sizes and order of each name in a picture; the first one is drawn on top.

    A name has the colour and the marker of the estimator that it mentions first. If several names mention the same one,
    they are its variants, and the later ones are lighter; the plain name comes first.
    """
    orders = {name: 2 + 1 / place for place, name in enumerate(dict.fromkeys(names), start=1)}
    variants: dict[str, list[str]] = {}
    for name in orders:
        variants.setdefault(_estimator(name), []).append(name)
    others = variants.pop("", [])
    families = [(PALETTE[known], sorted(own, key=lambda name: name != known)) for known, own in variants.items()]
    families += [(OTHERS[number % len(OTHERS)], [name]) for number, name in enumerate(others)]
    found = {}
    for (colour, marker), own in families:
        for white, name in zip(np.linspace(0, WHITEST, len(own)), own, strict=True):
            shade = to_hex((1 - white) * np.array(to_rgb(colour)) + white)
            found[name] = {"color": shade, "marker": marker, "markersize": 3, "linewidth": 1.4, "zorder": orders[name]}
    return found


def _estimator(name: str) -> str:
    """Return the estimator that a name mentions first, as `MonteCarlo` or `Monte Carlo`, or an empty string."""
    words = {known: "[ _]?".join(re.findall("[A-Z][a-z]+|[A-Z]+(?![a-z])", known)) for known in PALETTE}
    found = {known: re.search(f"(?<![a-z]){pattern}", name, re.IGNORECASE) for known, pattern in words.items()}
    return min(((there.start(), known) for known, there in found.items() if there), default=(0, ""))[1]


class LogNumbers(LogFormatterSciNotation):
    """Numbers of a logarithmic axis: plain ones if it is short, powers of ten if it is long."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the text at `x`, which is empty where the axis has no room."""
        low, high = self.axis.get_view_interval()  # type: ignore[union-attr]
        text = super().__call__(x, pos)
        return f"{x:.6g}" if text and high < 1e3 * low and 1e-4 < x < 1e5 else text


def dress(axes: Axes, log: str = "", **labels: Any) -> None:
    """Give axes a light grid behind the data and no frame at the top and right.

    `log` names the logarithmic axes, "x", "y" or "xy"; `labels` are arguments of `Axes.set`, such as `title`.
    """
    for name in log:
        labels[f"{name}scale"] = "log"
    axes.set(**labels)
    for name in log:
        axis = getattr(axes, f"{name}axis")
        for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
            # Numbers side by side need more room than numbers above each other.
            set_formatter(LogNumbers(minor_thresholds=(1 if name == "x" else 2, 0.5)))
    axes.grid(True, which="major", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def image_unit(images: float) -> tuple[str, float]:
    """Return unit and divisor for an axis up to `images`: thousands for the digits, millions for the paper's runs."""
    return ("millions", 1e6) if images >= 1e6 else ("thousands", 1e3)


def save_figure(figure: Figure, path: str | PathLike[str]) -> list[Path]:
    """Save `path`.png and `path`.pdf, each completely or not at all; return the paths."""
    path = Path(path)
    # The layout is computed once here. With any layout engine, "none" too, each saving would draw the figure twice.
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    written = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "pdf")]
    for target in written:
        with written_whole(target) as partial:
            figure.savefig(partial, dpi=PNG_DPI)
    return written
