"""What a probe concludes for a training, in sentences; docs/probe.md says how."""

import math

import numpy as np

from lit_knn.metrics.probe_advice import advice_to_take, removal_sentence
from lit_knn.metrics.probe_findings import Findings, findings_of
from lit_knn.metrics.probe_shares import LITTLE, Table, Training, cheapest

# A smaller share of noise levels would be written as 0.0 %.
LEAST_OUTSIDE = 0.0005

FREE = "OneSample"


def conclude(t: np.ndarray, table: Table, training: Training) -> tuple[list[str], str | None]:
    """Conclude from a probe what better targets would bring to a training.

    Args:
        t: (levels,), ascending noise levels.
        table: result of `lit_knn.metrics.probe.measure_levels` at these levels.
        training: the training.

    Returns:
        The sentences; and the name of the cheapest estimator that leaves less than 1 % of one
        sample's noise, or None if that cannot be told.
    """
    findings = findings_of(t, table, training)
    estimator, advice = choose_estimator(findings, training)

    sentences = [collapse_sentence(findings, training), tenth_sentence(findings)]
    sentences += sentences_on_stf(findings, training)
    sentences.append(mean_image_sentence(findings))
    sentences += sentences_on_outside(findings, training)
    for name, remainder in findings.remainders.items():
        sentences.append(removal_sentence(name, remainder, training))
    sentences.append(advice)
    return sentences, estimator


def choose_estimator(findings: Findings, training: Training) -> tuple[str | None, str]:
    """Return the estimator to train with, or None if that cannot be told; and the reason."""
    if findings.levels_above_collapse < LITTLE:
        reason = (
            f"Nothing to gain: fewer than 1 % of the noise levels of {training.name} are above the "
            f"collapse, so {FREE}, which costs nothing, is enough."
        )
        return FREE, reason

    if findings.collapse == math.inf:
        reason = (
            f"{findings.levels_above_collapse:.1%} of the noise levels of {training.name} are above "
            "those measured, where the posteriors may spread: repeat with a higher --t_max."
        )
        return None, reason

    best = cheapest(findings.remainders)
    return best, advice_to_take(best, findings.remainders, training)


# Sentences on noise levels


def collapse_sentence(findings: Findings, training: Training) -> str:
    """Say up to which noise level posteriors are one image, and what the training has above."""
    if findings.collapse == 0:
        return (
            f"Nothing collapses: at noise level {findings.lowest:.3g}, the lowest measured, "
            f"{findings.collapsed_at_lowest:.1%} of the posteriors are one image, fewer than 99 %. "
            "So the estimators differ at all levels."
        )
    if findings.collapse == math.inf:
        return (
            f"Everything collapses: up to noise level {findings.highest:.3g}, the highest measured, "
            "at least 99 % of the posteriors are one image. So all estimators agree."
        )
    return (
        f"Collapse: up to noise level {findings.collapse:.3g} at least 99 % of the posteriors are "
        "one image, so all estimators agree. "
        f"{findings.levels_above_collapse:.1%} of the noise levels of {training.name} are above it."
    )


def tenth_sentence(findings: Findings) -> str:
    """Say where a tenth of the images would collapse."""
    collapse = findings.collapse_of_tenth
    if collapse == 0:
        return "With a tenth of the images nothing collapses."
    if collapse == math.inf:
        return "With a tenth of the images everything collapses."
    return f"With a tenth of the images the collapse is at level {collapse:.3g}."


def sentences_on_stf(findings: Findings, training: Training) -> list[str]:
    """Say between which noise levels targets better than STF's pay.

    The list is empty where all posteriors are one image, and where STF's share cannot be told.
    """
    collapse, end = findings.collapse, findings.stf_suffices_above
    if end is None or collapse == math.inf:
        return []
    if end <= collapse:
        return ["STF leaves less than 1 % of the noise of one sample wherever there is noise."]

    begin = f"level {collapse:.3g}"
    if collapse == 0:
        begin = f"level {findings.lowest:.3g}, the lowest measured,"
    if end == math.inf:
        highest = f"level {findings.highest:.3g}, the highest measured"
        return [f"Targets better than STF's pay from {begin} to {highest}."]

    sentence = (
        f"Targets better than STF's pay from {begin} to level {end:.3g}; above it STF leaves less "
        "than 1 % of the noise of one sample."
    )
    if not math.isnan(findings.noise_between):
        inside = f"{findings.noise_between:.1%} of the target noise of {training.name}"
        sentence += f" {inside} is between these levels."
    return [sentence]


def mean_image_sentence(findings: Findings) -> str:
    """Say from which noise level on the posterior's mean is the mean image."""
    level = findings.mean_image_above
    if level == 0:
        return "At all noise levels measured the best denoiser is the mean image."
    if level == math.inf:
        highest = f"level {findings.highest:.3g}, the highest measured"
        return f"Up to {highest}, the best denoiser is not yet the mean image."
    return f"Above level {level:.3g} the best denoiser is the mean image."


def sentences_on_outside(findings: Findings, training: Training) -> list[str]:
    """Say how many noise levels of the training were not measured, unless that rounds to 0.0 %."""
    if findings.levels_outside < LEAST_OUTSIDE:
        return []
    return [
        f"{findings.levels_outside:.1%} of the noise levels of {training.name} are outside those "
        "measured, and count as the nearest one."
    ]
