"""Pictures of samples of any shape that can be drawn: images, points of a plane, series."""

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from lit_knn.common.pixels import are_pictures
from lit_knn.figures.image_grid import image_grid
from lit_knn.figures.style import dress

INCHES, DPI = 4.0, 120
COLOUR = "#0072B2"
# Distance from the beginning of one series to the next, in lengths or heights of a series.
SPACING = 1.15


def sample_picture(samples: Tensor) -> Tensor | None:
    """Draw samples into one picture.

    Args:
        samples: (B, *shape), in model space.

    Returns:
        (3, H, W) in [0, 1]: a grid of images (B, C, H, W) of 1 or 3 channels, a scatter plot of
        points (B, 2), or the lines of series (B, 1, L). None for other shapes.
    """
    shape = tuple(samples.shape[1:])
    if are_pictures(shape):
        return image_grid(samples)
    if shape == (2,):
        return _drawn(_scatter(samples.cpu().numpy()))
    if len(shape) == 2 and shape[0] == 1:
        return _drawn(_lines(samples[:, 0].cpu().numpy()))
    return None


def _scatter(points: np.ndarray) -> Figure:
    """Draw points (B, 2), with equal units on both axes."""
    figure = Figure(figsize=(INCHES, INCHES), layout="constrained")
    axes = figure.subplots()
    axes.scatter(points[:, 0], points[:, 1], s=6, color=COLOUR, linewidths=0)
    axes.set_aspect("equal", adjustable="datalim")
    dress(axes)
    return figure


def _lines(series: np.ndarray) -> Figure:
    """Draw series (B, L) side by side in nearly square rows, all on one scale."""
    number, length = series.shape
    columns = max(round(number**0.5), 1)
    width, height = SPACING * length, SPACING * np.ptp(series)

    figure = Figure(figsize=(2 * INCHES, INCHES), layout="constrained")
    axes = figure.subplots()
    for i, values in enumerate(series):
        row, column = divmod(i, columns)
        axes.plot(
            column * width + np.arange(length), values - row * height, color=COLOUR, linewidth=0.8
        )
    axes.set_axis_off()
    return figure


def _drawn(figure: Figure) -> Tensor:
    """Turn a figure into a picture (3, H, W) in [0, 1]."""
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = torch.from_numpy(np.array(canvas.buffer_rgba())[..., :3])
    return pixels.permute(2, 0, 1).float() / 255
