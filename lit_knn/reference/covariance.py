"""The covariance of a reference set in its principal axes, and its Wiener filter. The set computes it once."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.reference.base import Reference
from lit_knn.reference.reference_set import chunk_rows


class Covariance(NamedTuple):
    """The covariance C = P·Λ·P' of all N images, mirrored ones included, divided by N.

    Attributes:
        variances: (r,), Λ, float64, r = min(N, d).
        basis: (d, r), P, float64, orthonormal columns.
    """

    variances: Tensor
    basis: Tensor

    def wiener_filter(self, t: float) -> Tensor:
        """Compute W(t) = C·(C + t²I)⁻¹, (d, d) float64. It costs d²·r multiplications."""
        return (self.basis * (self.variances / (self.variances + t**2))) @ self.basis.T


def covariance_of(reference: Reference) -> Covariance:
    """Compute the covariance of all images in float64.

    It costs N·d·min(N, d) multiplications and a decomposition of min(N, d)³, and holds 8·d·min(N, d) bytes.
    """
    return reference.cached("covariance", lambda: _covariance(reference))


def _covariance(reference: Reference) -> Covariance:
    mean, rows = reference.local._sum() / reference.N, chunk_rows(reference.d)
    chunks = (x.flatten(1).double() - mean for _, x in reference.chunks(rows))
    if min(reference.N, reference.d) == reference.N:
        _, lengths, directions = torch.linalg.svd(torch.cat(list(chunks)), full_matrices=False)
        return Covariance(lengths.square() / reference.N, directions.T.contiguous())
    products = torch.zeros(reference.d, reference.d, dtype=torch.float64, device=reference.device)
    for x in chunks:
        products.addmm_(x.T, x)
    variances, basis = torch.linalg.eigh(products / reference.N)
    # A variance is not negative, but rounding may make it so.
    return Covariance(variances.clamp(min=0), basis)
