"""Images in the coordinates of their leading principal components."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.rng import keyed_default_rng

# The basis comes from a subset: it need not be the best one, only orthonormal. The coordinates are of all images.
SAMPLE_BYTES = 256 * 2**20
OVERSAMPLING = 32


class Projection(NamedTuple):
    """y_i = P'(x_i − mean) of N images, with the r orthonormal columns of P.

    Attributes:
        mean: (d,), mean of all images, float32.
        basis: (d, r), P, float32.
        coordinates: (N, r), y_i, in the type they are multiplied in. They define themselves what they are: whoever uses
            them must use these rounded values throughout.
        half_sq_norms: (N,), ‖y_i‖²/2 of these values, float32.
        variances: (r,), mean of y² over the images, float32.
        residual_variance: mean square of x − mean − P·y over images and all d dimensions.
    """

    mean: Tensor
    basis: Tensor
    coordinates: Tensor
    half_sq_norms: Tensor
    variances: Tensor
    residual_variance: float

    def project(self, z: Tensor) -> Tensor:
        """P'(z − mean): (B, *shape) to (B, r), float32."""
        return (z.flatten(1).float() - self.mean) @ self.basis

    def expand(self, y: Tensor) -> Tensor:
        """P·y, without the mean: (B, r) to (B, d), float32."""
        return y.float() @ self.basis.T


def principal_basis(sample: Tensor, r: int) -> Tensor:
    """The r leading principal directions of a sample by randomised SVD (Halko et al. 2011).

    Args:
        sample: (m, d), float32.
        r: number of directions, r <= min(m, d).

    Returns:
        (d, r), float32, orthonormal columns.
    """
    centred = sample - sample.mean(0)
    with keyed_default_rng(sample.device, r):
        _, _, v = torch.svd_lowrank(centred, q=min(r + OVERSAMPLING, *sample.shape), niter=2)
    # Once more orthonormal in full precision: what lies outside is measured against it.
    return torch.linalg.qr(v[:, :r])[0]


def project_images(
    chunks: Iterator[tuple[int, Tensor]], N: int, mean: Tensor, basis: Tensor, dtype: torch.dtype
) -> Projection:
    """Project a stream of images.

    Args:
        chunks: first row and images (c, *shape) of each piece, as `ReferenceSet.chunks`; all N in order.
        N: number of images.
        mean: (d,), their mean.
        basis: (d, r), orthonormal columns.
        dtype: of the coordinates.

    Returns:
        The projection.
    """
    d, r = basis.shape
    coordinates = torch.empty(N, r, dtype=dtype, device=basis.device)
    half_sq_norms = torch.empty(N, device=basis.device)
    variances = torch.zeros(r, dtype=torch.float64, device=basis.device)
    residual = torch.zeros((), dtype=torch.float64, device=basis.device)
    for start, x in chunks:
        centred = x.flatten(1) - mean
        y = centred @ basis
        residual += centred.square().sum(dtype=torch.float64) - y.square().sum(dtype=torch.float64)
        coordinates[start : start + len(y)] = y
        sq_norms = y.to(dtype).float().square()
        half_sq_norms[start : start + len(y)] = sq_norms.sum(1) / 2
        variances += sq_norms.sum(0)
    return Projection(mean, basis, coordinates, half_sq_norms, (variances / N).float(), residual.item() / (N * d))
