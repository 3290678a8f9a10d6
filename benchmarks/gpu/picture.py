"""The picture of `benchmarks.gpu`: each estimator's time beside its roofline."""

from pathlib import Path

from benchmarks.common import Rows


def save_picture(rows: Rows, path: Path) -> None:
    """Draw bars of milliseconds and marks of the roofline, one panel per number of images.

    It says so and draws nothing if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"matplotlib is missing, so {path} is not drawn")
        return
    if not rows:
        return
    sizes = list(dict.fromkeys(row["N"] for row in rows))
    figure = Figure(figsize=(4.8 * len(sizes), 4), layout="constrained")
    for axes, N in zip(figure.subplots(1, len(sizes), squeeze=False).flat, sizes, strict=True):
        own = [row for row in rows if row["N"] == N][::-1]
        names = [row["estimator"] for row in own]
        axes.barh(names, [row.get("ms", float("nan")) for row in own], color="#4477aa", label="measured")
        axes.plot([row["least_ms"] for row in own], names, "|", color="#cc3311", markersize=14, label="roofline")
        axes.set_xscale("log")
        axes.set_xlabel("ms a call")
        axes.set_title(f"N = {N:,}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=120)
