"""The weighted mean of self-normalised importance sampling, Eq. 11 (eq:SNIS_estimator)."""

import torch
from torch import Tensor

# Number of draws per float32 product. A product may add its terms one by one, so its error grows with this number.
DRAWS_PER_SUM = 256


def centred_sum(weights: Tensor, x: Tensor) -> Tensor:
    """Compute Σ_i w_i x_i (Eq. 11), (B, *shape) float64, as x_c + Σ_i w_i (x_i − x_c), for weights that sum to 1.

    x_c is the image with the largest weight. Rounding errors then scale with the spread of the images, not with their
    size: the mean of copies of one image is that image, to the last bit. Only the addition of x_c is in float64,
    because float32 would lose small deviations from x_c.

    Args:
        weights: (B, n), rows sum to 1.
        x: (B, n, *shape), finite.
    """
    centre = x[torch.arange(len(x), device=x.device), weights.argmax(1)]
    return centre.double() + weighted_deviation(weights, x, centre)


def weighted_deviation(weights: Tensor, x: Tensor, centre: Tensor) -> Tensor:
    """Compute Σ_i w_i (x_i − c), (B, *shape) in the dtype of `x`.

    Args:
        weights: (B, n), which need not sum to 1.
        x: (B, n, *shape).
        centre: (B, *shape), c, near the images.
    """
    weights = weights.to(x.dtype).unsqueeze(1)
    deviation = (x - centre.to(x.dtype).unsqueeze(1)).flatten(2)
    sums = []
    # Without draws there is one empty product, whose sum is 0.
    for start in range(0, max(x.shape[1], 1), DRAWS_PER_SUM):
        draws = slice(start, start + DRAWS_PER_SUM)
        sums.append(torch.bmm(weights[:, :, draws], deviation[:, draws]))
    return torch.stack(sums).sum(0).reshape(centre.shape)
