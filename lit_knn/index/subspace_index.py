"""Brute-force neighbour search in PyTorch, in the leading principal components."""

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.progress import with_progress
from lit_knn.index.base import Vectors
from lit_knn.index.pca import principal_components, project_images, sample_size
from lit_knn.index.precision import compute_dtype, full_float32
from lit_knn.index.torch_index import TorchIndex


class SubspaceIndex(TorchIndex):
    """Searches in r principal components, whose coordinates it holds in the number type of the products.

    The search is approximate. A distance is the squared distance within the subspace, plus the query's squared distance
    from the subspace. The second part is the same for all vectors. It is mostly noise, because noise is equally strong
    in all directions and images vary mostly within the subspace.

    Args:
        r: number of principal components, 1 <= r <= min(N, d).
        compute: see `TorchIndex`.
    """

    def __init__(self, r: int, compute: str = "auto") -> None:
        super().__init__(compute)
        if r < 1:
            raise InputError(f"SubspaceIndex: r must be at least 1, got {r}")
        self.r = r

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        if self.r > min(N, d):
            raise InputError(f"SubspaceIndex: r={self.r} is more than min(N, d) = min({N}, {d})")

    def build(self, vectors: Vectors) -> None:
        """Compute the components of a sample, and project all vectors on them."""
        device = next(iter(vectors.chunks())).device
        dtype = compute_dtype("SubspaceIndex", self.compute, device)
        d = vectors.sample(1).shape[1]
        rows = vectors.sample(sample_size(vectors.N, d, self.r))
        self._components = principal_components(rows, rows.mean(0), self.r).to(device)

        pieces = with_progress(vectors.chunks(), vectors.N, f"building SubspaceIndex, r={self.r}")
        projection = project_images(pieces, vectors.N, self._components, dtype)
        self._hold(projection.coordinates, projection.half_sq_norms)

    def to(self, device: torch.device) -> None:
        super().to(device)
        if self._values is not None:
            self._components = self._components.to(device)

    @full_float32()
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        sq_dist, ids, sq_norms = self._nearest(self._components.project(queries), k)
        # The query's squared distance from the subspace.
        all_sq_norms = (queries - self._components.mean).square().sum(1, keepdim=True)
        left_out = all_sq_norms - sq_norms
        return sq_dist + left_out, ids

    def memory(self, N: int, d: int) -> dict[str, int]:
        # `auto` counts as float32, which takes more than bfloat16.
        coordinate = 2 if self.compute == "bfloat16" else 4
        size = N * (self.r * coordinate + 4) + 4 * d * (self.r + 1)
        return {"index": size, "building of the index": 4 * d * sample_size(N, d, self.r)}
