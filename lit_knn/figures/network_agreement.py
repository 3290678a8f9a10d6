"""How like networks estimators are: over noise levels, and in samples from the same noise."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_knn.figures.image_grid import image_grid
from lit_knn.figures.style import dress, looks

TITLES = {"training": "training images", "held_out": "held-out images", "generated": "the networks' own images"}
# Lower values of R² would hide the differences near 1.
LOWEST_R2 = -0.25


def agreement_curves(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw R² and MSE over noise levels: a column for each kind of images, a line for each estimator.

    Bars are standard errors over images; the band is from the lowest to the highest network. The rows are those of
    `lit_knn.metrics.network_agreement.over_networks`.
    """
    kinds = list(dict.fromkeys(row["images"] for row in rows))
    styles = looks(row["estimator"] for row in rows)
    figure = Figure(figsize=(1.6 + 3.4 * len(kinds), 6.4), layout="constrained")
    grid = figure.subplots(2, len(kinds), squeeze=False, sharex=True, sharey="row")
    for column, kind in enumerate(kinds):
        for axes, measure in zip(grid[:, column], ("r2", "mse"), strict=True):
            for name, style in styles.items():
                own = [row for row in rows if row["images"] == kind and row["estimator"] == name]
                own.sort(key=lambda row: row["t"])
                t, values, errors, low, high = (
                    [row[key] for row in own]
                    for key in ("t", measure, f"{measure}_se", f"{measure}_low", f"{measure}_high")
                )
                axes.errorbar(t, values, yerr=errors, label=name, elinewidth=0.8, **style)
                axes.fill_between(t, low, high, color=style["color"], alpha=0.15, linewidth=0)
        dress(grid[0, column], "x", title=TITLES.get(kind, kind))
        dress(grid[1, column], "xy", xlabel="noise level t")
    least = min(row["r2"] for row in rows)
    grid[0, 0].set(ylabel="R² to the network", ylim=(max(least - 0.05, LOWEST_R2), 1.02))
    grid[1, 0].set_ylabel("MSE per dimension")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def same_noise_boxes(samples: Mapping[str, Tensor], network_samples: Mapping[str, Tensor]) -> Figure:
    """Draw R² and correlation of samples from the same noise: a box of quartiles for each estimator and network.

    The samples of each estimator and of each network, by name, are (n, *shape).
    """
    from lit_knn.metrics.same_noise import latent_agreement  # Metrics take seconds to import.

    names, networks = list(samples), looks(network_samples)
    figure = Figure(figsize=(2 + 0.35 * len(names) * (1 + len(networks)), 6), layout="constrained")
    width = 0.8 / len(networks)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, measure, title in ((upper, "r2", "R²"), (lower, "pearson_r", "Pearson correlation r")):
        least = 1.0
        for place, (network, style) in enumerate(networks.items()):
            values = [latent_agreement(samples[name], network_samples[network])[measure].cpu() for name in names]
            least = min(least, *(value.min().item() for value in values))
            drawn = axes.boxplot(
                [value.numpy() for value in values],
                positions=[number - 0.4 + width * (place + 0.5) for number in range(len(names))],
                widths=0.8 * width,
                patch_artist=True,
                manage_ticks=False,
                flierprops={"marker": ".", "markersize": 2, "markeredgecolor": style["color"]},
                medianprops={"color": "black"},
            )
            for box in drawn["boxes"]:
                box.set(facecolor=style["color"], alpha=0.5)
            drawn["boxes"][0].set_label(network)
        # R² has no lower bound, so the axis ends at −1.
        dress(axes, ylabel=title, ylim=(max(least, -1.0) - 0.05, 1.02))
    lower.set_xlabel("estimator")
    upper.set_title("samples against the network's, from the same noise")
    lower.set_xticks(range(len(names)), names, rotation=30, ha="right")
    lower.legend(loc="lower left")
    return figure


def agreement_grid(samples: Mapping[str, Tensor], columns: int) -> Tensor:
    """Tile images from the same noise: a row for each entry, the network's first. Returns a picture (3, H', W')."""
    return image_grid(torch.cat([images[:columns] for images in samples.values()]), columns)
