"""The size of an estimator's patches at each noise level at which its mean is nearest to that of trained networks.

It is the size of least MSE of the posterior mean, averaged over networks and over latents z on their own sampling
trajectories. Kamb and Ganguli (arXiv 2412.20292, `scales_calibration.py`) take for each z the size whose score has the
largest cosine with the network's, and then the median over z.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.metrics.estimator_error import mean_and_error
from lit_knn.metrics.same_noise import MEASURES, Row, SameNoise, agreement, averaged, grouped
from lit_knn.sampling.samplers import heun_sampler, seeded_noise

# The seeds of calibration begin here: the latents of samples and of `SameNoise`, 0, 1, …, stay for evaluation.
FIRST_SEED = 10_000_000


class Visited(NamedTuple):
    """A noise level t of a network's sampling trajectories: where they are, and its means there, (n, *shape) both."""

    t: float
    z: Tensor
    mean: Tensor


def sized(estimator: Estimator, sizes: Sequence[int]) -> dict[int, Estimator]:
    """Make an estimator of each size; its other settings stay. It must have an argument `size`."""
    given = estimator.given()
    if "size" not in given:
        raise InputError(f"{type(estimator).__name__} has no argument size that could be calibrated")
    if not sizes or len(set(sizes)) < len(sizes):
        raise InputError(f"sizes must be different numbers, at least one, got {list(sizes)}")
    with prefixed("sizes"):
        return {size: type(estimator)(**{**given, "size": size}) for size in sizes}


@torch.no_grad()
def compare_sizes(
    made: Mapping[int, Estimator],
    networks: Mapping[str, Estimator],
    source: SameNoise,
    advance: Callable[[int], Any] = lambda estimates: None,
    finished: Callable[[str, int, float], Row | None] = lambda network, size, t: None,
) -> Iterator[Row]:
    """Compare the means of all sizes with each network's, on the network's trajectories.

    The bound estimators, by size, draw the same for all sizes and levels. The batch of `source` is the number of
    trajectories of each network. `advance` gets the number of estimates after each comparison; `finished` returns the
    row of a comparison that need not be made again, or None. A row has the mean of each measure of `Agreement`, with
    its standard error (`_se`).
    """
    for name, network in networks.items():
        for t, z, mean in trajectories(network, source):
            for size, estimator in made.items():
                row = finished(name, size, t)
                if row is None:
                    generator = keyed_generator(z.device, source.seed, Stream.CALIBRATION)
                    measured = agreement(estimator.posterior_mean(z, t, generator=generator), mean)._asdict()
                    row = {"network": name, "size": size, "t": t, "num_latents": len(z)}
                    row |= averaged({measure: mean_and_error(values) for measure, values in measured.items()})
                advance(len(z))
                yield row


@torch.no_grad()
def trajectories(network: Estimator, source: SameNoise) -> list[Visited]:
    """Sample one batch with a network; return where its trajectories were at each level of the sampler, descending."""
    found: dict[float, Visited] = {}

    def mean(z: Tensor, t: Tensor) -> Tensor:
        result = network.posterior_mean(z, t)
        # A level is visited by the predictor of the last step, and then by the trajectory itself, which replaces it.
        found[t[0].item()] = Visited(t[0].item(), z, result)
        return result

    seeds = range(FIRST_SEED, FIRST_SEED + source.batch_size)
    latents = seeded_noise(seeds, source.reference.shape, device=source.reference.device)
    heun_sampler(mean, latents, source.num_steps, source.grid, process=source.process)
    return list(found.values())


def best_sizes(rows: Sequence[Row]) -> dict[float, int]:
    """Return the size of least MSE, averaged over networks, for each noise level, from rows of `compare_sizes`."""
    by_level = grouped(calibration_curve(rows), "t")
    return {t: min(own, key=lambda row: row["mse"])["size"] for (t,), own in by_level.items()}


def calibration_curve(rows: Sequence[Row]) -> list[Row]:
    """Average the measures of rows of `compare_sizes` over networks: a row for each `t` and `size`."""
    return [
        {"t": t, "size": size, **{name: sum(row[name] for row in own) / len(own) for name in MEASURES}}
        for (t, size), own in grouped(rows, "t", "size").items()
    ]
