"""What makes an estimator: its flags, the hooks that a subclass implements, and the one place that calls them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Self, TypeVar

import numpy as np
from torch import Generator, Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.rng import seeded_from
from lit_knn.common.settings import RecordsArguments
from lit_knn.estimators.checks import checked_mean, refusal
from lit_knn.estimators.counts import Limit, fit_counts
from lit_knn.estimators.query import Query
from lit_knn.reference import ReferenceSet
from lit_knn.theory.warp import Warp

T = TypeVar("T")


class Hooks(RecordsArguments, ABC):
    """The flags and hooks of an estimator, and the place that calls them. `Estimator` has the public methods."""

    needs_reference = True
    """Whether the estimator needs `bind` before use."""

    deterministic = False
    """Whether equal z, t and x_source always give equal estimates. The hook then gets no generator."""

    uses_source = False
    """Whether the estimate depends on `x_source`. If not, the hook gets None for `x_source`."""

    takes_labels = False
    """Whether the hook takes labels, (B,) int64 or None, as one more argument. `ByClass` adds labels to any other."""

    num_classes = 0
    """Number of classes that the estimator knows without a reference set, as a network does; 0 for none."""

    shardable = False
    """Whether the estimates stay the same on a `ShardedReferenceSet`, where each process holds a part of the set.

    A shardable estimator accesses the set only through `search`, `gather`, `take`, `fetch` and `over_shards`. It calls
    these methods equally often on every rank, and never reads `images`. A subclass does not inherit the flag, because
    its code may break these rules. It must set the flag itself.
    """

    limits: ClassVar[Mapping[str, Limit]] = {}
    """Options that count images or components, with their limits. `bind` reduces their defaults to these limits."""

    _reference: ReferenceSet | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "shardable" not in vars(cls):
            cls.shardable = False
        # A class with its own `_posterior_mean` must not inherit the warped version of another mean.
        if "_posterior_mean" in vars(cls) and "_warped_mean" not in vars(cls):
            cls._warped_mean = Hooks._warped_mean  # type: ignore[method-assign]

    @abstractmethod
    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        """Hook for `posterior_mean` that a subclass implements. The hook may overwrite its checked arguments.

        Draws without the generator are reproducible, too, because PyTorch's own generator is seeded from the caller's
        generator.

        Args:
            z: (B, *shape), on the device of the set; B >= 1, or B >= 0 on sharded sets.
            t: (B, 1, …, 1), float64, with as many dimensions as `z`.
            x_source: (B, *shape) or None; always None unless `uses_source`.
            generator: source of all randomness, or None; always None if `deterministic`.

        Returns:
            (B, *shape), of any float type.
        """

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: Generator | None
    ) -> Tensor:
        """Hook for `warped_mean`. Its arguments are those of `_posterior_mean`; `x_source` is always given."""
        raise NotImplementedError

    def log_density_of(self, query: Query) -> Tensor:
        """Hook for `log_density`: (B,) float64. The arguments are checked."""
        raise refusal(self, "it computes no density; Exact and ByClass(Exact()) do")

    def bind(self, reference: ReferenceSet) -> Self:
        """Bind this estimator, not a copy, to the reference set that it averages over. Returns self.

        Raises:
            InputError: the settings do not fit the set, such as k > N; the set is sharded and the estimator is not
                shardable; images were given in place of a set.
        """
        if isinstance(reference, (Tensor, np.ndarray)):
            name = type(self).__name__
            raise InputError(f"{name}: bind needs a ReferenceSet; ReferenceSet(images) makes one")
        if reference.sharded and not self.shardable:
            raise InputError(
                f"{type(self).__name__} needs the whole reference set on each rank, this one is sharded"
            )
        fit_counts(self, reference)
        self._reference = reference
        return self

    @property
    def can_warp(self) -> bool:
        """Whether the class implements `_warped_mean`, so that `warped_mean` works."""
        return type(self)._warped_mean is not Hooks._warped_mean

    def check_lies_within(self, lowest: float, highest: float) -> None:
        """Raise InputError if an option such as t of `Switched` is outside the noise levels of a run."""

    @property
    def reference(self) -> ReferenceSet:
        """The bound reference set. Raises InputError if `bind` was not called."""
        if self._reference is None:
            raise InputError(f"{type(self).__name__} is used before bind(reference)")
        return self._reference

    def others_wait(self) -> bool:
        """Return whether the set is sharded. Other ranks then wait for this one, even if its batch is empty."""
        return self.needs_reference and self.reference.sharded

    def mean_of(self, query: Query) -> Tensor:
        """Call the hook with checked arguments, and check the result.

        `Composite` calls this method of each part.
        """
        hook = self._posterior_mean if query.warp is None else self._warped_mean
        return checked_mean(self, self._call(hook, query), query.z)

    def _call(self, hook: Callable[..., T], query: Query) -> T:
        """Call a hook with the arguments that the flags of the class ask for.

        The hook may overwrite them, because it gets copies, and may draw without its generator, because PyTorch's own
        is seeded from it.
        """
        z, t, x_source, generator, labels, warp = query
        if not self.uses_source and warp is None:
            x_source = None
        if self.deterministic:
            generator = None

        # Without latents, as on a rank that only answers for its shard, do not advance the generator.
        seed = generator if len(z) else None
        z, t = z.clone(), t.clone()
        x_source = None if x_source is None else x_source.clone()

        maps = () if warp is None else (warp,)
        labels_if_taken = {"labels": labels} if self.takes_labels else {}
        with seeded_from(seed):
            # Positions, because the hook of a user's class may have other names for these arguments.
            return hook(z, t, *maps, x_source, generator, **labels_if_taken)
