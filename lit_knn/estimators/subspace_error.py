"""Estimates the error of a mean of `SubspaceKNN`, for its certificate."""

import torch
from torch import Tensor

from lit_knn.estimators.subspace_draws import SubspaceDraws
from lit_knn.index.pca import Projection
from lit_knn.reference.gathered import Images


def corrected_sq_error(
    projection: Projection,
    draws: SubspaceDraws,
    images: Images,
    weights: Tensor,
    mean: Tensor,
    excess: Tensor,
) -> Tensor:
    """Estimate the squared error per dimension of a corrected mean, from the spread of the draws' contributions.

    Each of s draws, which together weigh π, contributes c = w(x − μ̂) − π/s·P(y − E_q[y]). If the draws were
    independent, their sum would have the variance s/(s − 1)·Σ|c − c̄|²; draws without repetition vary less. For
    s = 1 the estimate is |c|².

    Args:
        projection: components and coordinates of all images.
        draws: of b rows.
        images: the images of the draws.
        weights: (b, n), which sum to 1.
        mean: (b, *shape), the corrected mean.
        excess: (b, *shape), what was subtracted from the mean.

    Returns:
        (b,), float64.
    """
    num_drawn = draws.sampled.sum(1)
    weights = torch.where(draws.sampled, weights, 0.0)
    share = weights.sum(1, keepdim=True) / num_drawn.clamp(min=1).unsqueeze(1)

    y = projection.coordinates[draws.ids].float()
    from_mean = y - projection.components.project(mean).unsqueeze(1)
    from_rest = y - draws.rest_mean.unsqueeze(1)
    from_rest = torch.where(draws.sampled.unsqueeze(2), from_rest, 0.0)

    # |c|² is the sum of three terms. P has orthonormal columns, so the product of x − μ̂ with P·v is that of P'(x − μ̂)
    # with v.
    of_images = weights.square() * images.sq_dist(mean)
    of_both = 2 * weights * share * (from_mean * from_rest).sum(2)
    of_rest = share.square() * from_rest.square().sum(2)
    squares = (of_images - of_both + of_rest).sum(1)

    # Σc over the draws is not 0, because it balances the kept images, which do not vary. The error is the spread of
    # c around its mean, so |Σc|²/s is subtracted.
    total = (images.deviation(weights, mean) - excess).flatten(1)
    centred = squares - total.double().square().sum(1) / num_drawn.clamp(min=1)
    spread = centred * num_drawn / (num_drawn - 1).clamp(min=1)

    # Rounding may make the expanded sum negative.
    variance = torch.where(num_drawn > 1, spread, squares).clamp(min=0)
    return variance / mean.shape[1:].numel()
