"""The public methods of a score estimator. A subclass implements one hook, `_posterior_mean`."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from lit_knn.common.errors import InputError
from lit_knn.estimators.checks import checked_query, refusal, time_of_process
from lit_knn.estimators.hooks import Hooks
from lit_knn.estimators.query import Query
from lit_knn.index.precision import full_float32
from lit_knn.theory.noise import EDM_PROCESS, Process, under_process
from lit_knn.theory.posterior import score_from_mean
from lit_knn.theory.warp import Warp


class Estimator(Hooks):
    """Estimates the posterior mean E[x|z,t] (Eq. 8, eq:posterior_mean), and with it the score (Eq. 5).

    An estimator is a plain object, not a module, because it has no state to learn or to save. A subclass implements
    `_posterior_mean` and sets the flags that differ from the defaults, see `Hooks` and `docs/extending.md`.
    """

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
        """Estimate E[Ax|z,t], the posterior mean over the reference set warped by each item's own map A.

        This is the target of a network that sees z = A·x_source + tε and knows A. Each gathered image is resampled
        once, for its weight. The weights are exact, so estimators that draw images stay consistent.

        Args:
            z: (B, C, H, W), noisy latents of warped images.
            t: (B,) or scalar, noise level.
            warp: the maps of the B items.
            x_source: (B, C, H, W), the clean images before warping.
            generator: as in `posterior_mean`.
            labels: as in `posterior_mean`.

        Returns:
            (B, C, H, W), in the dtype of `z`.
        """
        if not self.can_warp:
            raise refusal(self, "cannot estimate the posterior of warped images")
        query = checked_query(self, z, t, x_source, generator, labels)
        # The proposal is computed from z and x_source, and half precision would round this computation.
        wide = torch.promote_types(z.dtype, torch.float32)
        source = x_source.to(torch.promote_types(x_source.dtype, torch.float32))
        return self._answer(query._replace(z=z.to(wide), x_source=source, warp=warp)).to(z.dtype)

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
        σ.

        Args:
            z: (B, *shape), noisy latents.
            t: (B,) or scalar, time of `process`.
            x_source: as in `posterior_mean`.
            generator: as in `posterior_mean`.
            labels: as in `posterior_mean`.
            process: by default EDM, σ(t) = t and s(t) = 1.

        Returns:
            (B, *shape), in the dtype of `z`.
        """
        t = time_of_process(self, checked_query(self, z, t, x_source, generator, labels), process)
        # In half precision, the mean's rounding error exceeds a small t. The score would be this error divided by t².
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        mean = under_process(self.posterior_mean, process)(wide, t, x_source, generator, labels)
        return score_from_mean(mean.double(), z.double(), t, process).to(z.dtype)

    @torch.no_grad()
    def log_density(self, z: Tensor, t: Tensor | float, labels: Tensor | None = None) -> Tensor:
        """Return log p_t(z), the natural logarithm of Eq. 1 (eq:marginal), (B,) float64.

        p_t(z) = 1/N · Σ (2πt²)^(−d/2) exp(−‖z − x‖²/2t²) is a density over model space, over all N
        images, mirrored ones included. The gradient of its logarithm is `score`.

        Args:
            z: (B, *shape), points in model space.
            t: (B,) or scalar, noise level.
            labels: (B,), for the density of the class.

        Raises:
            InputError: the estimator does not compute a density; as `posterior_mean`.
        """
        query = checked_query(self, z, t, None, None, labels)
        with full_float32():
            return self.log_density_of(query)

    def by_class(self, wrap: "Callable[[Estimator], Estimator]") -> "Estimator":
        """Return this estimator, with `wrap` around each part that averages over the images of all classes."""
        if self.takes_labels or not self.needs_reference:
            return self
        return wrap(self)

    def _answer(self, query: Query) -> Tensor:
        """Return the mean for checked arguments, in full precision. An unexpected error gets the name of this class."""
        if len(query.z) == 0 and not self.others_wait():
            return query.z.clone()

        # The network may train in a lower precision, but scores and weights need a full one.
        try:
            with full_float32():
                return self.mean_of(query)
        except InputError:
            raise
        except Exception as error:
            error.add_note(type(self).__name__)
            # Lightning takes a StopIteration for the end of the data, and would then never end the training.
            if isinstance(error, StopIteration):
                raise RuntimeError(f"{type(self).__name__} raised StopIteration") from error
            raise
