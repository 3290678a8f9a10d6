"""Figure 2 (fig:denoiser_viz): the posterior mean and its estimates, as pictures."""

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from lit_knn.common.pixels import to_uint8


def figure2(rows: dict[str, Tensor], levels: list[float]) -> Figure:
    """Draw a row of pictures for each name; values beyond black and white are cut off.

    Args:
        rows: pictures by name, (levels, C, H, W) each, in model space.
        levels: their noise levels.
    """
    side = 0.9  # inches
    layout = ConstrainedLayoutEngine(w_pad=0.01, h_pad=0.01, wspace=0.0, hspace=0.0)
    # The names of the rows take 1.1 inches at the left, and the noise levels 0.4 inches at the top.
    size = side * len(levels) + 1.1, side * len(rows) + 0.4
    figure = Figure(figsize=size, layout=layout)
    grid = figure.subplots(len(rows), len(levels), squeeze=False)

    for row_of_axes, (name, images) in zip(grid, rows.items(), strict=True):
        for axes, image in zip(row_of_axes, to_uint8(images.float()), strict=True):
            coloured = image.permute(1, 2, 0).expand(-1, -1, 3)
            axes.imshow(coloured.numpy(), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        row_of_axes[0].set_ylabel(name, rotation=0, ha="right", va="center", labelpad=6)

    for axes, t in zip(grid[0], levels, strict=True):
        axes.set_title(f"$t = {t:.2g}$", fontsize=9)
    return figure
