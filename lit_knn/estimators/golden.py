"""An estimator over the nearest images of each z."""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from lit_knn.errors import InputError, prefixed
from lit_knn.estimators.base import Estimator, Holdings
from lit_knn.estimators.by_class import copied_apart
from lit_knn.estimators.counts import check_count, counts_of
from lit_knn.reference import Reference, ReferenceSet

# GoldDiff's rule: between N/20 and N/10 images (its configs/ours/cifar10.yaml, "k_min" and "k_max").
FEWEST_SHARE, MOST_SHARE = 1 / 20, 1 / 10


class Golden(Estimator):
    """Another estimator over the k(t) nearest images of each z alone (GoldDiff, Shang et al., arXiv:2602.16498).

    Images far from z have little weight at small t, so few images are enough there. What the estimator computes from
    the set in `bind` (for example the covariance of `PCALocality`) is that of all images; only its mean is over the k
    nearest. k = N gives the estimator itself. The neighbours are as exact as the index of the set.

    The rule of GoldDiff is k(t) = k_min + (k_max − k_min)·t/√(1 + t²), where t/√(1 + t²) is its noise level √(1 − ᾱ),
    with k_min = N/20 and k_max = N/10. Its code screens candidates in images of low resolution; here the index does.

    Every z gets a set of its own, so z are estimated one by one. A call costs a search, B·k gathered images, and B
    calls of the estimator with one z each.

    Args:
        estimator: the estimator to wrap; it is copied.
        k: images per z: a number; or a table from noise levels to numbers, each valid from its level on, and the first
            one below it, too; null for GoldDiff's rule.

    Attributes:
        part: `estimator`, or after `bind` the bound copy.

    Raises:
        InputError: the estimator takes labels or needs no images; k < 1; a table that is empty or has a level that is
            negative or not finite; at `bind`, k > N, or the estimator refuses the set; an approximate index finds
            fewer than k images.
    """

    def __init__(self, estimator: Estimator, k: int | dict[float, int] | None = None) -> None:
        if not isinstance(estimator, Estimator):
            raise InputError(f"Golden: estimator must be an estimator, got {estimator!r}")
        name = type(estimator).__name__
        if not estimator.needs_reference:
            raise InputError(f"Golden: {name} averages over no images")
        if estimator.knows_classes:
            raise InputError(f"Golden: {name} takes labels itself; for classes use ByClass(Golden(...))")
        self.estimator, self.k = estimator, k
        self.part = estimator
        self._table = _table(k)
        self.uses_source, self.deterministic = estimator.uses_source, estimator.deterministic

    def check_levels(self, lowest: float, highest: float) -> None:
        """See `Estimator.check_levels`."""
        self.estimator.check_levels(lowest, highest)

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Binds a copy of the estimator to all images, and builds the neighbour index."""
        super().bind(reference)
        most = self._most(reference.N)
        if most > reference.N:
            raise InputError(f"Golden: k={most} is more than the {reference.N} images of the reference set")
        with prefixed("Golden"):
            # A count that fits all images may be more than the nearest ones of a low noise level.
            for count in counts_of(self.estimator):
                count.within(self.estimator, self._fewest(reference.N), reference.d)
            self.part = copied_apart(self.estimator).bind(reference)
        reference.try_search(most)
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings | None:
        """See `Estimator.holds`. The estimator holds the index, and what the wrapped one holds."""
        held = self.estimator.holds(N, d, pixels, device)
        return None if held is None else Holdings(max(held.neighbours, self._most(N)), held.arrays)

    def counts(self, t: Tensor) -> Tensor:
        """Return k for noise levels t (B,): (B,), int64."""
        N = self.reference.N
        if self._table is None:
            fewest, most = _share(N, FEWEST_SHARE), _share(N, MOST_SHARE)
            # t/√(1 + t²) without squares, which overflow at large t.
            noise_level = torch.sin(torch.atan(t.double()))
            return (fewest + (most - fewest) * noise_level).round().long()
        levels, numbers = torch.tensor(self._table, dtype=torch.float64, device=t.device).T.contiguous()
        place = torch.searchsorted(levels, t.double().contiguous(), right=True) - 1
        return numbers[place.clamp(min=0)].long()

    def _most(self, N: int) -> int:
        return _share(N, MOST_SHARE) if self._table is None else max(number for _, number in self._table)

    def _fewest(self, N: int) -> int:
        return _share(N, FEWEST_SHARE) if self._table is None else min(number for _, number in self._table)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        counts = self.counts(t).tolist()
        _, ids = self.reference.search(z, max(counts))
        _check_found(ids, counts)
        means = []
        for row, k in enumerate(counts):
            part = _narrowed(self.part, self.reference.local.picked(ids[row, :k]))
            own = slice(row, row + 1)
            source = None if x_source is None else x_source[own]
            means.append(part._checked_mean(z[own], t[own], source, generator, None))
        return torch.cat(means)


def _check_found(ids: Tensor, counts: list[int]) -> None:
    """Refuse a search that found fewer images than needed, which an approximate index marks with ids of −1."""
    for found, k in zip((ids >= 0).sum(1).tolist(), counts, strict=True):
        if found < k:
            searched = "let it search more lists, or use an exact index"
            raise InputError(f"Golden: the index found {found} of the k={k} images nearest to a z; {searched}")


def _table(k: int | Mapping[float, int] | None) -> list[tuple[float, int]] | None:
    """Return k as a list of noise levels and numbers, by ascending level. None stands for GoldDiff's rule."""
    if k is None:
        return None
    if not isinstance(k, Mapping):
        return [(0.0, check_count("Golden", "k", k))]
    if not k:
        raise InputError("Golden: k is an empty table; give a number, or null for GoldDiff's rule")
    for level in k:
        if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 <= level < math.inf:
            raise InputError(f"Golden: a noise level in k must be finite and at least 0, got {level!r}")
    return sorted((float(level), check_count("Golden", "k", number)) for level, number in k.items())


def _share(N: int, share: float) -> int:
    return max(round(share * N), 1)


def _narrowed(value: Any, subset: ReferenceSet) -> Any:
    """Copy a bound estimator, and let the copy average over a subset. What it knows of all images stays.

    The parts of a wrapper are narrowed, too. Dicts, lists and sets are copied, so that nothing that one subset leaves
    in them reaches the next. Other values are returned as they are.
    """
    if isinstance(value, (tuple, list)):
        parts = [_narrowed(part, subset) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if not isinstance(value, Estimator) or value._reference is None:
        return value
    made = copied_apart(value)
    vars(made).update({name: _narrowed(part, subset) for name, part in vars(made).items()})
    made._reference = subset
    return made
