"""What a probe finds for a training: noise levels and shares, before they are put into words."""

import math
from dataclasses import dataclass

import numpy as np

from lit_knn.metrics.probe_shares import (
    LITTLE,
    Remainder,
    Table,
    Training,
    last_level,
    level_weights,
    mean_of,
    remainders_of,
    share_left,
)

# From this share of collapsed posteriors on, a noise level counts as collapsed.
MOSTLY = 0.99


@dataclass(frozen=True)
class Findings:
    """Holds what a probe finds for a training.

    A noise level at which something ends is 0 if it has ended at the lowest level measured already,
    and infinity if it does not end up to the highest one.

    Args:
        lowest: the lowest noise level measured.
        highest: the highest one.
        collapsed_at_lowest: share of the posteriors at the lowest level that are one image.
        collapse: the level up to which at least 99 % of the posteriors are one image.
        collapse_of_tenth: the same level for a tenth of the images.
        stf_suffices_above: the level from which on STF leaves less than 1 % of the noise of one
            sample; None if too few latents carry the noise at every level.
        mean_image_above: the level from which on the posterior's mean is the mean image.
        levels_above_collapse: share of the training's noise levels that are above the collapse.
        levels_outside: share of the training's noise levels that were not measured.
        noise_between: share of the training's target noise that is above `collapse` and below
            `stf_suffices_above`; NaN if there is no noise.
        remainders: what each estimator leaves of the noise of one sample, by name.
    """

    lowest: float
    highest: float
    collapsed_at_lowest: float
    collapse: float
    collapse_of_tenth: float
    stf_suffices_above: float | None
    mean_image_above: float
    levels_above_collapse: float
    levels_outside: float
    noise_between: float
    remainders: dict[str, Remainder]


def findings_of(t: np.ndarray, table: Table, training: Training) -> Findings:
    """Compute what a probe finds for a training.

    Between the levels t values are interpolated in ln t. Outside they are those of the ends.

    Args:
        t: (levels,), ascending noise levels.
        table: result of `lit_knn.metrics.probe.measure_levels` at these levels.
        training: the training.
    """
    collapsed = mean_of(table["collapsed"])
    collapse = last_level(t, collapsed, MOSTLY)
    stf_suffices = level_above_which_stf_suffices(t, table)

    sigma = training.sigma
    in_training = level_weights(t, sigma)
    noise = training.weight * (in_training @ mean_of(table["irreducible"]))
    noise_between = math.nan
    if noise.sum() > 0:
        is_between = (sigma > collapse) & (sigma < (stf_suffices or 0.0))
        noise_between = float(noise[is_between].sum() / noise.sum())

    is_outside = (sigma < t[0]) | (sigma > t[-1])
    return Findings(
        lowest=float(t[0]),
        highest=float(t[-1]),
        collapsed_at_lowest=float(collapsed[0]),
        collapse=collapse,
        collapse_of_tenth=last_level(t, mean_of(table["collapsed_tenth"]), MOSTLY),
        stf_suffices_above=stf_suffices,
        mean_image_above=level_above_which_the_mean_is_flat(t, table),
        levels_above_collapse=float(np.mean(sigma > min(collapse, t[-1]))),
        levels_outside=float(np.mean(is_outside)),
        noise_between=noise_between,
        remainders=remainders_of(table, training, in_training),
    )


def level_above_which_stf_suffices(t: np.ndarray, table: Table) -> float | None:
    """Return the level from which on STF leaves less than 1 % of the noise of one sample, or None.

    Levels at which too few latents carry the noise say nothing about STF.
    """
    shares = []
    for errors, irreducible in zip(table["STF"], table["irreducible"], strict=True):
        shares.append(share_left("STF", errors, irreducible).mean)

    curve = np.array(shares)
    is_known = ~np.isnan(curve)
    if not is_known.any():
        return None
    return last_level(t[is_known], curve[is_known], LITTLE)


def level_above_which_the_mean_is_flat(t: np.ndarray, table: Table) -> float:
    """Return the level from which on the posterior's mean explains less than 1 % of the variance."""
    explained = 1 - mean_of(table["irreducible"]) / mean_of(table["variance"])
    return last_level(t, explained, LITTLE)
