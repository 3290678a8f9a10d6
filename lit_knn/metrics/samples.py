"""Draw and measure samples of a model."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lit_knn.common.distributed import own_batches
from lit_knn.common.progress import Bar, progress_bar
from lit_knn.metrics.fidelity_measure import FidelityMeasure
from lit_knn.metrics.memorisation import MemorisationMetric, nearest_images
from lit_knn.reference import ReferenceSet

Sample = Callable[[Tensor], Tensor]
"""Seeds (B,) int64 -> images (B, *shape), model space."""


def draw_samples(sample: Sample, num_samples: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of the samples with the seeds 0 to num_samples − 1: seeds (B,), images (B, *shape).

    Ranks share whole batches, so an image that depends on its batch is the same for any number of ranks.
    """
    for _, numbers in own_batches(num_samples, batch_size):
        seeds = torch.arange(numbers.start, numbers.stop)
        yield seeds, sample(seeds)


def measure_samples(
    drawn: Iterable[tuple[Tensor, Tensor]],
    reference: ReferenceSet,
    distance: FidelityMeasure,
    threshold: float = 1 / 3,
    watch: Callable[[Tensor, Tensor], Any] = lambda seeds, samples: None,
    bar: Bar = progress_bar,
    real: ReferenceSet | None = None,
) -> dict[str, float]:
    """Measure how near samples are to the data and how many are copies; all ranks call it and share the batches.

    `drawn` are this rank's seeds and samples, by `draw_samples`, on the device of `reference`, the training images.
    `distance` compares samples with the images `real`, such as held-out ones, by default those of `reference`. For
    `threshold` see `is_copied`. `watch` is called with the seeds and samples of each batch of this rank. The result has
    the distance by its name, `copied_fraction` and `mean_nearest_distance`.
    """
    memorisation = MemorisationMetric(threshold).to(reference.device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for seeds, samples in drawn:
            memorisation.update(nearest_images(samples, reference))
            watch(seeds, samples)
            yield seeds, samples

    values = distance(real or reference, batches(), None, reference.device, bar)
    return {distance.metric: values[distance.metric], **memorisation.compute()}
