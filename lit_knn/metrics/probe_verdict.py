"""What a probe concludes for a training, in sentences; docs/probe.md says how."""

import math

import numpy as np

from lit_knn.metrics.probe_advice import advice_to_take, removal_sentence
from lit_knn.metrics.probe_shares import (
    LITTLE,
    Table,
    Training,
    cheapest,
    last_level,
    level_weights,
    mean_of,
    remainders_of,
    share_left,
)

# From this share of collapsed posteriors on, a noise level counts as collapsed.
MOSTLY = 0.99
# A smaller share of noise levels would be written as 0.0 %.
LEAST_OUTSIDE = 0.0005

FREE = "OneSample"


def conclude(
    t: np.ndarray,
    table: Table,
    training: Training,
) -> tuple[list[str], str | None]:
    """Conclude from a probe what better targets would bring to a training.

    Between the levels t values are interpolated in ln t. Outside they are those of the ends.

    Args:
        t: (levels,), ascending noise levels.
        table: result of `lit_knn.metrics.probe.measure` at these levels.
        training: the training.

    Returns:
        The sentences; and the name of the cheapest estimator that leaves less than 1 % of one
        sample's noise, or None if that cannot be told.
    """
    collapsed = mean_of(table["collapsed"])
    collapse = last_level(t, collapsed, MOSTLY)
    in_training = level_weights(t, training.sigma)
    remainders = remainders_of(table, training, in_training)

    above = np.mean(training.sigma > min(collapse, t[-1]))
    if above < LITTLE:
        best: str | None = FREE
        advice = (
            f"Nothing to gain: fewer than 1 % of the noise levels of {training.name} are above the "
            f"collapse, so {FREE}, which costs nothing, is enough."
        )
    elif collapse == math.inf:
        best = None
        advice = (
            f"{above:.1%} of the noise levels of {training.name} are above those measured, where "
            "the posteriors may spread: repeat with a higher --t_max."
        )
    else:
        best = cheapest(remainders)
        advice = advice_to_take(best, remainders, training)

    collapse_of_tenth = last_level(t, mean_of(table["collapsed_tenth"]), MOSTLY)
    sentences = [
        collapse_sentence(t, collapse, collapsed, training),
        tenth_sentence(t, collapse_of_tenth),
    ]
    sentences += paying_sentences(t, table, collapse, training, in_training)
    sentences.append(mean_image_sentence(t, table))
    sentences += outside_sentences(t, training)
    sentences += [removal_sentence(name, remainders[name], training) for name in remainders]
    return [*sentences, advice], best


# Sentences on noise levels


def collapse_sentence(
    t: np.ndarray,
    collapse: float,
    collapsed: np.ndarray,
    training: Training,
) -> str:
    """Say up to which noise level posteriors are one image, and what the training has above."""
    if collapse == 0:
        return (
            f"No collapse: at noise level {t[0]:.3g}, the lowest, {collapsed[0]:.0%} of the "
            "posteriors are one image, and the estimators differ at all levels."
        )
    if collapse == math.inf:
        return (
            f"Collapse everywhere: up to noise level {t[-1]:.3g}, the highest, at least 99 % of "
            "the posteriors are one image, so all estimators agree."
        )
    above = np.mean(training.sigma > collapse)
    return (
        f"Collapse: up to noise level {collapse:.3g} at least 99 % of the posteriors are one "
        "image, so all estimators agree. "
        f"{above:.1%} of the noise levels of {training.name} are above it."
    )


def tenth_sentence(t: np.ndarray, collapse: float) -> str:
    """Say where a tenth of the images would collapse."""
    if collapse == 0:
        return "With a tenth of the images there is no collapse."
    if collapse == math.inf:
        return f"With a tenth of the images the collapse is above level {t[-1]:.3g}, the highest."
    return f"With a tenth of the images the collapse is at level {collapse:.3g}."


def paying_sentences(
    t: np.ndarray,
    table: Table,
    collapse: float,
    training: Training,
    in_training: np.ndarray,
) -> list[str]:
    """Say between which noise levels targets better than STF's pay.

    Levels at which too few latents carry the noise say nothing about STF.
    """
    shares = []
    for errors, irreducible in zip(table["STF"], table["irreducible"], strict=True):
        shares.append(share_left("STF", errors, irreducible).mean)
    curve = np.array(shares)
    known = ~np.isnan(curve)
    if not known.any():
        return []

    high = last_level(t[known], curve[known], LITTLE)
    if high <= collapse:
        return ["STF leaves less than 1 % of the noise of one sample wherever there is noise."]

    low = f"from level {collapse:.3g}" if collapse > 0 else f"from level {t[0]:.3g}, the lowest,"
    if high == math.inf:
        return [f"Targets better than STF's pay {low} to {t[-1]:.3g}, the highest level."]

    noise = training.weight * (in_training @ mean_of(table["irreducible"]))
    between = (training.sigma > collapse) & (training.sigma < high)
    sentence = (
        f"Targets better than STF's pay {low} to level {high:.3g}; above it STF leaves less than "
        "1 % of the noise of one sample."
    )
    if noise.sum() > 0:
        inside = noise[between].sum() / noise.sum()
        sentence += f" {inside:.1%} of the target noise of {training.name} is between these levels."
    return [sentence]


def mean_image_sentence(t: np.ndarray, table: Table) -> str:
    """Say from which noise level on the posterior's mean is the mean image."""
    explained = 1 - mean_of(table["irreducible"]) / mean_of(table["variance"])
    flat = last_level(t, explained, LITTLE)
    if flat == 0:
        return "At all noise levels the best denoiser is the mean image."
    if flat == math.inf:
        return f"Up to level {t[-1]:.3g}, the highest, the best denoiser is not yet the mean image."
    return f"Above level {flat:.3g} the best denoiser is the mean image."


def outside_sentences(t: np.ndarray, training: Training) -> list[str]:
    """Say how many noise levels of the training were not measured, unless that rounds to 0.0 %."""
    outside = np.mean((training.sigma < t[0]) | (training.sigma > t[-1]))
    if outside < LEAST_OUTSIDE:
        return []
    return [
        f"{outside:.1%} of the noise levels of {training.name} are outside those measured, and "
        "count as the nearest one."
    ]
