"""Computes the principal components of images, and projects images on them."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.common.rng import keyed_default_rng
from lit_knn.index.precision import encode, full_float32

# The components come from a subset of the images of this many bytes. They must be orthonormal but need not be optimal.
SAMPLE_BYTES = 128 * 2**20
# The randomised SVD computes so many more directions than components, which makes the components more precise.
OVERSAMPLING = 32


class PrincipalComponents(NamedTuple):
    """The r leading principal components of a set of images, float32."""

    mean: Tensor  # (d,), mean of all images
    basis: Tensor  # (d, r), P, orthonormal columns, leading components first
    variances: Tensor  # (r,), variance about `mean` along each component, over the sampled images
    residual_variance: float  # mean variance along the d − r other directions; 0 if r = d

    def project(self, z: Tensor) -> Tensor:
        """Compute P'(z − mean): (B, *shape) to (B, r), float32."""
        return (z.flatten(1).float() - self.mean) @ self.basis

    def to(self, device: torch.device) -> "PrincipalComponents":
        """Copy to another device."""
        return self._replace(
            mean=self.mean.to(device),
            basis=self.basis.to(device),
            variances=self.variances.to(device),
        )

    def expand(self, y: Tensor) -> Tensor:
        """Compute P·y, without the mean: (B, r) to (B, d), float32."""
        return y.float() @ self.basis.T


class Projection(NamedTuple):
    """The coordinates of all N images, y_i = P'(x_i − mean), rounded to the number type of the products with them."""

    components: PrincipalComponents
    coordinates: Tensor  # (N, r), y_i
    half_sq_norms: Tensor  # (N,), ‖y_i‖²/2 of the rounded values, float32


def sample_size(N: int, d: int, r: int) -> int:
    """Return how many of N vectors of dimension d are sampled to compute r principal components."""
    return min(N, max(SAMPLE_BYTES // (4 * d), 2 * r))


@full_float32()
def principal_components(sample: Tensor, mean: Tensor, r: int) -> PrincipalComponents:
    """Compute the leading principal components of a sample by randomised SVD (Halko 2011).

    Args:
        sample: (m, d), float32.
        mean: (d,), the point that variances are about.
        r: number of components, at most min(m, d).
    """
    centred = sample - mean
    # `svd_lowrank` draws from PyTorch's own generator.
    with keyed_default_rng(sample.device, r):
        _, _, v = torch.svd_lowrank(centred, q=min(r + OVERSAMPLING, *sample.shape), niter=2)
    # Orthonormalise again in full precision, because estimators split a vector into P·P'v and the rest.
    basis = torch.linalg.qr(v[:, :r])[0]
    variances = (centred @ basis).square().mean(0)

    d = len(mean)
    residual_variance = 0.0
    if r < d:
        total = centred.square().sum(1, dtype=torch.float64).mean()
        outside = total - variances.sum(dtype=torch.float64)
        # If no variance is left outside, rounding may make the difference of the two sums negative.
        residual_variance = max(outside.item(), 0.0) / (d - r)
    return PrincipalComponents(mean, basis, variances, residual_variance)


@full_float32()
def project_images(
    chunks: Iterable[Tensor], N: int, components: PrincipalComponents, dtype: torch.dtype
) -> Projection:
    """Project a stream of all images on components.

    Args:
        chunks: all images in order, in pieces (c, *shape).
        N: their number.
        components: the principal components.
        dtype: type of the coordinates.
    """
    return Projection(components, *encode(chunks, N, lambda x: components.project(x).to(dtype)))
