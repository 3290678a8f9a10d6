"""Agreement of patch sizes with a network, and the sizes chosen by noise level."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from lit_knn.figures.style import dress, looks


def size_calibration(rows: Sequence[Mapping[str, Any]], tables: Mapping[str, Mapping[float, int]]) -> Figure:
    """Draw the MSE over sizes, a line for each noise level, and sizes over noise levels.

    Args:
        rows: of `lit_knn.metrics.size_calibration.calibration_curve`.
        tables: {noise level: size}, by name.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    levels, sizes = sorted({row["t"] for row in rows}), sorted({row["size"] for row in rows})
    colours = ScalarMappable(LogNorm(levels[0], max(levels[-1], 1.01 * levels[0])), "viridis")
    for t in levels:
        own = sorted((row["size"], row["mse"]) for row in rows if row["t"] == t)
        left.plot(*zip(*own, strict=True), color=colours.to_rgba(t), linewidth=1.2)
        left.plot(*min(own, key=lambda point: point[1]), marker="o", color=colours.to_rgba(t), markersize=5)
    figure.colorbar(colours, ax=left, label="noise level t")
    dress(left, "y", xlabel="size of the patch, pixels", ylabel="MSE per dimension to the network", xticks=sizes)
    for (name, table), style in zip(tables.items(), looks(tables).values(), strict=True):
        points = sorted((t, size) for t, size in table.items() if levels[0] / 1.01 <= t <= levels[-1] * 1.01)
        right.step(*zip(*points, strict=True), where="mid", label=name, **style)
    dress(right, "x", xlabel="noise level t", ylabel="size of the patch, pixels", ylim=(0, None))
    right.legend()
    return figure
