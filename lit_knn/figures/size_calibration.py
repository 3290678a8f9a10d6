"""Agreement of patch sizes with a network, and the sizes chosen by noise level."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from lit_knn.figures.style import dress, look


def size_calibration(rows: Sequence[Mapping[str, Any]], tables: Mapping[str, Mapping[float, int]]) -> Figure:
    """Draw the MSE over sizes, a line for each noise level, and sizes over noise levels.

    Args:
        rows: of `lit_knn.metrics.size_calibration.calibration_curve`.
        tables: {noise level: size}, by name.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    levels = sorted({row["t"] for row in rows})
    for number, t in enumerate(levels):
        own = sorted((row["size"], row["mse"]) for row in rows if row["t"] == t)
        least = min(own, key=lambda point: point[1])
        colour = colormaps["viridis"](number / max(len(levels) - 1, 1))
        left.plot(*zip(*own, strict=True), color=colour, linewidth=1.2, label=f"{t:.3g}")
        left.plot(*least, marker="o", color=colour, markersize=5)
    dress(left, "y", xlabel="size of the patch, pixels", ylabel="MSE per dimension to the network")
    left.legend(title="t", fontsize="x-small", ncols=2)
    for number, (name, table) in enumerate(tables.items()):
        points = sorted((t, size) for t, size in table.items() if levels[0] / 1.01 <= t <= levels[-1] * 1.01)
        right.step(*zip(*points, strict=True), where="mid", label=name, **look(number))
    dress(right, "x", xlabel="noise level t", ylabel="size of the patch, pixels", ylim=(0, None))
    right.legend()
    return figure
