"""The contract of a score estimator: a subclass implements one method, and this file does the rest."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Generator, Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.common.rng import seeded_from
from lit_knn.common.settings import RecordsArguments
from lit_knn.estimators.checks import Query, check_warp, checked_mean, checked_query, refusal
from lit_knn.estimators.counts import Limit, fit_counts
from lit_knn.index.precision import full_float32
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import EDM_PROCESS, Process, under_process
from lit_knn.theory.posterior import score_from_mean
from lit_knn.theory.warp import Warp


class Holdings(NamedTuple):
    """Memory that an estimator needs in addition to the images."""

    neighbours: int = 0
    """Neighbours searched per z; 0 if the estimator needs no index."""

    arrays: Mapping[str, int] = {}
    """Bytes by array name; arrays that estimators share have the same name."""

    indexes: int = 1
    """Indexes that hold all images."""


class Estimator(RecordsArguments, ABC):
    """Estimates the posterior mean E[x|z,t] (Eq. 8, eq:posterior_mean), and with it the score (Eq. 5).

    An estimator is a plain object, not a module, because it has no state to learn or to save. A subclass implements
    `_posterior_mean` and sets the flags that differ from the defaults. See `docs/extending.md`.
    """

    needs_reference = True
    """Whether the estimator needs `bind` before use."""

    deterministic = False
    """Whether equal z, t and x_source always give equal estimates. The hook then gets no generator."""

    uses_source = False
    """Whether the estimate depends on `x_source`. If not, the hook gets None for `x_source`."""

    takes_labels = False
    """Whether `posterior_mean` takes labels. `ByClass` adds labels to any other estimator."""

    num_classes = 0
    """Number of classes that the estimator knows without a reference set, as a network does; 0 for none."""

    shardable = False
    """Whether the estimates stay the same on a `ShardedReferenceSet`, where each process holds a part of the set.

    A shardable estimator accesses the set only through `search`, `gather`, `take`, `fetch` and `over_shards`. It calls
    them equally often on every rank, and never reads `images`. A subclass does not inherit the flag, because its code
    may break these rules. It must set the flag itself.
    """

    limits: ClassVar[Mapping[str, Limit]] = {}
    """Options that count images or components, with their limits. `bind` reduces their defaults to these limits."""

    _reference: ReferenceSet | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "shardable" not in vars(cls):
            cls.shardable = False
        # That of the base is another mean.
        if "_posterior_mean" in vars(cls) and "_warped_mean" not in vars(cls):
            cls._warped_mean = Estimator._warped_mean  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Show the class and its options; a network is shown by its class, and null is left out."""
        shown = []
        for name, value in RecordsArguments.settings(self).items():
            # A class without a constructor has no arguments; Python calls these args and kwargs.
            if value is None or (type(value) in (tuple, dict) and not value):
                continue
            text = type(value).__name__ if isinstance(value, nn.Module) else repr(value)
            shown.append(f"{name}={text}")

        return f"{type(self).__name__}({', '.join(shown)})"

    @abstractmethod
    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        """Hook for `posterior_mean` that a subclass implements. The hook may overwrite its checked arguments.

        Draws without the generator are reproducible, too, because PyTorch's own generator is seeded from the caller's
        generator.

        Args:
            z: (B, *shape), on the device of the set; B >= 1, or B >= 0 on sharded sets.
            t: (B, 1, …, 1), float64, in the shape of `z`.
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

    def bind(self, reference: ReferenceSet) -> Self:
        """Bind the estimator, no copy of it, to the reference set that it averages over. Returns self.

        Raises:
            InputError: the settings do not fit the set, such as k > N; it is sharded, and the estimator not shardable.
        """
        if reference.sharded and not self.shardable:
            raise InputError(
                f"{type(self).__name__} needs the whole reference set on each rank, this one is sharded"
            )
        fit_counts(self, reference)
        self._reference = reference
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings | None:
        """Predict the memory that the estimator will hold on `device`, for N images of dimension d, or None if unknown.

        N includes mirrored images and the images of other ranks. `pixels` is true if the images are uint8.
        """
        return None

    @property
    def can_warp(self) -> bool:
        """Tells whether `warped_mean` works."""
        return type(self)._warped_mean is not Estimator._warped_mean

    def by_class(self, wrap: "Callable[[Estimator], Estimator]") -> "Estimator":
        """Return this estimator, with `wrap` around each part that averages over the images of all classes."""
        return self if self.takes_labels or not self.needs_reference else wrap(self)

    def check_levels(self, lowest: float, highest: float) -> None:
        """Raise InputError if the estimator itself has a noise level (`Switched`) outside the levels of a run."""

    @property
    def reference(self) -> ReferenceSet:
        """The bound reference set. Raises InputError if `bind` was not called."""
        if self._reference is None:
            raise InputError(f"{type(self).__name__} is used before bind(reference)")
        return self._reference

    @torch.no_grad()
    def posterior_mean(
        self,
        z: Tensor,
        t: Tensor | float,
        x_source: Tensor | None = None,
        generator: Generator | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Estimate E[x|z,t], Eq. 8 (eq:posterior_mean).

        Args:
            z: (B, *shape), noisy latents, on the device of the reference set.
            t: (B,) or scalar, noise level, finite and t > 0.
            x_source: (B, *shape), float, the clean x that each z was made from; only some estimators use it.
            generator: source of randomness, on the device of `z`; by default PyTorch's own.
            labels: (B,), int64, the class of each z, for estimators that take labels; some also take
                `lit_knn.nets.base.NO_CLASS`. With labels on the CPU, `ByClass` does not wait for a GPU.

        Returns:
            (B, *shape), in the dtype of `z`, without gradient. `torch.func.jvp` gives the derivative of `Exact`
            alone; on a GPU give it float64 z.

        Raises:
            InputError: a wrong shape, device or value of an argument or of the hook's result; `x_source` or labels are
                missing, unknown or not supported.
        """
        return self._answer(checked_query(self, z, t, x_source, generator, labels))

    @torch.no_grad()
    def warped_mean(
        self,
        z: Tensor,
        t: Tensor | float,
        warp: Warp,
        x_source: Tensor,
        generator: Generator | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Estimate E[Ax|z,t], the posterior mean over the reference set warped by each item's own map A, (B, C, H, W).

        This is the target of a network that sees z = A·x_source + tε and knows A. Each gathered image is resampled
        once. The weights are exact, so sampling estimators stay consistent. `warp` holds the maps of the B items, and
        `x_source` (B, C, H, W) the images before warping; the other arguments are those of `posterior_mean`.
        """
        query = checked_query(self, z, t, x_source, generator, labels)
        check_warp(self, z, x_source, warp)
        # The proposal is computed from z and x_source, and half precision would round this computation.
        wide, x_source = (
            part.to(torch.promote_types(part.dtype, torch.float32)) for part in (z, x_source)
        )
        return self._answer(query._replace(z=wide, x_source=x_source, warp=warp)).to(z.dtype)

    @torch.no_grad()
    def score(
        self,
        z: Tensor,
        t: Tensor | float,
        x_source: Tensor | None = None,
        generator: Generator | None = None,
        labels: Tensor | None = None,
        process: Process = EDM_PROCESS,
    ) -> Tensor:
        """Estimate the score ∇ log p_t(z), Eq. 5 (eq:clean_score), under any noise process (ap:general_diffusion).

        For z = s(t)·(x + σ(t)·ε) the score is (s·μ − z) / (s·σ)², where μ is the posterior mean at z/s and noise level
        σ. `t` is the time of `process`, by default EDM, σ(t) = t and s(t) = 1. The other arguments and the
        result are those of `posterior_mean`.
        """
        t = checked_query(self, z, t, x_source, generator, labels).t.flatten()
        sigma = process.sigma(t)
        bad = ~((sigma > 0) & sigma.isfinite())
        if bad.any():
            raise refusal(
                self, f"{type(process).__name__} has no finite noise level at t={t[bad][0].item()}"
            )
        # In half precision, the mean's rounding error exceeds a small t. The score would be this error divided by t².
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        mean = under_process(self.posterior_mean, process)(wide, t, x_source, generator, labels)
        return score_from_mean(mean.double(), z.double(), t, process).to(z.dtype)

    @torch.no_grad()
    def log_density(self, z: Tensor, t: Tensor | float, labels: Tensor | None = None) -> Tensor:
        """Return log p_t(z), the natural logarithm of Eq. 1 (eq:marginal), (B,) float64.

        p_t(z) = 1/N · Σ (2πt²)^(−d/2) exp(−‖z − x‖²/2t²) is a density over model space, over all N
        images, mirrored ones included. With labels it is that of the class. The gradient of its
        logarithm is `score`. The arguments are those of `posterior_mean`.

        Raises:
            InputError: the estimator does not compute a density; as `posterior_mean`.
        """
        if not self.has_density:
            raise refusal(self, "it computes no density; Exact and ByClass(Exact()) do")
        query = checked_query(self, z, t, None, None, labels)
        with full_float32():
            return self.log_density_of(query)

    @property
    def has_density(self) -> bool:
        """Tells whether `log_density` works."""
        return type(self).log_density_of is not Estimator.log_density_of

    def log_density_of(self, query: Query) -> Tensor:
        """Hook for `log_density`: (B,) float64. The arguments are checked."""
        raise NotImplementedError

    def mean_of(self, query: Query) -> Tensor:
        """Compute the mean for checked arguments. This method ignores labels.

        Estimators that take labels override it. Wrappers override it, too, and call `mean_of` of their parts.
        """
        # The hook may overwrite its arguments.
        z, t = query.z.clone(), query.t.clone()
        source = None
        if query.x_source is not None and (self.uses_source or query.warp is not None):
            source = query.x_source.clone()

        generator = None if self.deterministic else query.generator
        # Without latents, as on a rank that only answers for its shard, do not advance the generator.
        with seeded_from(generator if len(z) else None):
            if query.warp is None:
                mean = self._posterior_mean(z, t, source, generator)
            else:
                assert source is not None
                mean = self._warped_mean(z, t, query.warp, source, generator)
        return checked_mean(self, mean, query.z)

    def _answer(self, query: Query) -> Tensor:
        if len(query.z) == 0 and not self._asked_with_others():
            return query.z.clone()

        # Scores and weights stay in full precision, even if the network trains in a lower one.
        try:
            with full_float32():
                mean = self.mean_of(query)
        except InputError:
            raise
        except Exception as error:
            error.add_note(type(self).__name__)
            # Lightning would take it for the end of the data, and never end.
            if isinstance(error, StopIteration):
                raise RuntimeError(f"{type(self).__name__} raised StopIteration") from error
            raise

        # The method of this class has checked its result.
        if type(self).mean_of is not Estimator.mean_of:
            mean = checked_mean(self, mean, query.z)
        return mean

    def _asked_with_others(self) -> bool:
        """Return whether other ranks wait for this rank's part of the set, even if the batch of this rank is empty."""
        return self.needs_reference and self.reference.sharded
