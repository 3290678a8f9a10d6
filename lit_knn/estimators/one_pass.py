"""The exact mean at high noise: one pass over the images, in float32."""

import torch
from torch import Tensor

from lit_knn.estimators.centred import TOLERANCE, CentredImages, Latents, inverse, rounding_of
from lit_knn.estimators.weighted_sum import WeightedSum
from lit_knn.index.precision import add_product

# Weights between e^−40 and e^40, and sums of them, neither overflow nor vanish in float32.
MOST_LOG = 40.0


def sums_in_one_pass(images: CentredImages, latents: Latents) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the exact mean of latents at high noise in float32, in one pass over the images.

    Returns the mean (b, d), the log normaliser (b,), and whether both are precise enough, (b,) bool.
    """
    weighted = WeightedSum(images, len(latents.noise))
    factor = inverse(latents.noise)
    largest = torch.zeros_like(factor)

    # The pieces are not centred: u·c = u·y − shift · Σu.
    shifts = -images.shift * latents.u.sum(1, keepdim=True)
    for rows, y in images.pieces(centred=False):
        scores = shifts - images.half_sq_norms[rows]
        add_product(scores, latents.u, y.T)

        # No maximum is subtracted before `exp`: an image at the centre, c = 0, has weight 1, and at high noise the
        # others have weights near 1.
        weights = scores.view(len(factor), -1).mul_(factor).exp_()
        largest = torch.maximum(largest, weights.amax(1, keepdim=True))
        weighted.add(weights.view(len(latents.u), -1), y)
    total, sums = weighted.result()

    # The products with y, which contain the shift, were rounded, too. So its size is added to that of the best score.
    best = largest.log().abs() * latents.noise + shifts.abs().view(len(factor), -1)[:, :1]
    precise = rounding_of(images, latents, best) * largest / total <= TOLERANCE
    precise &= largest.log().abs() < MOST_LOG

    log_normaliser = total.log() - latents.half_sq_norm / latents.noise
    return sums / total, log_normaliser.squeeze(1), precise.squeeze(1)
