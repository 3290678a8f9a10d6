"""The common style of all figures, and their files."""

from os import PathLike
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter

from lit_knn.common.files import written_whole

# These colours differ in print and for the colour-blind (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8c8c8c")
MARKERS = "osD^vP*X"
PNG_DPI = 200


def look(number: int) -> dict[str, Any]:
    """Return colour and marker of line `number`, and the sizes of all lines."""
    kind = number % len(COLOURS)
    return {"color": COLOURS[kind], "marker": MARKERS[kind], "markersize": 3, "linewidth": 1.4}


def dress(axes: Axes, log: str = "", **labels: Any) -> None:
    """Give axes a light grid behind the data and no frame at the top and right.

    `log` names the logarithmic axes, "x", "y" or "xy"; `labels` are arguments of `Axes.set`, such as `title`.
    """
    for name in log:
        labels[f"{name}scale"] = "log"
    axes.set(**labels)
    for name in log:
        getattr(axes, f"{name}axis").set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def log_values(axes: Axes) -> None:
    """Make the vertical axis logarithmic, and number it between the powers of ten if there is room."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        # Over a short range the numbers differ in their second digit, which LogFormatter leaves out.
        short = FuncFormatter(lambda value, _: f"{value:.3g}")
        set_formatter(short if high < 3 * low else LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.grid(True, which="minor", axis="y", color="0.9", linewidth=0.6)


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
