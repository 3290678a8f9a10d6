"""The contract of a score estimator."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lit_knn.deferred_checks import deferring, refuse
from lit_knn.errors import InputError, prefixed
from lit_knn.estimators.counts import fit_counts
from lit_knn.estimators.values import Check, check_values, size_of
from lit_knn.linalg.full_float32 import full_float32
from lit_knn.reference import Reference
from lit_knn.settings import TellsSettings
from lit_knn.theory.noise import EDM_PROCESS, Process, per_item, under_process
from lit_knn.theory.posterior import score_from_mean
from lit_knn.theory.warp import Warp


class Holdings(NamedTuple):
    """Memory that an estimator needs in addition to the images.

    Attributes:
        neighbours: neighbours searched per z; 0 if the estimator needs no index.
        arrays: bytes by array name; arrays that estimators share have the same name.
    """

    neighbours: int = 0
    arrays: Mapping[str, int] = {}


class Estimator(TellsSettings, ABC):
    """Estimates the posterior mean E[x|z,t] (Eq. 8, eq:posterior_mean), and with it the score (Eq. 5).

    An estimator is a plain object, not a module, because it has no state to learn or to save. A subclass implements
    `_posterior_mean` and overrides the four flags below where their defaults are wrong. See `docs/extending.md`.
    """

    needs_reference = True
    """Tells whether `bind` must be called before use."""

    deterministic = False
    """Tells whether equal z, t and x_source always give equal estimates. If so, the generator has no effect."""

    uses_source = False
    """Tells whether the estimate depends on `x_source`."""

    shardable = False
    """Tells whether the estimates stay the same on a `ShardedReferenceSet`, where each process holds a part of the set.

    A shardable estimator accesses the set only through `search`, `gather`, `take`, `fetch` and `over_shards`. It calls
    them equally often on every rank, and never reads `images`. A subclass does not inherit the flag, because its own
    code may do otherwise: it sets the flag itself.
    """

    _reference: Reference | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "shardable" not in vars(cls):
            cls.shardable = False

    def bind(self, reference: Reference) -> Self:
        """Bind the estimator to the reference set that it averages over. Returns self.

        Raises:
            InputError: the settings do not fit the set, for instance k > N; the set is sharded and the estimator is not
                shardable.
        """
        if reference.sharded and not self.shardable:
            raise InputError(f"{type(self).__name__} needs the whole reference set on each rank, this one is sharded")
        fit_counts(self, reference)
        self._reference = reference
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings | None:
        """Predict the memory that the estimator will hold on `device`. Returns None if the estimator cannot tell.

        Args:
            N: number of images, including mirrored images and images on other ranks.
            d: flattened dimension of one image.
            pixels: whether the images are uint8.
            device: where the images are.

        Raises:
            InputError: the settings do not fit this set.
        """
        return None

    @property
    def knows_classes(self) -> bool:
        """Tells whether `posterior_mean` takes labels: true if a subclass overrides `_by_label`."""
        return type(self)._by_label is not Estimator._by_label

    @property
    def can_warp(self) -> bool:
        """Tells whether `warped_mean` works: true if a subclass implements `_warped_mean`."""
        return type(self)._warped_mean is not Estimator._warped_mean

    def by_class(self, unlabelled: bool = False) -> "Estimator":
        """Return this estimator over the images of one class; itself if it takes labels or needs no images.

        With `unlabelled` it also estimates items without a class; see `ByClass`.
        """
        from lit_knn.estimators.by_class import ByClass

        return ByClass(self, unlabelled) if self.needs_reference and not self.knows_classes else self

    def check_levels(self, lowest: float, highest: float) -> None:
        """Check the estimator's own noise levels against the lowest and highest level of a run.

        Raises:
            InputError: the estimator has a level outside them (`Switched`).
        """
        return

    @property
    def reference(self) -> Reference:
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
        generator: torch.Generator | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Estimate E[x|z,t], Eq. 8 (eq:posterior_mean).

        Args:
            z: (B, *shape), noisy latents, on the device of the reference set.
            t: (B,) or scalar, noise level, finite and t > 0.
            x_source: (B, *shape), float, the clean x that each z was made from; only some estimators use it.
            generator: source of randomness, on the device of `z`; by default PyTorch's own.
            labels: (B,), int64, the class of each z, for estimators that know classes (`ByClass`, `Network`); some also
                take `lit_knn.guidance.NO_CLASS`.

        Returns:
            (B, *shape), in the dtype of `z`.

        Raises:
            InputError: wrong shapes or devices, also of what the hook returns; t <= 0 or outside float32's range; NaN
                or infinite values; a z whose squares float32 cannot hold (`estimators.values`); `bind` was not
                called; `x_source` or labels are missing though the estimator needs them; labels are unknown or not
                supported.
        """
        t = self._check(z, t, x_source, labels, generator)
        if self._nothing_to_do(z):
            return z.clone()
        # Scores and weights stay in full precision, even if the network trains in a lower one.
        with torch.autocast(z.device.type, enabled=False), full_float32():
            return self._checked_mean(z, t, x_source, generator, labels)

    def _checked_mean(
        self,
        z: Tensor,
        t: Tensor,
        x_source: Tensor | None,
        generator: torch.Generator | None,
        labels: Tensor | None,
    ) -> Tensor:
        """Compute `posterior_mean` with checked arguments."""

        def mean(part: Estimator, rows: Tensor | slice) -> Tensor:
            own, source = _copied(z, rows), None if x_source is None else _copied(x_source, rows)
            result = part._posterior_mean(own, _copied(t, rows), source, generator)
            return part._check_mean(result, z[rows]).to(z.dtype)

        return self._by_label(labels, mean)

    @torch.no_grad()
    def warped_mean(
        self,
        z: Tensor,
        t: Tensor | float,
        warp: Warp,
        x_source: Tensor,
        generator: torch.Generator | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Estimate E[Ax|z,t], the posterior mean over the reference set warped by each item's own map A.

        This is the target of a network that sees z = A·x_source + tε and knows A. Each gathered image is resampled
        once. The weights are exact, so sampling estimators stay consistent.

        Args:
            z: (B, C, H, W), noisy latents of warped images, on the device of the reference set.
            t: (B,) or scalar, noise level, finite and t > 0.
            warp: the maps A of the B items.
            x_source: (B, C, H, W), the clean images before warping.
            generator: as `posterior_mean`.
            labels: as `posterior_mean`.

        Returns:
            (B, C, H, W), in the dtype of `z`.

        Raises:
            InputError: `can_warp` is false; z are not images; the number of maps is not B; `x_source` is missing; or as
                `posterior_mean`.
        """
        if not self.can_warp:
            raise InputError(f"{type(self).__name__} cannot estimate the posterior of warped images")
        t = self._check(z, t, x_source, labels, generator)
        self._check_warp(z, warp, x_source)
        if self._nothing_to_do(z):
            return z.clone()
        with torch.autocast(z.device.type, enabled=False), full_float32():
            return self._checked_warped_mean(z, t, warp, x_source, generator, labels)

    def _checked_warped_mean(
        self,
        z: Tensor,
        t: Tensor,
        warp: Warp,
        x_source: Tensor,
        generator: torch.Generator | None,
        labels: Tensor | None,
    ) -> Tensor:
        """Compute `warped_mean` with checked arguments."""
        # The proposal is computed from z and x_source, and half precision would round this computation.
        wide, x_source = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (z, x_source))

        def mean(part: Estimator, rows: Tensor | slice) -> Tensor:
            own = warp if isinstance(rows, slice) else warp.rows(rows)
            own_z, own_t, source = _copied(wide, rows), _copied(t, rows), _copied(x_source, rows)
            result = part._warped_mean(own_z, own_t, own, source, generator)
            return part._check_mean(result, z[rows]).to(z.dtype)

        return self._by_label(labels, mean)

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Hook for `warped_mean`. Its arguments are checked; `t` is (B,) float64 on the device of `z`."""
        raise NotImplementedError

    @torch.no_grad()
    def score(
        self,
        z: Tensor,
        t: Tensor | float,
        x_source: Tensor | None = None,
        generator: torch.Generator | None = None,
        labels: Tensor | None = None,
        process: Process = EDM_PROCESS,
    ) -> Tensor:
        """Estimate the score ∇ log p_t(z), Eq. 5 (eq:clean_score), under any noise process (ap:general_diffusion).

        For z = s(t)·(x + σ(t)·ε) it is (s·μ − z) / (s·σ)², where μ is the posterior mean at z/s and noise level σ.

        Args:
            z: (B, *shape), noisy latents of the process.
            t: (B,) or scalar, time of the process (the noise level in the EDM process).
            x_source: as `posterior_mean`.
            generator: as `posterior_mean`.
            labels: as `posterior_mean`.
            process: the noise process; by default the paper's, σ(t) = t and s(t) = 1.

        Returns:
            (B, *shape), in the dtype of `z`.

        Raises:
            InputError: as `posterior_mean`; the process has no finite noise level above 0 at t.
        """
        t = self._check(z, t, x_source, labels, generator)
        sigma = process.sigma(t)
        if not ((sigma > 0) & sigma.isfinite()).all():
            bad = t[~((sigma > 0) & sigma.isfinite())][0].item()
            raise InputError(f"{type(self).__name__}: {type(process).__name__} has no finite noise level at t={bad}")
        # In half precision, the mean's rounding error exceeds a small t. The score would be this error divided by t².
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        mean = under_process(self.posterior_mean, process)(wide, t, x_source, generator, labels)
        return score_from_mean(mean.double(), z.double(), t, process).to(z.dtype)

    @abstractmethod
    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Hook for `posterior_mean` that a subclass implements. Its arguments are checked, and it may overwrite them.

        Args:
            z: (B, *shape); B >= 1, but B may be 0 on sharded sets.
            t: (B,), float64, on the device of `z`; `lit_knn.theory.noise.per_item(t, z)` is (B, 1, …, 1).
            x_source: (B, *shape) or None.
            generator: source of all randomness, or None.

        Returns:
            (B, *shape), of any float type.
        """

    def _by_label(self, labels: Tensor | None, answer: Callable[["Estimator", Tensor | slice], Tensor]) -> Tensor:
        """Each label's estimator computes its rows. By default, `self` computes all rows and refuses labels."""
        if labels is not None:
            name = type(self).__name__
            raise InputError(f"{name}: labels are given, but it averages over all classes; use ByClass({name}(...))")
        return answer(self, slice(None))

    def _nothing_to_do(self, z: Tensor) -> bool:
        """Tells whether to skip a call because z is empty. A sharded set skips none: other ranks wait for answers."""
        return len(z) == 0 and not (self.needs_reference and self.reference.sharded)

    def _check_mean(self, mean: Tensor, z: Tensor) -> Tensor:
        """Return `mean`, which a hook computed for `z`. It must be finite, and like `z` in shape and device."""
        got = f"{tuple(mean.shape)} on {mean.device}" if isinstance(mean, Tensor) else type(mean).__name__
        if got != f"{tuple(z.shape)} on {z.device}":
            name, wanted = type(self).__name__, f"{tuple(z.shape)} on {z.device}"
            raise InputError(f"{name}: the posterior mean must be a tensor {wanted}, got {got}")
        # On a GPU this check would wait for the device. There a training step notes it for later. Elsewhere the next
        # call finds the value.
        if not mean.is_cuda or deferring(mean.device):
            size = size_of(mean).reshape(1)
            # A comparison with NaN is false.
            bad = ~(size < torch.inf)
            refuse(f"{type(self).__name__}: mean", bad, lambda: size, partial(_not_finite, type(self).__name__))
        return mean

    def _check(
        self,
        z: Tensor,
        t: Tensor | float,
        x_source: Tensor | None,
        labels: Tensor | None,
        generator: torch.Generator | None,
    ) -> Tensor:
        name = type(self).__name__
        if not isinstance(z, Tensor) or not z.is_floating_point():
            raise InputError(f"{name}: z must be float, got {z.dtype if isinstance(z, Tensor) else type(z).__name__}")
        if self.needs_reference:
            shape, device = self.reference.shape, self.reference.device
            if z.ndim != len(shape) + 1 or tuple(z.shape[1:]) != shape:
                raise InputError(f"{name}: z must be (B, {', '.join(map(str, shape))}), got {tuple(z.shape)}")
            if z.device != device:
                raise InputError(f"{name}: z is on {z.device}, the reference set on {device}: call reference.to()")
        if x_source is not None and x_source.shape != z.shape:
            raise InputError(f"{name}: x_source has shape {tuple(x_source.shape)}, z has {tuple(z.shape)}")
        if x_source is not None and not x_source.is_floating_point():
            raise InputError(f"{name}: x_source must be float, in model space, got {x_source.dtype}")
        if x_source is not None and x_source.device != z.device:
            raise InputError(f"{name}: x_source is on {x_source.device}, z is on {z.device}")
        if generator is not None and generator.device.type != z.device.type:
            raise InputError(f"{name}: the generator is on {generator.device}, z is on {z.device}")
        self._check_labels(z, labels)
        with prefixed(name):
            t = per_item(t, z).flatten().double()
        if t.shape not in ((1,), (len(z),)):
            raise InputError(f"{name}: t must be a scalar or ({len(z)},), got {tuple(t.shape)}")
        largest = self.reference.largest if self.needs_reference else None
        check_values(name, z, t, x_source, largest, self._more_checks(labels))
        return t.expand(len(z))

    def _more_checks(self, labels: Tensor | None) -> Check | None:
        """Hook for one more check of values on the device, which costs no further wait for it."""
        return None

    def _check_warp(self, z: Tensor, warp: Warp, x_source: Tensor | None) -> None:
        name = type(self).__name__
        if z.ndim != 4:
            raise InputError(f"{name}: only images (B, C, H, W) can be warped, got z of shape {tuple(z.shape)}")
        if x_source is None:
            raise InputError(f"{name}: the mean of warped images needs x_source, the clean images")
        flips, theta = tuple(warp.flips.shape), tuple(warp.theta.shape)
        if (flips, theta) != ((len(z), 2), (len(z), 2, 3)):
            raise InputError(f"{name}: warp must have {len(z)} maps, got flips {flips} and theta {theta}")
        for part in warp:
            if part.device != z.device:
                raise InputError(f"{name}: warp is on {part.device}, z is on {z.device}")

    def _check_labels(self, z: Tensor, labels: Tensor | None) -> None:
        name = type(self).__name__
        if labels is None:
            return
        if labels.dtype != torch.int64 or labels.shape != (len(z),):
            raise InputError(f"{name}: labels must be ({len(z)},) int64, got {tuple(labels.shape)} {labels.dtype}")
        if labels.device != z.device:
            raise InputError(f"{name}: labels are on {labels.device}, z is on {z.device}")


def _not_finite(name: str, check: int, value: float, where: str) -> InputError:
    return InputError(f"{name}: the estimate of the posterior mean is not finite{where}")


def _copied(values: Tensor, rows: Tensor | slice) -> Tensor:
    """Return a copy of some rows, because a hook may overwrite its arguments. Row numbers make a copy by themselves."""
    return values[rows].clone() if isinstance(rows, slice) else values[rows]
