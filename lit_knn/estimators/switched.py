"""An estimator that is switched by the noise level."""

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from lit_knn.errors import InputError, prefixed
from lit_knn.estimators.base import Estimator, Holdings
from lit_knn.estimators.by_class import copied_apart
from lit_knn.estimators.values import Check
from lit_knn.reference import Reference
from lit_knn.theory.noise import per_item
from lit_knn.theory.warp import Warp


class Switched(Estimator):
    """Estimates by `below` where the noise level is less than `t`, and by `above` where it is `t` or more.

    Its bias and variance at each noise level are those of the part in use. `bind` binds copies of the parts. Below the
    switch a cheap part such as `OneSample` may do, because there the posterior is nearly one image.

    On a CPU each part estimates its own rows. On a GPU each part estimates all rows, and the result is selected on the
    device: to count the rows of a part, the CPU would have to wait. A call there takes as long as both parts together.

    Args:
        below: estimator of the lower noise levels.
        above: estimator of the higher noise levels.
        t: the switch level, in units of the noise level σ.

    Attributes:
        parts: `below` and `above`, or after `bind` the bound copies.

    Raises:
        InputError: t is not a finite number above 0; a part is no estimator; at `bind`, the set is sharded and a part
            that needs it is not shardable, or the settings of a part do not fit the set.
    """

    def __init__(self, below: Estimator, above: Estimator, t: float) -> None:
        for name, part in {"below": below, "above": above}.items():
            if not isinstance(part, Estimator):
                raise InputError(f"Switched: {name} must be an estimator, got {part!r}")
        if isinstance(t, bool) or not isinstance(t, (int, float)) or not 0 < t < math.inf:
            raise InputError(f"Switched: t must be finite and above 0, got {t!r}")
        self.below, self.above, self.t = below, above, t
        self.parts = below, above
        self.needs_reference = below.needs_reference or above.needs_reference
        self.deterministic = below.deterministic and above.deterministic
        self.uses_source = below.uses_source or above.uses_source

    @property
    def shardable(self) -> bool:  # type: ignore[override]
        """Tells whether each part that needs the set is shardable. A subclass says so itself."""
        return all(part.shardable or not part.needs_reference for part in self.parts)

    @property
    def knows_classes(self) -> bool:
        """Tells whether both parts take labels."""
        return all(part.knows_classes for part in self.parts)

    @property
    def num_classes(self) -> int:
        """Number of classes that networks among the parts know; 0 if a part takes no labels."""
        return max(getattr(part, "num_classes", 0) for part in self.parts) if self.knows_classes else 0

    @property
    def can_warp(self) -> bool:
        """Tells whether both parts can warp."""
        return all(part.can_warp for part in self.parts)

    def by_class(self, unlabelled: bool = False) -> Estimator:
        """See `Estimator.by_class`. Each part averages over the images of one class."""
        return Switched(self.below.by_class(unlabelled), self.above.by_class(unlabelled), self.t)

    def check_levels(self, lowest: float, highest: float) -> None:
        """See `Estimator.check_levels`. The switch must be one of the levels of a run."""
        if not lowest <= self.t <= highest:
            raise InputError(f"Switched: t={self.t} is outside the noise levels of the run, {lowest:g} to {highest:g}")
        for part in self.parts:
            part.check_levels(lowest, highest)

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Binds a copy of each part that needs the set."""
        super().bind(reference)
        with prefixed("Switched"):
            below, above = (
                copied_apart(part).bind(reference) if part.needs_reference else part
                for part in (self.below, self.above)
            )
        self.parts = below, above
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings | None:
        """See `Estimator.holds`. Arrays of the same name are shared by the parts."""
        told = [part.holds(N, d, pixels, device) for part in self.parts]
        known = [held for held in told if held is not None]
        if len(known) < len(told):
            return None
        arrays: dict[str, int] = {}
        for name, size in (array for held in known for array in held.arrays.items()):
            arrays[name] = max(size, arrays.get(name, 0))
        return Holdings(max(held.neighbours for held in known), arrays)

    def _check_labels(self, z: Tensor, labels: Tensor | None) -> None:
        super()._check_labels(z, labels)
        if labels is not None and not self.knows_classes:
            self._by_label(labels, lambda part, rows: z)

    def _more_checks(self, labels: Tensor | None) -> Check | None:
        """See `Estimator._more_checks`. Parts with classes know the classes of the same set, so one check serves."""
        return next((check for part in self.parts if (check := part._more_checks(labels)) is not None), None)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self._checked_mean(z, t, x_source, generator, None)

    def _checked_mean(
        self,
        z: Tensor,
        t: Tensor,
        x_source: Tensor | None,
        generator: torch.Generator | None,
        labels: Tensor | None,
    ) -> Tensor:
        def mean(part: Estimator, rows: Tensor | slice) -> Tensor:
            return part._checked_mean(z[rows], t[rows], _some(x_source, rows), generator, _some(labels, rows))

        return self._switched(z, t, mean)

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        return self._checked_warped_mean(z, t, warp, x_source, generator, None)

    def _checked_warped_mean(
        self,
        z: Tensor,
        t: Tensor,
        warp: Warp,
        x_source: Tensor,
        generator: torch.Generator | None,
        labels: Tensor | None,
    ) -> Tensor:
        def mean(part: Estimator, rows: Tensor | slice) -> Tensor:
            own = warp if isinstance(rows, slice) else warp.rows(rows)
            return part._checked_warped_mean(z[rows], t[rows], own, x_source[rows], generator, _some(labels, rows))

        return self._switched(z, t, mean)

    def _switched(self, z: Tensor, t: Tensor, mean: Callable[[Estimator, Tensor | slice], Tensor]) -> Tensor:
        """Let each part estimate rows of z, the part below first: (B, *shape)."""
        below, above = self.parts
        high = t >= self.t
        if z.is_cuda:
            low_mean, high_mean = mean(below, slice(None)), mean(above, slice(None))
            return torch.where(per_item(high, z), high_mean, low_mean)
        result = torch.empty_like(z)
        for part, rows in ((below, (~high).nonzero()[:, 0]), (above, high.nonzero()[:, 0])):
            # On a sharded set a part answers for zero rows, too, because other ranks wait for it.
            if not part._nothing_to_do(z[rows]):
                result[rows] = mean(part, rows)
        return result


def _some(values: Tensor | None, rows: Tensor | slice) -> Tensor | None:
    return None if values is None else values[rows]
