"""The error of an estimator as a share of the error of `OneSample`: at one noise level, and over a training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_knn.metrics.estimator_error import MeanAndError, share_and_error
from lit_knn.metrics.probe import TARGETS

# If fewer latents than this carry a sum, it says little, and its standard error is wrong. In simulations, intervals of
# 95 % then held the truth in 10 to 80 % of the probes, and with more latents in about 90 %.
FEWEST_LATENTS = 20

# STF is the mean of the source given the drawn images, so its error is at most that of the source
# (Rao-Blackwell).
NEVER_WORSE_THAN_ONE_SAMPLE = ("STF",)

# An estimator that leaves less than this share of one sample's noise leaves little.
LITTLE = 0.01


def carrying_latents(values: Tensor) -> float:
    """Return how many latents carry a sum: (Σv)²/Σv², which is B if all values are equal.

    Args:
        values: (B,), one for each latent, at least 0.

    Returns:
        From 1 to B; 0 if all values are 0.
    """
    sum_of_squares = values.square().sum().item()
    if sum_of_squares == 0:
        return 0.0
    return values.sum().item() ** 2 / sum_of_squares


def share_left(name: str, errors: Tensor, irreducible: Tensor) -> MeanAndError:
    """Return the share of one sample's noise that an estimator leaves, with its standard error.

    Args:
        name: the estimator's name.
        errors: (B,), the estimator's squared error at each latent.
        irreducible: (B,), the posterior's variance, which is the squared error of one sample.

    Returns:
        Both NaN if fewer than 20 latents carry the noise of one sample. The standard error is NaN
        if fewer than 20 carry the estimator's error.
    """
    if carrying_latents(irreducible) < FEWEST_LATENTS:
        return MeanAndError(math.nan, math.nan)

    share, standard_error = share_and_error(errors, irreducible)
    if name in NEVER_WORSE_THAN_ONE_SAMPLE:
        share = min(share, 1.0)
    if 0 < carrying_latents(errors) < FEWEST_LATENTS:
        standard_error = math.nan
    return MeanAndError(share, standard_error)


Table = Mapping[str, Tensor]  # the columns of a probe, (levels, latents) each


@dataclass(frozen=True)
class Training:
    """What a probe needs to know of a training.

    Args:
        name: what the sentences call it.
        sigma: (draws,), draws from its noise levels.
        weight: (draws,), weight of the target's squared error in the loss at these noise levels.
        pass_ms: milliseconds that one image takes forward and backward through the network; None
            without a network.
    """

    name: str
    sigma: np.ndarray
    weight: np.ndarray
    pass_ms: float | None


@dataclass(frozen=True)
class Remainder:
    """What an estimator leaves of one sample's noise in a training, and what an estimate costs.

    Args:
        share: NaN if too few latents carry the noise.
        standard_error: NaN if too few latents carry the share.
        ms: milliseconds of one estimate, a mean over the noise levels of the training.
    """

    share: float
    standard_error: float
    ms: float


def mean_of(values: Tensor) -> np.ndarray:
    """Average over the latents: (levels, latents) to (levels,)."""
    return values.mean(1).numpy()


def last_level(t: np.ndarray, curve: np.ndarray, least: float) -> float:
    """Return the highest noise level at which a curve over t is at least `least`.

    Args:
        t: (levels,), ascending noise levels.
        curve: (levels,).
        least: the value that the curve falls below.

    Returns:
        The level where the curve falls below `least` for the last time; 0 if it never reaches
        `least`, and infinity if it does at the last level.
    """
    reached = np.flatnonzero(curve >= least)
    if len(reached) == 0:
        return 0.0

    last = reached[-1]
    if last == len(t) - 1:
        return math.inf

    fraction = (curve[last] - least) / (curve[last] - curve[last + 1])
    return float(t[last] * (t[last + 1] / t[last]) ** fraction)


def level_weights(t: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Return the weights that interpolate from the levels t to the levels sigma in ln t.

    Below and above all t, the value at the nearest of them is taken.

    Args:
        t: (levels,), ascending.
        sigma: (draws,).

    Returns:
        (draws, levels).
    """
    # Interpolating a unit vector gives the weights of one level.
    columns = [np.interp(np.log(sigma), np.log(t), unit) for unit in np.eye(len(t))]
    return np.stack(columns, axis=1)


def remainders_of(
    table: Table,
    training: Training,
    in_training: np.ndarray,
) -> dict[str, Remainder]:
    """Return what each estimator leaves in a training: weighted sums over its noise levels.

    Args:
        table: result of `lit_knn.metrics.probe.measure_levels`.
        training: the training.
        in_training: (draws, levels), see `level_weights`.
    """
    weight = training.weight / training.weight.sum()
    in_loss = torch.from_numpy(weight @ in_training)
    irreducible = in_loss @ table["irreducible"]

    remainders = {}
    for name in TARGETS:
        left = share_left(name, in_loss @ table[name], irreducible)
        ms = in_training.mean(0) @ mean_of(table[f"{name}_ms"])
        remainders[name] = Remainder(left.mean, left.standard_error, float(ms))
    return remainders


def cheapest(remainders: Mapping[str, Remainder]) -> str | None:
    """Return the fastest estimator that leaves less than 1 % of one sample's noise, or None."""
    candidates = [name for name, each in remainders.items() if each.share < LITTLE]
    return min(candidates, key=lambda name: remainders[name].ms, default=None)
