"""The weighted mean of self-normalised importance sampling, Eq. 11 (eq:SNIS_estimator)."""

import torch
from torch import Tensor

# Number of draws per float32 product. A product may add its terms one by one, so its error grows with this number.
DRAWS_PER_SUM = 256


def weighted_mean(weights: Tensor, x: Tensor) -> Tensor:
    """Σ_i w_i x_i (Eq. 11), (B, *shape) float64, for weights that sum to 1, computed as x_c + Σ_i w_i (x_i − x_c).

    x_c is the image with the largest weight. Rounding errors then scale with the spread of the images, not with their
    size: the mean of copies of one image is that image, to the last bit. Only the last sum is in float64, because
    float32 would lose small deviations from x_c.

    Args:
        weights: (B, n), rows sum to 1.
        x: (B, n, *shape), finite.
    """
    centre = x[torch.arange(len(x), device=x.device), weights.argmax(1)]
    return centre.double() + weighted_deviation(weights, x, centre)


def weighted_deviation(weights: Tensor, x: Tensor, centre: Tensor) -> Tensor:
    """Σ_i w_i (x_i − c), (B, *shape) in the dtype of `x`; the weights (B, n) need not sum to 1.

    `x` is (B, n, *shape), and the centre c, (B, *shape), is near the images.
    """
    weights = weights.to(x.dtype).unsqueeze(1)
    deviation = (x - centre.to(x.dtype).unsqueeze(1)).flatten(2)
    blocks = zip(
        weights.split(DRAWS_PER_SUM, dim=2), deviation.split(DRAWS_PER_SUM, dim=1), strict=True
    )
    total = torch.stack([torch.bmm(*block) for block in blocks]).sum(0)
    return total.reshape(centre.shape)
