"""How like two sets of images are: squared error, coefficient of determination and correlation, image by image."""

from typing import NamedTuple

import torch
from torch import Tensor


class Agreement(NamedTuple):
    """Likeness of outputs to the outputs of a network, per image. All are (B,), float64.

    With w the network's output, y the other one, both flattened to d values, and w̄, ȳ their means over these values:

    Attributes:
        mse: ‖y − w‖² / d.
        r2: the coefficient of determination, 1 − ‖y − w‖² / ‖w − w̄‖²; at most 1, and negative if w̄ is nearer to w
            than y. The MSE as a share of the image's variance. Analytic Diffusion Studio reports it (with a variance
            over d − 1, so that its 1 − R² is smaller by 1/d).
        pearson_r: the correlation ⟨y − ȳ, w − w̄⟩ / (‖y − ȳ‖·‖w − w̄‖). The public code of Kamb and Ganguli computes
            this and calls it r². It forgives another contrast and brightness, which the other measures do not.
        pearson_r2: its square.
    """

    mse: Tensor
    r2: Tensor
    pearson_r: Tensor
    pearson_r2: Tensor


MEASURES = Agreement._fields


def agreement(outputs: Tensor, network_outputs: Tensor) -> Agreement:
    """Compare images with those of a network, pair by pair.

    Args:
        outputs: (B, *shape), y.
        network_outputs: (B, *shape), w.

    Returns:
        The measures, (B,). A network's image of one single value has no variance to explain: all but its MSE are NaN
        or −∞. If only y has one value, the correlations are NaN.
    """
    y, w = outputs.double().flatten(1), network_outputs.double().flatten(1)
    residual = (y - w).square().sum(1)
    y, w = (v - v.mean(1, keepdim=True) for v in (y, w))
    pearson_r = (y * w).sum(1) / (y.norm(dim=1) * w.norm(dim=1))
    return Agreement(residual / w.shape[1], 1 - residual / w.square().sum(1), pearson_r, pearson_r.square())


def quartiles(values: Tensor) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile of values (B,)."""
    low, median, high = torch.quantile(values.double(), torch.tensor([0.25, 0.5, 0.75]).double().to(values.device))
    return low.item(), median.item(), high.item()
