"""Free particles: their distance to the data and their copies over the steps, and how they look at the end."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from lit_knn.common.tables import HELD_OUT, TITLES, Row, number
from lit_knn.figures.image_grid import image_grid
from lit_knn.figures.style import dress, looks

METRIC = "fd_pixels"
CURVE_INCHES, LINE_INCHES = 3.4, 0.75


def particles_figure(rows: Sequence[Row], images: Mapping[str, Tensor]) -> Figure:
    """Draw the distance to the data and the copied fraction over the steps, and below them a line of images a run.

    Args:
        rows: each has `run`, `step`, `fd_pixels`, `copied_fraction`, and with held-out images `fd_pixels_held_out`,
            whose curve is dashed.
        images: particles at the end, by run, (n, C, H, W); empty for data that are no pictures.
    """
    heights = [CURVE_INCHES] + [LINE_INCHES] * len(images)
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    curves, *lines = np.asarray(parts)[:, 0]
    left, right = curves.subplots(1, 2)

    styles = looks(str(row["run"]) for row in rows)
    for run, style in styles.items():
        of_run = [row for row in rows if row["run"] == run]
        steps = [number(row, "step") for row in of_run]
        left.plot(steps, [number(row, METRIC) for row in of_run], label=run, **style)
        right.plot(steps, [number(row, "copied_fraction") for row in of_run], **style)
        if METRIC + HELD_OUT in of_run[0]:
            values = [number(row, METRIC + HELD_OUT) for row in of_run]
            left.plot(steps, values, "--", color=style["color"], linewidth=1)

    dress(left, "y", xlabel="step", ylabel=TITLES[METRIC])
    dress(right, xlabel="step", ylabel="copied fraction", ylim=(-0.03, 1.03))
    if METRIC + HELD_OUT in rows[0]:
        left.plot([], [], "--", color="0.4", linewidth=1, label="to held-out images")
    left.legend(fontsize=8)

    for part, (run, particles) in zip(lines, images.items(), strict=True):
        axes = part.subplots()
        axes.imshow(image_grid(particles, len(particles)).permute(1, 2, 0).numpy())
        axes.set_axis_off()
        axes.set_title(run, fontsize=8, loc="left", pad=2)
    return figure
