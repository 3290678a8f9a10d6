"""Memorisation: how near generated samples are to their training images, and how many are copies."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.exchange import Exchange
from lit_knn.metrics.estimator_error import LatentMeans, MeanAndError
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import direct_sq_dist

# Number of images to search for: approximate search may swap the first few, and the set may hold an image twice.
CANDIDATES = 8


class NearestImages(NamedTuple):
    """What the ratio test compares. All are (B,); the L2 distances are float64, in model space."""

    distance: Tensor  # to the nearest image
    second_distance: Tensor  # to the nearest image that differs from the first
    ids: Tensor  # of the nearest images

    @property
    def ratio(self) -> Tensor:
        """The nearest distance divided by the second nearest, in [0, 1]; 1 if both are 0. A copy has a small ratio."""
        return torch.where(self.second_distance > 0, self.distance / self.second_distance, 1.0)


def nearest_images(samples: Tensor, reference: ReferenceSet) -> NearestImages:
    """Find the two nearest images of samples (B, *shape). Distances are exact; neighbours are as exact as the search.

    Fewer than `CANDIDATES` copies of an image in the set count as one, so that their ratio is not 1.
    """
    if reference.N < 2:
        raise InputError("copies are told by the second nearest image, and the set has one image")
    ids = reference.search(samples, min(CANDIDATES, reference.N))[1]
    if (ids[:, :2] < 0).any():
        reason = "it is not finite, or the search is too narrow (nprobe)"
        raise InputError(f"a sample has no two neighbours: {reason}")

    images = reference.gather(ids.clamp(min=0))
    sq_dist = direct_sq_dist(samples, images).masked_fill(ids < 0, torch.inf)
    sq_dist, order = sq_dist.sort(dim=1)
    rows = torch.arange(len(ids), device=ids.device)
    images = images.flatten(2)[rows[:, None], order]
    differs = (images != images[:, :1]).any(2) & sq_dist.isfinite()
    # The second image is the first one that differs (`argmax` finds the first 1). If all candidates are the same image,
    # it is this image, too.
    second = torch.where(differs.any(1), differs.int().argmax(1), 1)
    distance = sq_dist.sqrt()
    return NearestImages(distance[:, 0], distance[rows, second], ids.gather(1, order)[:, 0])


def check_search(reference: ReferenceSet) -> None:
    """Search for one image, so that a search that cannot detect copies raises InputError before any long work."""
    nearest_images(reference.gather(torch.tensor([0], device=reference.device)), reference)


def memorisation(
    samples: Tensor, reference: ReferenceSet, threshold: float = 1 / 3, batch_size: int = 500
) -> dict[str, float]:
    """Measure how many samples are copies, and how near they are to the data; see `MemorisationMetric.compute`.

    Args:
        samples: (B, *shape), model space.
        reference: the training images; samples are compared on their device.
        threshold: see `is_copied`.
        batch_size: samples that are compared at a time.
    """
    metric = MemorisationMetric(threshold).to(reference.device)
    for batch in samples.split(batch_size):
        metric.update(nearest_images(batch.to(reference.device), reference))
    return metric.compute()


def is_copied(nearest: NearestImages, threshold: float = 1 / 3) -> Tensor:
    """Return which samples are copies by the ratio test of Yoon et al. 2023, (B,) bool.

    A copy is nearer to one image than `threshold` times its distance to any other. The distances are not squared. The
    test misses copies of an image that has near-duplicates in the set.
    """
    return nearest.distance < threshold * nearest.second_distance


def check_threshold(threshold: float) -> None:
    """Raise InputError for a threshold of `is_copied` that is no ratio of distances above 0."""
    # No ratio is above 1, so with a larger threshold every sample would be a copy.
    if not 0 < threshold <= 1:
        raise InputError(f"threshold must be above 0 and at most 1, got {threshold}")


class MemorisationMetric(LatentMeans):
    """Copied fraction and mean nearest distance over batches and ranks; for `threshold` see `is_copied`."""

    def __init__(self, threshold: float = 1 / 3) -> None:
        check_threshold(threshold)
        super().__init__(("copied_fraction", "mean_nearest_distance"))
        self.threshold = threshold

    def update(self, nearest: NearestImages) -> None:  # type: ignore[override]
        copied = is_copied(nearest, self.threshold)
        super().update(copied_fraction=copied, mean_nearest_distance=nearest.distance)

    def compute(self) -> dict[str, float]:  # type: ignore[override]
        """Return `copied_fraction` in [0, 1] and `mean_nearest_distance`, L2 in model space; NaN without samples."""
        return {name: value.mean for name, value in self.with_errors().items()}

    def with_errors(self) -> dict[str, MeanAndError]:
        """Return what `compute` returns, with standard errors."""
        return super().compute()


class LikestPairs:
    """Keeps the `number` samples with the smallest ratios, and their nearest images, over batches and ranks."""

    def __init__(self, number: int, reference: ReferenceSet) -> None:
        self.number = number
        # Placeholders fill the list from the start, so that all ranks exchange the same shapes.
        ratio = torch.full((number,), torch.inf, dtype=torch.float64)
        parts = ratio, torch.zeros(number, *reference.shape), torch.zeros(number, dtype=torch.int64)
        self._parts = [part.to(reference.device) for part in parts]

    def update(self, samples: Tensor, nearest: NearestImages) -> None:
        """Compare a batch with the likest pairs so far."""
        new = nearest.ratio, samples, nearest.ids
        self._keep([torch.cat(pair) for pair in zip(self._parts, new, strict=True)])

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return samples (n, *shape) and ids (n,) of their nearest images, smallest ratio first; all ranks call it."""
        exchange = Exchange()
        self._keep([torch.cat(exchange.all_gather(part)) for part in self._parts])
        ratio, samples, ids = self._parts
        count = int(ratio.isfinite().sum())
        return samples[:count], ids[:count]

    def _keep(self, joined: list[Tensor]) -> None:
        """Keep the pairs with the smallest ratios of ratios, samples and ids with any number of rows."""
        # A stable sort makes ties depend as little as possible on the number of ranks.
        order = joined[0].sort(stable=True).indices[: self.number]
        self._parts = [part[order] for part in joined]
