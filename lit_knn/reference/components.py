"""Principal components of a reference set, and its images in them. The set computes both once and keeps them."""

import torch

from lit_knn.errors import InputError
from lit_knn.index.base import with_progress
from lit_knn.linalg.pca import PrincipalComponents, Projection, principal_components, project_images, sample_size
from lit_knn.reference.base import Reference
from lit_knn.reference.reference_set import chunk_rows
from lit_knn.rng import keyed_generator


def components_of(reference: Reference, r: int) -> PrincipalComponents:
    """Compute the r leading principal components from a seeded subset of the images (or of the first rank's shard).

    A rank on another kind of processor rounds differently, and may find some components mirrored or turned.

    Raises:
        InputError: r outside [1, min(N, d)].
    """
    if not 1 <= r <= min(reference.N, reference.d):
        raise InputError(f"r={r} must be between 1 and min(N, d) = min({reference.N}, {reference.d})")
    return reference.cached(("components", r), lambda: _components(reference, r))


def projection_of(reference: Reference, r: int, dtype: torch.dtype = torch.float32) -> Projection:
    """Project all N images to r principal components of type `dtype`. With shards, each rank projects its own images.

    It shows a progress bar.

    Raises:
        InputError: r outside [1, min(N, d)].
    """
    components = components_of(reference, r)
    return reference.cached(("projection", r, dtype), lambda: _projection(reference, components, dtype))


def _components(reference: Reference, r: int) -> PrincipalComponents:
    ids = torch.randperm(reference.N, generator=keyed_generator("cpu", 0))
    ids = ids[: sample_size(reference.N, reference.d, r)].to(reference.device)
    own = principal_components(reference.take(ids).flatten(1), reference.mean(), r)
    mean, basis, variances = map(reference.of_first, own[:3])
    outside = torch.tensor([own.residual_variance], dtype=torch.float64, device=reference.device)
    return PrincipalComponents(mean, basis, variances, reference.of_first(outside).item())


def _projection(reference: Reference, components: PrincipalComponents, dtype: torch.dtype) -> Projection:
    part, description = reference.local, f"projecting on {components.basis.shape[1]} principal components"
    images = with_progress((x for _, x in part.chunks(chunk_rows(part.d))), part.N, description)
    own = project_images(images, part.N, components, dtype)
    return Projection(components, reference.of_all(own.coordinates), reference.of_all(own.half_sq_norms))
