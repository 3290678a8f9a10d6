"""Memorisation: how near generated samples are to the images they were learnt from, and how many are copies."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_knn.distributed import Exchange
from lit_knn.errors import InputError
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import direct_sq_dist

# More than the two that are needed: an approximate search mixes up the first few, and an image may be there twice.
CANDIDATES = 8


class NearestImages(NamedTuple):
    """What the ratio test compares; (B,) each, distances float64.

    Attributes:
        distance: L2 distance to the nearest image, model space.
        second_distance: L2 distance to the nearest image that differs from that one.
        ids: the nearest image.
    """

    distance: Tensor
    second_distance: Tensor
    ids: Tensor

    @property
    def ratio(self) -> Tensor:
        """Nearest distance over second nearest, in [0, 1]; 1 where both are 0. A copy has a small one."""
        return torch.where(self.second_distance > 0, self.distance / self.second_distance, 1.0)


def nearest_images(samples: Tensor, reference: ReferenceSet) -> NearestImages:
    """Find the two nearest images of each sample; distances are exact, the neighbours as exact as the search.

    An image that is in the set more than once counts once, as long as no more than `CANDIDATES` copies of it are: the
    second nearest would else be the nearest again, the ratio 1, and a perfect copy of the image not seen as one.

    Args:
        samples: (B, *shape), model space.
        reference: the images.

    Returns:
        Distances and ids.

    Raises:
        InputError: N < 2, or a search that finds fewer than two images.
    """
    if reference.N < 2:
        raise InputError(f"memorisation compares the two nearest images, but there is only N={reference.N}")
    ids = reference.search(samples, min(CANDIDATES, reference.N))[1]
    if (ids[:, :2] < 0).any():
        raise InputError("memorisation: the search finds fewer than two neighbours; let it look further (nprobe)")
    images = reference.gather(ids.clamp(min=0))
    sq_dist = direct_sq_dist(samples, images).masked_fill(ids < 0, torch.inf)
    sq_dist, order = sq_dist.sort(dim=1)
    images = images.flatten(2).gather(1, order.unsqueeze(2).expand(-1, -1, images[0, 0].numel()))
    differs = (images != images[:, :1]).any(2) & sq_dist.isfinite()
    # Where all candidates are the same image, the second is one of them.
    second = torch.where(differs.any(1), differs.int().argmax(1), 1)
    nearest_ids = ids.gather(1, order)[:, 0]
    distance = sq_dist.sqrt()
    return NearestImages(distance[:, 0], distance.gather(1, second.unsqueeze(1)).squeeze(1), nearest_ids)


def check_search(reference: ReferenceSet) -> None:
    """Search for one image, so that a search that cannot tell copies is found out before anything long.

    Raises:
        InputError: as `nearest_images`.
    """
    nearest_images(reference.gather(torch.tensor([0], device=reference.device)), reference)


def memorisation(
    samples: Tensor, reference: ReferenceSet, threshold: float = 1 / 3, batch_size: int = 500
) -> dict[str, float]:
    """How many samples are copies, and how near they are to the data.

    Args:
        samples: (B, *shape), model space, on the device of `reference`.
        reference: the data.
        threshold: see `is_copied`.
        batch_size: samples at a time.

    Returns:
        See `MemorisationMetric.compute`.

    Raises:
        InputError: as `nearest_images` and `MemorisationMetric`.
    """
    metric = MemorisationMetric(threshold).to(reference.device)
    for batch in samples.split(batch_size):
        metric.update(nearest_images(batch, reference))
    return metric.compute()


def is_copied(nearest: NearestImages, threshold: float = 1 / 3) -> Tensor:
    """The ratio test of Yoon et al. 2023: a copy is nearer to one image than `threshold` times to any other.

    Blind to what is in the set several times with small changes, such as near-duplicates: those hide a copy.

    Args:
        nearest: from `nearest_images`.
        threshold: largest ratio of a copy, excluded; distances, not their squares.

    Returns:
        (B,), bool.
    """
    return nearest.distance < threshold * nearest.second_distance


class MemorisationMetric(Metric):
    """Copied fraction and mean nearest distance over batches and ranks.

    Args:
        threshold: of `is_copied`, in (0, 1].

    Raises:
        InputError: threshold outside (0, 1].
    """

    full_state_update = False
    copied: Tensor
    distance_sum: Tensor
    total: Tensor

    def __init__(self, threshold: float = 1 / 3) -> None:
        super().__init__()
        if not 0 < threshold <= 1:
            raise InputError(f"memorisation: threshold must be above 0 and at most 1, got {threshold}")
        self.threshold = threshold
        self.add_state("copied", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("distance_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nearest: NearestImages) -> None:
        """Add a batch of `nearest_images`."""
        self.copied += is_copied(nearest, self.threshold).sum()
        self.distance_sum += nearest.distance.sum()
        self.total += len(nearest.distance)

    def compute(self) -> dict[str, float]:
        """`copied_fraction` in [0, 1] and `mean_nearest_distance`, L2 in model space; NaN without samples."""
        total = int(self.total)
        if total == 0:
            return {"copied_fraction": float("nan"), "mean_nearest_distance": float("nan")}
        return {
            "copied_fraction": int(self.copied) / total,
            "mean_nearest_distance": float(self.distance_sum) / total,
        }


class LikestPairs:
    """The samples with the smallest ratios, and their nearest images, over batches and ranks.

    Args:
        number: of pairs.
        reference: the data.
    """

    def __init__(self, number: int, reference: ReferenceSet) -> None:
        self.number = number
        # Full from the start, so that all ranks have the same shapes to exchange.
        ratio = torch.full((number,), torch.inf, dtype=torch.float64)
        parts = ratio, torch.zeros(number, *reference.shape), torch.zeros(number, dtype=torch.int64)
        self._parts = [part.to(reference.device) for part in parts]

    def update(self, samples: Tensor, nearest: NearestImages) -> None:
        """Compare a batch with the likest so far."""
        self._keep([[*pair] for pair in zip(self._parts, (nearest.ratio, samples, nearest.ids), strict=True)])

    def compute(self) -> tuple[Tensor, Tensor]:
        """Samples (n, *shape) and ids (n,) of their nearest images, the smallest ratio first; a collective."""
        exchange = Exchange()
        self._keep([exchange.all_gather(part) for part in self._parts])
        ratio, samples, ids = self._parts
        found = int(ratio.isfinite().sum())
        return samples[:found], ids[:found]

    def _keep(self, parts: Sequence[Sequence[Tensor]]) -> None:
        joined = [torch.cat(list(part)) for part in parts]
        # Stable, so that ties do not depend on the number of ranks more than they must.
        order = joined[0].sort(stable=True).indices[: self.number]
        self._parts = [part[order] for part in joined]
