"""Decides whether float32 is precise enough for the products of estimators that use patches or masks of pixels."""

import math

import torch
from torch import Tensor

from lit_knn.reference import ReferenceSet

# Maximum rounding error of a log weight in float32. If more is possible, the products are in float64.
MOST_ROUNDING = 1e-4
# Smallest log weight relative to the largest. Where exp or a product underflows, a CPU is 10 to 30 times slower.
LEAST_LOG_WEIGHT = -80.0


def product_dtype(reference: ReferenceSet, z: Tensor, t: Tensor | float, terms: int) -> torch.dtype:
    """Return float32 if it is precise enough for products of latents z (B, *) and images, otherwise float64.

    A log weight is (Σ z_q·x_q − Σ x_q²/2)/t². Σ|z_q·x_q| over the terms is at most max|x|·Σ|z_q|, and Σ|z_q| is at most
    the smaller of terms·max|z| and √terms·‖z‖ (Cauchy). An addition rounds by at most eps/2 of its partial sum, and
    errors of both signs cancel. On CIFAR-10 the largest error of a log weight was 0.2 to 0.9 times eps/2·`size` with
    pairwise sums of pixel rows (`sliding_sums`), and up to 2 times with one product.

    Args:
        reference: the set of the images.
        z: (B, *), noisy latents.
        t: the lowest noise level.
        terms: number of pixels in a sum.
    """
    flat = z.flatten(1).double()
    values = flat.abs().max(), torch.linalg.vector_norm(flat, dim=1).max(), flat.new_ones(())
    # These are the only values that are read from a GPU. Two divisions by t, because t² might overflow or vanish.
    largest, norm, precision = (torch.stack(values) / t / t).tolist()
    latents = min(terms * largest, math.sqrt(terms) * norm)
    size = reference.largest * (latents + terms * reference.largest * precision)
    rounding = torch.finfo(torch.float32).eps / 2 * size
    return torch.float32 if rounding <= MOST_ROUNDING else torch.float64
