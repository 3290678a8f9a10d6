"""Brute-force neighbour search in PyTorch, in the leading principal components of the vectors."""

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.index.base import Vectors, with_progress
from lit_knn.index.product_search import ProductSearch
from lit_knn.linalg.pca import principal_components, project_images, sample_size


class SubspaceIndex(ProductSearch):
    """Searches r principal components, held in the number type of the products.

    The search is approximate: a distance is the one within the subspace plus the query's squared distance from the
    subspace, which is the same for all vectors. Noise is isotropic and images are not, so the dropped directions hold
    mostly noise. `search_recall` of `callbacks.EstimatorError` measures the loss. Estimators compute the likelihood of
    the images that they use, so they stay consistent.

    Args:
        r: number of principal components.
        compute: number type of the products: `bfloat16`, `float16`, `float32`, or `auto` for the fastest that the
            device multiplies natively.

    Raises:
        InputError: r < 1, an unknown type; at `check`, r > min(N, d); at `build` and `to`, a type that the device does
            not multiply natively.
    """

    def __init__(self, r: int, compute: str = "auto") -> None:
        super().__init__(compute)
        if r < 1:
            raise InputError(f"SubspaceIndex: r must be at least 1, got {r}")
        self.r = r

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        """See `Index.check`."""
        if self.r > min(N, d):
            raise InputError(f"SubspaceIndex: r={self.r} is more than min(N, d) = min({N}, {d})")

    def build(self, vectors: Vectors) -> None:
        """See `Index.build`. Always builds anew, because reading a file would take about as long."""
        device, d = next(iter(vectors.chunks())).device, vectors.sample(1).shape[1]
        rows = vectors.sample(sample_size(vectors.N, d, self.r))
        self._components = principal_components(rows, rows.mean(0), self.r).to(device)
        pieces = with_progress(vectors.chunks(), vectors.N, f"building SubspaceIndex, r={self.r}")
        projection = project_images(pieces, vectors.N, self._components, self._product_type(device))
        self._hold(projection.coordinates, projection.half_sq_norms)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Index.search`."""
        self._check_built()
        sq_dist, ids, sq_norms = self._nearest(self._components.project(queries), k)
        left_out = (queries - self._components.mean).square().sum(1, keepdim=True) - sq_norms
        return sq_dist + left_out, ids

    def nbytes(self, N: int, d: int, device: torch.device) -> int:
        """See `Index.nbytes`."""
        known = device.type != "cuda" or torch.cuda.is_available()
        # On the GPU of another machine, `auto` uses a type of two bytes.
        value = self._product_type(device).itemsize if known else 4 if self.compute == "float32" else 2
        return N * (self.r * value + 4) + 4 * d * (self.r + 1)

    def build_bytes(self, N: int, d: int) -> int:
        """See `Index.build_bytes`. Counts the sample for the principal components."""
        return 4 * d * sample_size(N, d, self.r)

    def to(self, device: torch.device) -> None:
        """See `Index.to`."""
        super().to(device)
        if self._values is not None:
            self._components = self._components.to(device)
