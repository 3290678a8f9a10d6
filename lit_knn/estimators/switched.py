"""Estimators of two parts, and the one that switches between them by the noise level."""

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, check_is, prefixed
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.composite import Composite, copied_apart
from lit_knn.estimators.network import Network
from lit_knn.estimators.query import Query
from lit_knn.reference import ReferenceSet


class Parts(Composite):
    """Base of the estimators that combine two others. `bind` binds copies of the parts.

    A subclass implements `mean_of`.

    Args:
        parts: the two estimators, by the names of their options; a module becomes a `Network`.

    Attributes:
        parts: the estimators, or after `bind` the bound copies.
    """

    def __init__(self, **parts: Estimator | nn.Module) -> None:
        options = {}
        for name, part in parts.items():
            options[name] = Network(part) if isinstance(part, nn.Module) else part
            with prefixed(f"{type(self).__name__}: {name}"):
                check_is(Estimator, options[name], "estimator")
        self._hold(options)

    def _hold(self, options: dict[str, Estimator]) -> None:
        """Store the two estimators by the names of their options, and set the flags that follow from theirs."""
        self.options = options
        # Each option is also an attribute, such as `below`.
        vars(self).update(options)
        self.parts = tuple(options.values())
        first, second = self.parts

        self.needs_reference = first.needs_reference or second.needs_reference
        self.deterministic = first.deterministic and second.deterministic
        self.uses_source = first.uses_source or second.uses_source
        self.takes_labels = first.takes_labels and second.takes_labels
        self.num_classes = max(first.num_classes, second.num_classes) if self.takes_labels else 0

    @property
    def shardable(self) -> bool:  # type: ignore[override]
        return all(part.shardable or not part.needs_reference for part in self.parts)

    @property
    def can_warp(self) -> bool:
        return all(part.can_warp for part in self.parts)

    def by_class(self, wrap: Callable[[Estimator], Estimator]) -> Estimator:
        """Wrap each part, because a network and `OneSample` take labels themselves."""
        options = {name: part.by_class(wrap) for name, part in self.options.items()}
        # A copy, because the constructor of a user's subclass may take other arguments than the parts.
        wrapped = copied_apart(self)
        wrapped._hold(options)
        wrapped._arguments = wrapped.settings()
        return wrapped

    def check_lies_within(self, lowest: float, highest: float) -> None:
        for part in self.parts:
            part.check_lies_within(lowest, highest)

    def bind(self, reference: ReferenceSet) -> Self:
        """Bind a copy of each part that averages over images."""
        super().bind(reference)
        with prefixed(type(self).__name__):
            self.parts = tuple(
                copied_apart(part).bind(reference) if part.needs_reference else part
                for part in self.options.values()
            )
        return self


class Switched(Parts):
    """Estimates with `below` if the noise level is less than `t`, otherwise with `above`.

    At each noise level it has the bias and variance of the part in use. `bind` binds copies of the parts. Below the
    switch a cheap part such as `OneSample` may be enough, because there the posterior is nearly one image.

    On a CPU each part estimates only the rows on its side of the switch. On a GPU each part estimates all rows, and the
    GPU selects the results, because the CPU would have to wait to count the rows of a part. A call on a GPU takes as
    long as both parts together.

    Args:
        below: estimator of the lower noise levels, or in Python a module for `Network`.
        above: estimator of the higher noise levels, likewise.
        t: the switch level, in units of the noise level σ.
    """

    shardable = Parts.shardable

    def __init__(
        self, below: Estimator | nn.Module, above: Estimator | nn.Module, t: float
    ) -> None:
        super().__init__(below=below, above=above)
        if not 0 < t < math.inf:
            raise InputError(f"Switched: t must be finite and above 0, got {t!r}")
        self.t = t

    def check_lies_within(self, lowest: float, highest: float) -> None:
        if not lowest <= self.t <= highest:
            raise InputError(
                f"Switched: t={self.t} is outside the noise levels of the run, {lowest:g} to {highest:g}"
            )
        super().check_lies_within(lowest, highest)

    def mean_of(self, query: Query) -> Tensor:
        """Let each part estimate the rows on its side of the switch."""
        is_high = query.t >= self.t
        # In both branches `below` uses the generator before `above`, so that the order of the draws does not depend on
        # the device.
        below, above = self.parts
        if query.z.is_cuda:
            low_mean, high_mean = below.mean_of(query), above.mean_of(query)
            return torch.where(is_high, high_mean, low_mean)

        result = torch.empty_like(query.z)
        for part, chosen in ((below, ~is_high), (above, is_high)):
            rows = chosen.flatten().nonzero()[:, 0]
            # On a sharded set a part answers for zero rows, too, because other ranks wait for it.
            if len(rows) or part.others_wait():
                result[rows] = part.mean_of(query.rows(rows))
        return result
