"""Principal components and covariance of a reference set. The set computes them once and keeps them."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.common.progress import with_progress
from lit_knn.common.rng import subset_ids
from lit_knn.index.pca import (
    PrincipalComponents,
    Projection,
    principal_components,
    project_images,
    sample_size,
)
from lit_knn.reference.images import chunk_rows
from lit_knn.reference.reference_set import ReferenceSet


def components_of(reference: ReferenceSet, r: int) -> PrincipalComponents:
    """Return the r leading principal components, computed from a seeded subset of the images.

    All ranks use the components of the first rank, because other kinds of processors round differently and may find
    mirrored or rotated components.
    """

    def make() -> PrincipalComponents:
        ids = subset_ids(reference.N, sample_size(reference.N, reference.d, r))
        sample = reference.take(ids.to(reference.device)).flatten(1)
        of_rank = principal_components(sample, reference.mean(), r)

        residual = torch.tensor(
            [of_rank.residual_variance], dtype=torch.float64, device=reference.device
        )
        return PrincipalComponents(
            reference.of_first(of_rank.mean),
            reference.of_first(of_rank.basis),
            reference.of_first(of_rank.variances),
            reference.of_first(residual).item(),
        )

    return reference.cached(("components", r), make)


def projection_of(
    reference: ReferenceSet, r: int, dtype: torch.dtype = torch.float32
) -> Projection:
    """Return the coordinates of all N images in principal components. Each rank projects the images of its shard.

    Args:
        reference: the images.
        r: number of components.
        dtype: type of the coordinates.
    """
    components = components_of(reference, r)
    part = reference.local

    def make() -> Projection:
        chunks = (x for _, x in part.chunks(chunk_rows(part.d)))
        images = with_progress(chunks, part.N, f"projecting on {r} principal components")
        projected = project_images(images, part.N, components, dtype)
        coordinates = reference.of_all(projected.coordinates)
        return Projection(components, coordinates, reference.of_all(projected.half_sq_norms))

    return reference.cached(("projection", r, dtype), make)


class Covariance(NamedTuple):
    """The covariance C = P·Λ·P' of all N images, mirrored ones included, with divisor N; r = min(N, d)."""

    variances: Tensor  # (r,), Λ, float64
    basis: Tensor  # (d, r), P, float64, orthonormal columns


def covariance_of(reference: ReferenceSet) -> Covariance:
    """Return the covariance of all images, computed in float64.

    It costs N·d·min(N, d) multiplications and a decomposition of min(N, d)³, and the set keeps 8·d·min(N, d) bytes.
    """
    return reference.cached("covariance", lambda: _covariance(reference))


def _covariance(reference: ReferenceSet) -> Covariance:
    """Compute the covariance: from the images themselves if there are at most d of them, else from their products."""
    mean = reference.sum() / reference.N
    chunks = (x.flatten(1).double() - mean for _, x in reference.chunks(chunk_rows(reference.d)))
    if reference.d >= reference.N:
        _, lengths, directions = torch.linalg.svd(torch.cat(list(chunks)), full_matrices=False)
        return Covariance(lengths.square() / reference.N, directions.T.contiguous())
    products = torch.zeros(reference.d, reference.d, dtype=torch.float64, device=reference.device)
    for x in chunks:
        products.addmm_(x.T, x)
    variances, basis = torch.linalg.eigh(products / reference.N)
    # Rounding may make a variance negative.
    return Covariance(variances.clamp(min=0), basis)
