"""Profiles of power-function averages, and the sum of profiles that is nearest to another (arXiv 2312.02696)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Singular values below this share of the largest are rounding errors of the inner products.
CUTOFF = 1e-13


class Profile(NamedTuple):
    """The profile of an average, p(t) = (γ+1)·t^γ / T^(γ+1) for 0 < t <= T, Eq. 121 of arXiv 2312.02696."""

    gamma: float  # γ, at least 0
    end: float  # T, the number of images seen at which the average was taken


class Fit(NamedTuple):
    """The weights that combine averages into another one."""

    weights: np.ndarray  # (n,), float64, of sum 1
    # L2 norm of the profile's error as a share of that of the profile; below 1e-7 it is rounding
    residual: float


def inner_product(a: Profile, b: Profile) -> float:
    """Return ∫ p_a(t) p_b(t) dt, Eq. 151 of arXiv 2312.02696."""
    early, late = sorted((a, b), key=lambda profile: profile.end)
    factor = (a.gamma + 1) * (b.gamma + 1) / (a.gamma + b.gamma + 1)
    return factor * (early.end / late.end) ** late.gamma / late.end


def fit(stored: Sequence[Profile], wanted: Profile) -> Fit:
    """Return the weights, of sum 1, of the stored averages whose sum of profiles is nearest to the wanted one in L2.

    The authors of arXiv 2312.02696 solve without this condition, and their program divides the solution by its sum.
    """
    n = len(stored)
    products = np.array([[inner_product(a, b) for b in stored] for a in stored])
    with_wanted = np.array([inner_product(a, wanted) for a in stored])
    norm = inner_product(wanted, wanted)

    # Differences from the last profile have no mass. Any combination of them keeps the sum at 1.
    differences = np.eye(n)[:-1] - np.eye(n)[-1]
    gram = differences @ products @ differences.T
    sides = differences @ (with_wanted - products[-1])

    # The diagonal of the scaled matrix is 1, so the cutoff treats long and short averages alike.
    scale = np.sqrt(np.clip(np.diag(gram), np.finfo(np.float64).tiny, None))
    scaled = np.linalg.lstsq(gram / np.outer(scale, scale), sides / scale, rcond=CUTOFF)[0]
    weights = np.eye(n)[-1] + differences.T @ (scaled / scale)

    squared = norm - 2 * weights @ with_wanted + weights @ products @ weights
    return Fit(weights, float(np.sqrt(max(squared, 0.0) / norm)))
