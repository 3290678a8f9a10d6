"""The contract of a score estimator."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.counts import fit_counts
from lit_knn.index.base import with_progress
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import rows_by_label
from lit_knn.theory.noise import EDM_PROCESS, Process, per_item, under_process
from lit_knn.theory.posterior import score_from_mean
from lit_knn.theory.warp import Warp


class Estimator(ABC):
    """Estimates the posterior mean E[x|z,t] (Eq. 8, eq:posterior_mean), and with it the score (Eq. 5).

    A plain object, not a module: it has no state to learn or to save. Subclasses implement `_posterior_mean`.
    """

    needs_reference = True
    """Whether `bind` must be called before use."""

    deterministic = False
    """Whether equal z, t and x_source give equal estimates, whatever the generator."""

    uses_source = False
    """Whether the estimate depends on `x_source`."""

    shardable = True
    """Whether it works with a `ShardedReferenceSet`."""

    can_warp = False
    """Whether `warped_mean` works: subclasses that set it implement `_warped_mean`."""

    _reference: ReferenceSet | None = None
    _labels_required = False
    _label: int | None = None
    """The class of a copy that is bound to one class, see `of_class`."""

    def bind(self, reference: ReferenceSet) -> Self:
        """Give the estimator the set it averages over; returns self.

        Raises:
            InputError: the estimator's settings do not fit the set, for instance k > N; it does not work with a sharded
                set.
        """
        self._take(reference)
        return self

    def bind_by_class(self, reference: ReferenceSet) -> Self:
        """Bind the estimator to each class of a set, for means over one class each; returns self.

        All that `bind` would build is built for each class and not for the whole set, and from then on `labels` must be
        given. After `bind` they may be, too: a class is then bound when it is first asked for.

        Raises:
            InputError: the set has no labels or is sharded, or the settings do not fit a class, which is named.
        """
        self._take(reference, by_class=True)
        labels = reference.classes
        bound = ((label, self.of_class(label).reference.images) for label in labels)
        for _ in with_progress(bound, len(reference.images), f"binding {type(self).__name__} to {len(labels)} classes"):
            pass
        return self

    def _take(self, reference: ReferenceSet, by_class: bool = False) -> None:
        if reference.sharded and not self.shardable:
            raise InputError(f"{type(self).__name__} needs the whole reference set on each rank, this one is sharded")
        if self._label is None:
            # Names of the counts that a line has told of; the copies for classes share it.
            self._told: set[str] = set()
        if not by_class:
            fit_counts(self, reference.N, reference.d, self._told, self._label)
        self._reference = reference
        self._classes: dict[int, Self] = {}
        self._labels_required = by_class

    def of_class(self, label: int) -> Self:
        """A copy of the estimator that is bound to one class of the reference set; made once.

        Raises:
            InputError: the set has no labels, or not this one, or the settings do not fit the class.
        """
        own = self.reference.of_class(label)
        if label not in self._classes:
            part = copy.copy(self)
            part._label = label
            try:
                self._classes[label] = part.bind(own)
            except InputError as error:
                raise InputError(f"class {label}: {error}") from error
        return self._classes[label]

    @property
    def reference(self) -> ReferenceSet:
        """The bound reference set.

        Raises:
            InputError: `bind` was not called.
        """
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
            x_source: (B, *shape), the clean x each z was made from; only some estimators use it.
            generator: source of randomness, on the device of `z`; by default PyTorch's own.
            labels: (B,), int64, classes on the device of `z`: E[x|z,t,class], the mean over the images of each row's
                class alone. None for the mean over all images.

        Returns:
            (B, *shape), in the dtype of `z`.

        Raises:
            InputError: wrong shapes or devices, t <= 0, NaN or infinite values, no `bind`, no `x_source` where the
                estimator cannot do without, or labels that are missing, or none of the reference set.
        """
        t = self._check(z, t, x_source, labels)
        if self._nothing_to_do(z):
            return z.clone()
        # Scores and weights stay in full precision whatever the network trains in.
        with torch.autocast(z.device.type, enabled=False):
            if labels is None:
                return self._posterior_mean(z, t, x_source, generator).to(z.dtype)
            return self._class_mean(z, t, x_source, generator, labels).to(z.dtype)

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

        This is what a network is to output that sees z = A·x_source + tε and is told A. Each gathered image is
        resampled once; their weights are exact, so sampling estimators stay consistent.

        Args:
            z: (B, C, H, W), noisy latents of warped images, on the device of the reference set.
            t: (B,) or scalar, noise level, finite and t > 0.
            warp: the maps A of the B items.
            x_source: (B, C, H, W), the clean images, not warped.
            generator: as `posterior_mean`.
            labels: as `posterior_mean`.

        Returns:
            (B, C, H, W), in the dtype of `z`.

        Raises:
            InputError: the estimator has no such mean (`can_warp`), z are no images, another number of maps, no
                `x_source`, or as `posterior_mean`.
        """
        if not self.can_warp:
            raise InputError(f"{type(self).__name__} cannot estimate the posterior of warped images")
        t = self._check(z, t, x_source, labels)
        self._check_warp(z, warp, x_source)
        if self._nothing_to_do(z):
            return z.clone()
        # The proposal is made by arithmetic on both, which half precision would round.
        wide, x_source = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (z, x_source))
        with torch.autocast(z.device.type, enabled=False):
            if labels is None:
                return self._warped_mean(wide, t, warp, x_source, generator).to(z.dtype)
            mu = torch.empty_like(z)
            for part, rows in self._by_class(labels):
                own = part._warped_mean(wide[rows], t[rows], warp.rows(rows), x_source[rows], generator)
                mu[rows] = own.to(z.dtype)
            return mu

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """As `warped_mean`, with checked arguments and `t` (B,) float64 on the device of `z`."""
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

        With z = s(t)·(x + σ(t)·ε) it is (s·μ − z) / (s·σ)², where μ is the posterior mean at z/s and noise level σ.

        Args:
            z: (B, *shape), noisy latents of the process.
            t: (B,) or scalar, time of the process; in the EDM process the noise level.
            x_source: as `posterior_mean`.
            generator: as `posterior_mean`.
            labels: as `posterior_mean`.
            process: the noise process; by default the paper's, σ(t) = t and s(t) = 1.

        Returns:
            (B, *shape), in the dtype of `z`.

        Raises:
            InputError: as `posterior_mean`, or a time at which the process has no finite noise level above 0.
        """
        t = self._check(z, t, x_source, labels)
        sigma = process.sigma(t)
        if not ((sigma > 0) & sigma.isfinite()).all():
            bad = t[~((sigma > 0) & sigma.isfinite())][0].item()
            raise InputError(f"{type(self).__name__}: {type(process).__name__} has no finite noise level at t={bad}")
        # A mean in half precision is off by more than t is large, and the score would be that rounding divided by t².
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        mean = under_process(self.posterior_mean, process)(wide, t, x_source, generator, labels)
        return score_from_mean(mean.double(), z.double(), t, process).to(z.dtype)

    @abstractmethod
    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """As `posterior_mean`, with checked arguments and `t` (B,) float64 on the device of `z`."""

    def _class_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None, labels: Tensor
    ) -> Tensor:
        """As `_posterior_mean`, over the images of each row's class."""
        mu = torch.empty_like(z)
        for part, rows in self._by_class(labels):
            source = None if x_source is None else x_source[rows]
            mu[rows] = part._posterior_mean(z[rows], t[rows], source, generator).to(z.dtype)
        return mu

    def _by_class(self, labels: Tensor) -> Iterator[tuple[Self, Tensor]]:
        """Yield the estimator of each class that occurs, and its rows, in the order of the labels."""
        # All are bound before the first is used.
        yield from [(self.of_class(label), rows) for label, rows in rows_by_label(labels).items()]

    def _nothing_to_do(self, z: Tensor) -> bool:
        """Whether there is no z; of a sharded set the other ranks wait for this one's answers all the same."""
        return len(z) == 0 and not (self.needs_reference and self.reference.sharded)

    def _check(self, z: Tensor, t: Tensor | float, x_source: Tensor | None, labels: Tensor | None = None) -> Tensor:
        name = type(self).__name__
        if not z.is_floating_point():
            raise InputError(f"{name}: z must be float, got {z.dtype}")
        if self.needs_reference:
            shape, device = self.reference.shape, self.reference.device
            if z.ndim != len(shape) + 1 or tuple(z.shape[1:]) != shape:
                raise InputError(f"{name}: z must be (B, {', '.join(map(str, shape))}), got {tuple(z.shape)}")
            if z.device != device:
                raise InputError(f"{name}: z is on {z.device}, the reference set on {device}: call reference.to()")
        if x_source is not None and x_source.shape != z.shape:
            raise InputError(f"{name}: x_source has shape {tuple(x_source.shape)}, z has {tuple(z.shape)}")
        self._check_labels(z, labels)
        t = per_item(t, z).flatten().double()
        if t.shape not in ((1,), (len(z),)):
            raise InputError(f"{name}: t must be a scalar or ({len(z)},), got {tuple(t.shape)}")
        # One transfer of two bits, not two.
        bad_t, bad_z = torch.stack([~((t > 0) & t.isfinite()).all(), ~z.isfinite().all()]).tolist()
        if bad_t:
            raise InputError(f"{name}: t must be finite and above 0, got {t[~((t > 0) & t.isfinite())][0].item()}")
        if bad_z:
            raise InputError(f"{name}: z holds a value that is not finite")
        return t.expand(len(z))

    def _check_warp(self, z: Tensor, warp: Warp, x_source: Tensor | None) -> None:
        name = type(self).__name__
        if z.ndim != 4:
            raise InputError(f"{name}: only images (B, C, H, W) can be warped, got z of shape {tuple(z.shape)}")
        if x_source is None:
            raise InputError(f"{name}: the mean of warped images needs x_source, the clean images")
        flips, theta = tuple(warp.flips.shape), tuple(warp.theta.shape)
        if (flips, theta) != ((len(z), 2), (len(z), 2, 3)):
            raise InputError(f"{name}: warp must have {len(z)} maps, got flips {flips} and theta {theta}")

    def _check_labels(self, z: Tensor, labels: Tensor | None) -> None:
        name = type(self).__name__
        if labels is None:
            if self._labels_required:
                raise InputError(f"{name}: labels missing: it is bound by class and needs the class of each z")
            return
        if labels.dtype != torch.int64 or labels.shape != (len(z),):
            raise InputError(f"{name}: labels must be ({len(z)},) int64, got {tuple(labels.shape)} {labels.dtype}")
        if labels.device != z.device:
            raise InputError(f"{name}: labels are on {labels.device}, z is on {z.device}")
