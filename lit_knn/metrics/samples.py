"""Draw samples of a model, shared by the ranks."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lit_knn.common.distributed import own_batches


def draw_samples(
    sample: Callable[[Tensor], Tensor], num_samples: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of the samples with the seeds 0 to num_samples − 1: seeds (B,), images (B, *shape).

    `sample` draws the images of seeds. Ranks share whole batches, so an image that depends on its batch is the same for
    any number of ranks.
    """
    for _, numbers in own_batches(num_samples, batch_size):
        seeds = torch.arange(numbers.start, numbers.stop)
        yield seeds, sample(seeds)
