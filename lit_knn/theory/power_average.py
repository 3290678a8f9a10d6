"""Power-function averages of weights, and the fit of one such average by others (arXiv 2312.02696, EDM2).

An average over the training time (0, T] weights the weights θ(t) by the profile p(t) = (γ+1)·t^γ / T^(γ+1). It is named
by its relative length σ_rel, the standard deviation of its profile divided by T. Times have any unit; here they are
images seen. All numbers are float64.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lit_knn.errors import InputError

# σ_rel of γ = 0, the plain mean of all weights. Longer averages would prefer the weights of the beginning.
LONGEST = 12**-0.5
# Singular values below this share of the largest are rounding errors of the inner products.
CUTOFF = 1e-13


class Profile(NamedTuple):
    """The profile of an average.

    Attributes:
        gamma: γ, at least 0.
        end: T, the time at which the average was taken.
    """

    gamma: float
    end: float


class Fit(NamedTuple):
    """The weights that combine averages into another one.

    Attributes:
        weights: (n,), their sum is 1.
        residual: L2 norm of the profile's error, as a share of the L2 norm of the profile. Values below 1e-7 are
            rounding errors.
    """

    weights: np.ndarray
    residual: float


def relative_length(gamma: float) -> float:
    """Return σ_rel = (γ+1)^(1/2) (γ+2)^(−1) (γ+3)^(−1/2), Eq. 123 of arXiv 2312.02696."""
    return float((gamma + 1) ** 0.5 / (gamma + 2) / (gamma + 3) ** 0.5)


def exponent(length: float) -> float:
    """Return the γ of a relative length: the solution of Eq. 123 of arXiv 2312.02696, by bisection.

    Raises:
        InputError: the length is not above 0 and at most 12^(−1/2), that of γ = 0.
    """
    if not 0 < length <= LONGEST:
        raise InputError(f"a relative length must be above 0 and at most {LONGEST:.4f}, the plain mean; got {length}")
    # `relative_length` falls with γ ≥ 0, and is below 1/γ.
    low, high = 0.0, 1 / length
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if relative_length(middle) > length else (low, middle)
    return low


def profile(t: np.ndarray, of: Profile) -> np.ndarray:
    """Return p(t), Eq. 121 of arXiv 2312.02696; 0 after the end."""
    t = np.asarray(t, np.float64)
    return np.where(t <= of.end, (of.gamma + 1) / of.end * (t / of.end) ** of.gamma, 0.0)


def decay(gamma: float, before: float, now: float) -> float:
    """Return β = (before/now)^(γ+1), the weight of the old average in the update at time `now`, Eq. 127 of 2312.02696.

    The updates at t_1 < t_2 < … < T give θ(t_i) exactly the share of the profile between t_{i−1} and t_i, t_0 = 0.

    Args:
        gamma: γ.
        before: time of the update before, 0 for the first one.
        now: time of this update.
    """
    return float((before / now) ** (gamma + 1))


def inner_product(a: Profile, b: Profile) -> float:
    """Return ∫ p_a(t) p_b(t) dt, Eq. 151 of arXiv 2312.02696."""
    early, late = (a, b) if a.end <= b.end else (b, a)
    factor = (a.gamma + 1) * (b.gamma + 1) / (a.gamma + b.gamma + 1)
    return factor * (early.end / late.end) ** late.gamma / late.end


def fit(stored: Sequence[Profile], wanted: Profile) -> Fit:
    """Return the weights of the stored averages whose sum of profiles is nearest to the wanted one in L2.

    The weights sum to 1, so constant weights of a network stay what they are. This is a condition of the fit. The
    authors of arXiv 2312.02696 solve without it, and their program then divides the solution by its sum.

    Args:
        stored: n profiles, at least one.
        wanted: the profile to fit.
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
