"""Memorisation: how near generated samples are to the images they were learnt from, and how many are copies."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_knn.errors import InputError
from lit_knn.theory.posterior import direct_sq_dist

# More than the two that are needed: an approximate search mixes up the first few, and an image may be there twice.
CANDIDATES = 8

Search = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(z (B, *shape), k) -> squared distances and ids of the k nearest images, (B, k) each; id −1 where none was found."""


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


def nearest_images(samples: Tensor, search: Search, gather: Callable[[Tensor], Tensor], N: int) -> NearestImages:
    """Find the two nearest images of each sample; distances are exact, the neighbours as exact as the search.

    An image that is in the set more than once counts once, as long as no more than `CANDIDATES` copies of it are: the
    second nearest would else be the nearest again, the ratio 1, and a perfect copy of the image not seen as one.

    Args:
        samples: (B, *shape), model space.
        search: finds neighbours, for instance `reference.search`.
        gather: ids (B, k) -> images (B, k, *shape), for instance `reference.gather`.
        N: number of images that can be found.

    Returns:
        Distances and ids.

    Raises:
        InputError: N < 2, or a search that finds fewer than two images.
    """
    if N < 2:
        raise InputError(f"memorisation compares the two nearest images, but there is only N={N}")
    ids = search(samples, min(CANDIDATES, N))[1]
    if (ids[:, :2] < 0).any():
        raise InputError("memorisation: the search finds fewer than two neighbours; let it look further (nprobe)")
    images = gather(ids.clamp(min=0))
    sq_dist = direct_sq_dist(samples, images).masked_fill(ids < 0, torch.inf)
    sq_dist, order = sq_dist.sort(dim=1)
    images = images.flatten(2).gather(1, order.unsqueeze(2).expand(-1, -1, images[0, 0].numel()))
    differs = (images != images[:, :1]).any(2) & sq_dist.isfinite()
    # Where all candidates are the same image, the second is one of them.
    second = torch.where(differs.any(1), differs.int().argmax(1), 1)
    nearest_ids = ids.gather(1, order)[:, 0]
    distance = sq_dist.sqrt()
    return NearestImages(distance[:, 0], distance.gather(1, second.unsqueeze(1)).squeeze(1), nearest_ids)


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
