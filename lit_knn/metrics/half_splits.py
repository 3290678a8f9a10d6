"""Standard errors of metrics of a whole set of samples, from random halves of it."""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from lit_knn.common.progress import progress_bar
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.metrics.feature_statistics import FeatureStatistics

Key = TypeVar("Key", bound=Hashable)


def half_split_errors(
    values_of: Callable[[FeatureStatistics], Mapping[Key, float]],
    samples: FeatureStatistics,
    splits: int,
    seed: int = 0,
) -> dict[Key, float]:
    """Estimate the standard error of each metric that comes from the finite number of samples.

    A split deals the samples into two halves, with the values a and b. The bias of few samples is the same in both,
    and (a − b)/2 has the variance of the value of all samples: for a mean, its expectation over the splits is s²/N.
    The result is the root mean square of (a − b)/2 over the splits. The real images are the same in all of them.

    Args:
        values_of: computes the metrics of a half, by their names or other keys.
        samples: statistics of all samples, with the features of each.
        splits: number of splits.
        seed: of the splits.

    Returns:
        The standard errors by the same keys.
    """
    middle = samples.count // 2
    sq_differences: dict[Key, float] = {}

    with progress_bar(splits, "Standard errors", " splits") as bar:
        for split in range(splits):
            generator = keyed_generator("cpu", seed, split, Stream.HALVES)
            order = torch.randperm(samples.count, generator=generator)
            first = values_of(samples.of_rows(order[:middle]))
            second = values_of(samples.of_rows(order[middle : 2 * middle]))

            for name, value in first.items():
                sq_difference = ((value - second[name]) / 2) ** 2
                sq_differences[name] = sq_differences.get(name, 0.0) + sq_difference
            bar.update()

    return {name: math.sqrt(total / splits) for name, total in sq_differences.items()}
