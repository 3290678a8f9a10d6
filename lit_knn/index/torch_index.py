"""Brute-force neighbour search in PyTorch over 8-bit vectors, in the fastest type that the device multiplies."""

import torch
from torch import Tensor

from lit_knn.index.base import Vectors, with_progress
from lit_knn.index.product_search import ProductSearch
from lit_knn.linalg.int8 import HALF_SQ_NORM_ROWS, half_sq_norms, quantise


class TorchIndex(ProductSearch):
    """Searches all dimensions, held in 8 bits: a quarter of the memory of FAISS's `Flat`, without loss for pixels.

    The search is approximate, because the query is rounded: to 1/127 of its largest entry for `int8`, to 8 or 11 bits
    for `bfloat16` and `float16`. `search_recall` of `callbacks.EstimatorError` measures the loss. Estimators compute
    the likelihood of the images that they use, so they stay consistent.

    Args:
        compute: number type of the products: `int8` (CPUs), `bfloat16`, `float16`, `float32`, or `auto` for the fastest
            that the device multiplies natively.

    Raises:
        InputError: an unknown type; at `build` and `to`, a type that the device does not multiply natively.
    """

    types = ("float16", "int8")

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        """See `Index.check`. Accepts every set."""

    def build(self, vectors: Vectors) -> None:
        """See `Index.build`. Always builds anew, because reading a file would take about as long."""
        codes = quantise(lambda: with_progress(vectors.chunks(), vectors.N, "building TorchIndex"), vectors.N)
        self._scale, self._offset = codes.scale, codes.offset
        self._hold(codes.values, half_sq_norms(codes.values.split(HALF_SQ_NORM_ROWS)))

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Index.search`."""
        self._check_built()
        sq_dist, ids, _ = self._nearest(queries / self._scale - self._offset, k)
        return sq_dist * self._scale**2, ids

    def nbytes(self, N: int, d: int, device: torch.device) -> int:
        """See `Index.nbytes`."""
        return N * (d + 4)
