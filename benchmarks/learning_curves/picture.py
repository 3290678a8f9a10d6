"""Picture of the learning curves: one row of panels per module, one column per measurement, a band over seeds."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.learning_curves.grid import SHARES
from benchmarks.learning_curves.statistics import Curves
from lit_knn.figures.style import dress, image_unit, looks

PANELS = {
    "quality": "Fréchet distance",
    "held_out_loss": "loss at images that no run saw",
    "val_error": "error at held latents",
    "gradient_variance": "gradient variance at fixed (z, t); exact: 0",
}


def picture(curves: Mapping[str, Curves]) -> Figure:
    """Draw mean ± standard deviation over seeds, for each module. A variance of 0 has no place on the axis."""
    panels = [
        name
        for name in PANELS
        if name == "quality" or any(own.measured(name) for own in curves.values())
    ]
    figure = Figure(figsize=(3.7 * len(panels), 2.7 * len(curves) + 0.5), layout="constrained")
    grid = figure.subplots(len(curves), len(panels), squeeze=False)
    for row, (module, own) in zip(grid, curves.items(), strict=True):
        for axes, name in zip(row, panels, strict=True):
            column = own.quality if name == "quality" else name
            if own.measured(column):
                _draw(axes, own, column)
            else:
                axes.set_axis_off()
        row[0].set_ylabel(module)
    for axes, name in zip(grid[0], panels, strict=True):
        axes.set_title(PANELS[name], fontsize="medium")
    lines = {
        name: line
        for axes in grid.flat
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=min(len(lines), 2 * len(panels)),
        frameon=False,
    )
    return figure


def samples_picture(samples: Mapping[str, np.ndarray]) -> Figure:
    """Draw samples of the same noise: a row of images (n, C, H, W), uint8, for each estimator."""
    count = min(map(len, samples.values()))
    figure = Figure(figsize=(0.62 * count + 1.2, 0.62 * len(samples)), layout="constrained")
    for row, (name, images) in zip(
        figure.subplots(len(samples), squeeze=False)[:, 0], samples.items(), strict=True
    ):
        row.imshow(
            np.concatenate(images[:count].transpose(0, 2, 3, 1), axis=1).squeeze(), cmap="gray"
        )
        row.set(xticks=[], yticks=[])
        row.set_ylabel(name, rotation=0, ha="right", va="center", fontsize="small")
        row.spines[:].set_visible(False)
    return figure


def _draw(axes: Axes, curves: Curves, name: str) -> None:
    most = max(curves.band(estimator, name)[0][-1] for estimator in curves.estimators)
    unit, divisor = image_unit(int(most))
    # Mixtures of two estimators are only in the tables.
    drawn = [name for name in curves.estimators if name.rpartition(", ")[2] not in SHARES]
    for estimator, style in looks(drawn).items():
        images, mean, spread = curves.band(estimator, name)
        if not (mean > 0).all():
            continue
        axes.plot(images / divisor, mean, label=estimator, **style)
        low = np.maximum(mean - spread, mean / 10)
        axes.fill_between(
            images / divisor, low, mean + spread, color=style["color"], alpha=0.18, linewidth=0
        )
    dress(axes, "y", xlabel=f"images seen ({unit})")
