"""Exact brute-force neighbour search in PyTorch, and the choice of the exact index by what is installed."""

import torch
from torch import Tensor

from lit_knn.extras import is_installed
from lit_knn.index.base import Index, Vectors, with_progress
from lit_knn.index.faiss_index import FaissIndex
from lit_knn.index.product_search import ProductSearch
from lit_knn.linalg.int8 import HALF_SQ_NORM_ROWS, half_sq_norms


class FlatIndex(ProductSearch):
    """Searches all dimensions of all vectors in float32, as FAISS's `Flat` does, without FAISS.

    The search is exact but for the rounding of float32. The vectors take 4 bytes a dimension.
    """

    def __init__(self) -> None:
        super().__init__("float32")

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        """See `Index.check`. Accepts every set."""

    def build(self, vectors: Vectors) -> None:
        """See `Index.build`."""
        values, start = torch.empty(0), 0
        for chunk in with_progress(vectors.chunks(), vectors.N, "building FlatIndex"):
            if start == 0:
                values = chunk.new_empty(vectors.N, chunk.shape[1])
            values[start : start + len(chunk)] = chunk
            start += len(chunk)
        self._hold(values, half_sq_norms(values.split(HALF_SQ_NORM_ROWS)))

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Index.search`."""
        self._check_built()
        sq_dist, ids, _ = self._nearest(queries, k)
        # ‖z‖² + ‖x‖² − 2 z·x of equal vectors may be rounded to less than 0.
        return sq_dist.clamp_min(0), ids

    def nbytes(self, N: int, d: int, device: torch.device) -> int:
        """See `Index.nbytes`."""
        return 4 * N * (d + 1)


def exact_index() -> Index:
    """Make the index of a reference set that was given none: `FaissIndex("Flat")` where FAISS is installed.

    Elsewhere it is `FlatIndex`. Both find the exact neighbours, so that results differ by rounding alone. Settings
    and tables name the class of the index.
    """
    return FaissIndex("Flat") if is_installed("faiss") else FlatIndex()
