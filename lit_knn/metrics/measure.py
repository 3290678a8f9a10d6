"""Measurement of one estimator at one batch of latents: errors, weights, search and time."""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.estimators import KNN, DrawingEstimator, Estimator, MonteCarlo
from lit_knn.metrics.diagnostics import SearchDiagnostics, search_diagnostics
from lit_knn.metrics.estimator_error import ErrorTerms, error_terms
from lit_knn.reference import ReferenceSet

TIME = "ms_per_estimate"
# What `certified_mean` returns besides the mean.
CERTIFIED = ("effective_sample_size", "largest_weight", "certified_mse")

SourceOfRepeat = Callable[[int], Tensor | None]
"""(repeat) -> `x_source`, (B, *shape), or None for latents without a source."""


def fixed_source(x: Tensor) -> SourceOfRepeat:
    """Return a source that gives, in every repeat, the clean x that z was made from."""
    return lambda repeat: x


def posterior_source(
    reference: ReferenceSet, z: Tensor, t: float, repeats: int, key: tuple[int, ...]
) -> SourceOfRepeat:
    """Return a source that gives, in each repeat, another draw of x from its posterior p_t(x|z).

    Args:
        reference: the images.
        z: (B, *shape), noisy latents.
        t: their noise level.
        repeats: number of draws.
        key: seeds the draws.
    """
    generator = keyed_generator(z.device, *key, Stream.SOURCE)
    levels = torch.full((len(z),), t, dtype=torch.float64, device=z.device)
    ids = MonteCarlo(repeats).bind(reference).posterior_ids(z, levels, generator)
    return lambda repeat: reference.gather(ids[:, repeat])


def quantities(estimator: Estimator, repeats: int) -> tuple[str, ...]:
    """Return the names of the results of `measure_estimator` for an estimator."""
    # A single estimate tells nothing of the variance.
    names = [name for name in ErrorTerms._fields if repeats > 1 or name != "variance"]
    if isinstance(estimator, DrawingEstimator):
        names += CERTIFIED
        if isinstance(estimator, KNN):
            names += SearchDiagnostics._fields
    return (*names, TIME)


def measure_estimator(
    estimator: Estimator,
    repeats: int,
    z: Tensor,
    t: float,
    mu: Tensor,
    source: SourceOfRepeat,
    key: tuple[int, ...],
) -> dict[str, Tensor]:
    """Measure the `quantities` of an estimator at these latents, (B,) each.

    Args:
        estimator: see `repeated_errors`.
        repeats: see `repeated_errors`.
        z: (B, *shape), noisy latents.
        t: their noise level.
        mu: (B, *shape), float64, the exact mean.
        source: gives `x_source` in each repeat.
        key: seeds the estimator's draws.
    """
    values = repeated_errors(estimator, repeats, z, t, mu=mu, source=source, key=key)
    if isinstance(estimator, DrawingEstimator):
        generator = keyed_generator(z.device, *key, 0, Stream.ESTIMATOR)
        certificate = estimator.certified_mean(z, t, source(0), generator)
        # The first item is the mean itself.
        values |= dict(zip(CERTIFIED, certificate[1:], strict=True))
        if isinstance(estimator, KNN):
            values |= search_diagnostics(estimator, z, t, mu)._asdict()
    return values


def repeated_errors(
    estimator: Estimator,
    repeats: int,
    z: Tensor,
    t: float | Tensor,
    mu: Tensor,
    source: SourceOfRepeat,
    key: tuple[int, ...],
) -> dict[str, Tensor]:
    """Estimate the posterior mean several times, and compare with the exact one.

    Args:
        estimator: the estimator, bound if it needs a reference set.
        repeats: number of estimates; 1 for an estimator that is deterministic given its source.
        z: (B, *shape), noisy latents.
        t: their noise levels, (B,) or one for all.
        mu: (B, *shape), float64, the exact mean.
        source: gives `x_source` in each repeat.
        key: seeds the estimator's draws.

    Returns:
        (B,) each: the `ErrorTerms`, and the time of one estimate of one posterior mean, in milliseconds.
    """
    error_sum = torch.zeros_like(mu)
    sq_error_sum = torch.zeros(len(z), dtype=torch.float64, device=z.device)
    watch = Stopwatch(z.device)
    for repeat in range(repeats):
        generator = keyed_generator(z.device, *key, repeat, Stream.ESTIMATOR)
        x_source = source(repeat)
        with watch.running():
            estimate = estimator.posterior_mean(z, t, x_source, generator)
        error = estimate.double() - mu
        error_sum += error
        sq_error_sum += error.flatten(1).square().sum(1)
    milliseconds = 1000 * watch.read_and_reset() / (repeats * len(z))
    terms = error_terms(error_sum, sq_error_sum, repeats)
    return {**terms._asdict(), TIME: torch.full_like(sq_error_sum, milliseconds)}
