"""The exact mean at high noise: one pass over the images, in float32."""

import torch
from torch import Tensor

from lit_knn.estimators.centred import TOLERANCE, CentredImages, Latents, inverse, rounding_of
from lit_knn.estimators.weighted_sum import WeightedSum
from lit_knn.index.precision import add_product

# Weights between e^−40 and e^40, and their sums, are ordinary numbers of float32.
MOST_LOG = 40.0


def sums_in_one_pass(images: CentredImages, latents: Latents) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sums of latents at high noise in float32. The images are converted only once.

    Returns the mean (b, d), the log normaliser (b,), and whether both are precise, (b,) bool.
    """
    weighted = WeightedSum(images, len(latents.noise))
    factor = inverse(latents.noise)
    largest = torch.zeros_like(factor)

    # The pieces are not centred: u·c = u·y − shift · Σu.
    shifts = -images.shift * latents.u.sum(1, keepdim=True)
    for rows, y in images.pieces(centred=False):
        scores = shifts - images.half_sq_norms[rows]
        add_product(scores, latents.u, y.T)

        # The image c = 0 has weight 1, and at high noise the others have weights not far from it.
        weights = scores.view(len(factor), -1).mul_(factor).exp_()
        largest = torch.maximum(largest, weights.amax(1, keepdim=True))
        weighted.add(weights.view(len(latents.u), -1), y)
    total, sums = weighted.result()

    # float32 has also rounded the sums that contain the shift.
    best = largest.log().abs() * latents.noise + shifts.abs().view(len(factor), -1)[:, :1]
    precise = rounding_of(images, latents, best) * largest / total <= TOLERANCE
    # Further from 1, weights of float32 overflow or vanish.
    precise &= largest.log().abs() < MOST_LOG

    log_normaliser = total.log() - latents.half_sq_norm / latents.noise
    return sums / total, log_normaliser.squeeze(1), precise.squeeze(1)
