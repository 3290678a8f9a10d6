"""Profiles of power-function averages, and the weighted sum of them nearest to another profile (arXiv 2312.02696)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# A singular value below this share of the largest one is taken for a rounding error of the inner products.
CUTOFF = 1e-13


class Profile(NamedTuple):
    """The profile of an average, p(t) = (γ+1)·t^γ / T^(γ+1) for 0 < t <= T, Eq. 121 of arXiv 2312.02696."""

    gamma: float  # γ, at least 0
    end: float  # T, the number of images seen at which the average was taken


class Fit(NamedTuple):
    """The weights of stored averages whose sum is nearest to a wanted average, and the error of that sum."""

    weights: np.ndarray  # (n,), float64; they sum to 1
    # L2 norm of the error of the summed profile, as a share of the norm of the wanted one. Below 1e-7 it is rounding.
    residual: float


def inner_product(a: Profile, b: Profile) -> float:
    """Return ∫ p_a(t) p_b(t) dt, Eq. 151 of arXiv 2312.02696."""
    early, late = sorted((a, b), key=lambda profile: profile.end)
    factor = (a.gamma + 1) * (b.gamma + 1) / (a.gamma + b.gamma + 1)
    return factor * (early.end / late.end) ** late.gamma / late.end


def fit(stored: Sequence[Profile], wanted: Profile) -> Fit:
    """Return the weights for which the weighted sum of the stored profiles is nearest to the wanted one in L2.

    The weights must sum to 1. The authors of arXiv 2312.02696 solve without this condition, and their program divides
    the solution by its sum.

    Args:
        stored: the profiles of the n stored averages.
        wanted: the profile of the wanted average.
    """
    n = len(stored)
    products = np.array([[inner_product(a, b) for b in stored] for a in stored])
    with_wanted = np.array([inner_product(a, wanted) for a in stored])
    norm = inner_product(wanted, wanted)

    # Weights that sum to 1 are those of the last profile alone, plus a combination of the differences e_i − e_n, which
    # sum to 0. So the least squares over these n − 1 differences have no condition.
    differences = np.eye(n)[:-1] - np.eye(n)[-1]
    gram = differences @ products @ differences.T
    sides = differences @ (with_wanted - products[-1])

    # Scaled so that the diagonal of the matrix is 1: the cutoff then treats long and short averages alike.
    scale = np.sqrt(np.clip(np.diag(gram), np.finfo(np.float64).tiny, None))
    scaled = np.linalg.lstsq(gram / np.outer(scale, scale), sides / scale, rcond=CUTOFF)[0]
    weights = np.eye(n)[-1] + differences.T @ (scaled / scale)

    squared = norm - 2 * weights @ with_wanted + weights @ products @ weights
    return Fit(weights, float(np.sqrt(max(squared, 0.0) / norm)))
