"""The common style of all figures, and their files."""

import re
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation

from lit_knn.common.files import written_whole

Marker = str | tuple[int, int]  # a tuple is a star: its number of points, and 1

# One colour and one marker for each estimator, in all pictures; the first seven colours are those
# of Okabe and Ito. Other marks have other meanings: "x" is a zero, a hollow marker an upper limit,
# and "*" the best.
PALETTE: dict[str, tuple[str, Marker]] = {
    "KNN": ("#0072B2", "o"),
    "STF": ("#D55E00", "s"),
    "MonteCarlo": ("#009E73", "D"),
    "OneSample": ("#CC79A7", "^"),
    "UniformSNIS": ("#E69F00", "P"),
    "SubspaceKNN": ("#56B4E9", "v"),
    "Exact": ("#000000", "p"),
    "Wiener": ("#8C510A", ">"),
    "PatchPosterior": ("#6A3D9A", "h"),
    "PCALocality": ("#C2185B", "<"),
    "Smoothed": ("#999933", (4, 1)),
    "Switched": ("#66A61E", "d"),
    "Mixed": ("#8B0000", "H"),
    "Network": ("#666666", (6, 1)),
    "Noised": ("#B8860B", (3, 1)),
}
# Colours and markers for names that mention no estimator, such as those of networks.
OTHERS = (
    ("#C9A227", "o"),
    ("#AA4499", "s"),
    ("#44AA99", "D"),
    ("#117733", "^"),
    ("#708090", "v"),
)
# The lightest variant of an estimator has this share of white.
WHITEST = 0.6
PNG_DPI = 200


class Look(TypedDict):
    """The look of a curve: arguments of `Axes.plot`."""

    color: str
    marker: Marker
    markersize: float
    linewidth: float
    zorder: float
    linestyle: NotRequired[str]


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return the look of each name in a picture, by name: colour, marker, sizes and order.

    The order of the result is not that of the names, so look a name up. The first name is drawn on
    top. A name has the colour and the marker of the estimator that it mentions first. If several
    names mention the same one, they are its variants, and the later ones are lighter; the plain
    name comes first. Names without an estimator are dashed once their colours repeat.
    """
    orders: dict[str, float] = {}
    families: dict[str, list[str]] = {}
    for place, name in enumerate(dict.fromkeys(names), start=1):
        # The larger the number, the later a line is drawn. Lines have the number 2 by default.
        orders[name] = 2 + 1 / place
        families.setdefault(_estimator(name), []).append(name)

    without_estimator = families.pop("", [])
    by_name: dict[str, Look] = {}
    for known, variants in families.items():
        colour, marker = PALETTE[known]
        if known in variants:
            variants.remove(known)
            variants.insert(0, known)
        whiteness = np.linspace(0, WHITEST, len(variants))
        for name, white in zip(variants, whiteness, strict=True):
            by_name[name] = _look(colour, white, marker, orders[name])

    for number, name in enumerate(without_estimator):
        colour, marker = OTHERS[number % len(OTHERS)]
        by_name[name] = _look(colour, 0.0, marker, orders[name])
        if number >= len(OTHERS):
            by_name[name]["linestyle"] = "--"
    return by_name


def _look(colour: str, white: float, marker: Marker, order: float) -> Look:
    """Return the look of a curve.

    Args:
        colour: colour of the estimator.
        white: share of white in the colour of this variant.
        marker: marker of the estimator.
        order: place in the drawing order.
    """
    red, green, blue = (1 - white) * np.array(to_rgb(colour)) + white
    return {
        "color": to_hex((red, green, blue)),
        "marker": marker,
        "markersize": 3,
        "linewidth": 1.4,
        "zorder": order,
    }


def _estimator(name: str) -> str:
    """Return the estimator that a name mentions first, as `MonteCarlo` or `Monte Carlo`, or ""."""
    first, place = "", len(name)
    for known in PALETTE:
        # "MonteCarlo" has two words, and "KNN" has one.
        words = re.findall("[A-Z][a-z]+|[A-Z]+(?![a-z])", known)
        pattern = "(?<![a-z])" + "[ _]?".join(words)
        mention = re.search(pattern, name, re.IGNORECASE)
        if mention and mention.start() < place:
            first, place = known, mention.start()
    return first


def log_axis(values: Iterable[float]) -> str:
    """Return "y" if the vertical axis of these values can be logarithmic, because all are above 0; else ""."""
    return "y" if min(values) > 0 else ""


class LogNumbers(LogFormatterSciNotation):
    """Numbers of a logarithmic axis: plain ones if it is short, powers of ten if it is long."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the text at `x`, which is empty where the axis has no room."""
        low, high = self.axis.get_view_interval()  # type: ignore[union-attr]
        text = super().__call__(x, pos)
        # Three decades have room for plain numbers, unless a number has many digits.
        is_short = high < 1e3 * low
        if text and is_short and 1e-4 < x < 1e5:
            return f"{x:.6g}"
        return text


def dress(axes: Axes, log: str = "", **labels: object) -> None:
    """Give axes a light grid behind the data and no frame at the top and right.

    Args:
        axes: the axes.
        log: names the logarithmic axes, "x", "y" or "xy".
        labels: arguments of `Axes.set`, such as `title`.
    """
    for name in log:
        labels[f"{name}scale"] = "log"
    axes.set(**labels)

    for name in log:
        axis = getattr(axes, f"{name}axis")
        # Marks between the powers of ten get numbers only on a short axis, because there is no room on others.
        # Numbers side by side need more room than numbers above each other.
        decades = 1 if name == "x" else 2
        axis.set_major_formatter(LogNumbers(minor_thresholds=(decades, 0.5)))
        axis.set_minor_formatter(LogNumbers(minor_thresholds=(decades, 0.5)))

    axes.grid(True, which="major", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def image_unit(images: float) -> tuple[str, float]:
    """Return unit and divisor of an axis up to `images`: thousands, or millions."""
    return ("millions", 1e6) if images >= 1e6 else ("thousands", 1e3)


def save_figure(figure: Figure, path: str | PathLike[str]) -> list[Path]:
    """Save `path`.png and `path`.pdf, each completely or not at all; return the paths."""
    path = Path(path)
    # The layout is computed once here. With any layout engine, "none" too, each saving would draw
    # the figure twice.
    figure.draw_without_rendering()
    figure.set_layout_engine(None)

    written = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "pdf")]
    for target in written:
        with written_whole(target) as partial:
            figure.savefig(partial, dpi=PNG_DPI)
    return written
