"""The subspace estimator: the principal components of all images give its proposal and a correction of its mean."""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Generator, Tensor

from lit_knn.common.errors import InputError
from lit_knn.estimators.certificate import Certificate, DrawingEstimator
from lit_knn.estimators.counts import Limit, count, fitted_count, of_components, of_images
from lit_knn.estimators.draws import ResultRows, drawn_images, weights_of
from lit_knn.estimators.subspace_draws import (
    NEGLIGIBLE_SHARE,
    SubspaceDraws,
    excess_of,
    subspace_draws,
)
from lit_knn.estimators.subspace_error import corrected_sq_error
from lit_knn.index.pca import Projection
from lit_knn.index.precision import check_compute, compute_dtype
from lit_knn.reference import ReferenceSet
from lit_knn.reference.principal import projection_of
from lit_knn.theory.warp import Warp


class SubspaceKNN(DrawingEstimator):
    """SNIS (Eq. 11) that proposes by the principal components of z, and corrects its estimate by the proposal's mean.

    The r leading principal components of an image are y = P'(x − mean). The posterior of the images given only P'z,
    q_i ∝ exp(−‖P'(z − mean) − y_i‖²/2t²), costs a product of r dimensions instead of d, and so does the mean of y under
    q. The most probable of the n gathered images are kept; the others are drawn from the rest of q in proportion to q.
    All are weighted by exact likelihood over q. A control variate then subtracts the known effect of the drawing on the
    mean of y, π·P(mean of the drawn y − E_q[y]). Both of these means are over the rest, and π is the rest's estimated
    share of the posterior.

    The sampled part is biased, O(1/n), and consistent. The estimate is exact if n images hold the whole posterior, or
    if r = d. There is no search, so there is no k. `docs/subspace_knn.md` derives the estimator.

    Args:
        r: principal components, at most min(N, d); null for 512, or min(N, d) if that is less. A larger r lowers the
            error and takes longer.
        n: maximum images gathered per z, at most N; null for 256, or N if that is less. If fewer hold the whole
            posterior, only these are gathered.
        compute: type of the two products: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU that multiplies it, else
            float32. `bind` refuses bfloat16 on a CPU, or on a GPU that does not multiply it.
    """

    shardable = True
    limits: ClassVar[Mapping[str, Limit]] = {"r": of_components, "n": of_images}

    def __init__(self, r: int | None = None, n: int | None = None, compute: str = "auto") -> None:
        self.r = count(self, "r", r)
        self.n = count(self, "n", n)
        self.compute = check_compute("SubspaceKNN", compute)

    def bind(self, reference: ReferenceSet) -> Self:
        super().bind(reference)
        self._projection()
        return self

    def memory(self, N: int, d: int) -> dict[str, int]:
        r = fitted_count(self, "r", N, d)
        # `auto` counts as float32, which takes more than bfloat16.
        coordinate = 2 if self.compute == "bfloat16" else 4
        return {f"r={r} coordinates": N * (r * coordinate + 4) + 4 * r * d}

    def _projection(self) -> Projection:
        """Return the coordinates of all images, which the set computes once and keeps."""
        reference = self.reference
        return projection_of(reference, self.r, self._dtype(reference.device))

    def _dtype(self, device: torch.device) -> torch.dtype:
        """Return the number type of the products. Raises InputError if they would not be precise or fast."""
        # If more than n images lie within the rounding of a CPU's sums, the source of z may not be gathered.
        if device.type == "cpu" and self.compute == "bfloat16":
            raise InputError(
                "SubspaceKNN: compute=bfloat16: a CPU rounds the sums of such products; use float32"
            )
        return compute_dtype("SubspaceKNN", self.compute, device)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        t = t.flatten()
        draws = self.draw(z, t, x_source, generator)
        return self._corrected_mean(draws, z, t)

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: Generator | None
    ) -> Tensor:
        """Draw images for the unwarped latents of `Warp.query`, weight them by the warped ones, and warp the mean."""
        t = t.flatten()
        near_z, near_t = warp.query(z, t, x_source, self.reference.mean())
        # The proposal only approximates the posterior of warped images, so images with negligible shares may be likely.
        draws = self.draw(near_z, near_t, None, generator, negligible_share=0.0)
        return warp.apply(self._corrected_mean(draws, z, t, warp).to(x_source.dtype))

    def draw(
        self,
        z: Tensor,
        t: Tensor,
        x_source: Tensor | None,
        generator: Generator | None,
        negligible_share: float = NEGLIGIBLE_SHARE,
    ) -> SubspaceDraws:
        """Choose the images of each z, see `subspace_draws`."""
        return subspace_draws(
            self.reference,
            self._projection(),
            z,
            t,
            n=self.n,
            negligible_share=negligible_share,
            generator=generator,
        )

    def _corrected_mean(
        self, draws: SubspaceDraws, z: Tensor, t: Tensor, warp: Warp | None = None
    ) -> Tensor:
        """Average the drawn images (Eq. 11), minus the known effect of the drawing: (B, *shape)."""
        projection = self._projection()
        # With float32 images, a float64 mean would differ from the mean of the certificate.
        wide = torch.promote_types(z.dtype, torch.float32)
        results = ResultRows(len(z))
        for rows, images in drawn_images(self.reference, draws, warp):
            weights = weights_of(draws, images, rows, z, t)
            excess = excess_of(projection, draws.of_rows(rows, images.places), weights)
            results.put(rows, images.mean(weights).to(wide), excess)

        mean, excess = results.columns
        # Use one product for all rows, because P is large: reading P again for every few rows would be slow.
        return mean - projection.components.expand(excess).view(mean.shape)

    def _certificate(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Certificate:
        """Compute the corrected mean and its error piece by piece, because the error needs the corrected mean."""
        t = t.flatten()
        draws = self.draw(z, t, x_source, generator)
        projection = self._projection()
        wide = torch.promote_types(z.dtype, torch.float32)
        results = ResultRows(len(z))
        for rows, images in drawn_images(self.reference, draws):
            of_rows = draws.of_rows(rows, images.places)
            weights = weights_of(draws, images, rows, z, t)
            excess = projection.components.expand(excess_of(projection, of_rows, weights))
            excess = excess.view(-1, *z.shape[1:])
            mean = images.mean(weights).to(wide) - excess

            sample_size = 1 / weights.square().sum(1)
            sq_error = corrected_sq_error(
                projection, of_rows, images, weights=weights, mean=mean, excess=excess
            )
            results.put(rows, mean, sample_size, weights.amax(1), sq_error)
        return Certificate(*results.columns)
