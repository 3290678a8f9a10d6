"""Drawing the samples that are measured."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lit_knn.distributed import own_batches


def draw_samples(
    sample: Callable[[Tensor], Tensor], num_samples: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the samples with the seeds 0 to num_samples − 1.

    Ranks share whole batches: where an image depends on its batch, it is the same for any number of ranks.

    Args:
        sample: seeds (B,) int64 -> images (B, *shape), model space.
        num_samples: over all ranks.
        batch_size: samples drawn at a time.

    Yields:
        Seeds (B,) and images (B, *shape).
    """
    for _, numbers in own_batches(num_samples, batch_size):
        seeds = torch.arange(numbers.start, numbers.stop)
        yield seeds, sample(seeds)
