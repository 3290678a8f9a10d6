"""Base class of brute-force searches in PyTorch, which compute scores by products and keep the k best."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.index.base import Index
from lit_knn.linalg.dtypes import check_compute, compute_dtype, matmul_float32
from lit_knn.linalg.int8 import digits_of, product

# On a CPU, the scores of one chunk in float32 take about this many bytes, and so do the vectors converted at a time.
# The operating system would allocate larger arrays anew at each use, which is slow.
SCORE_BYTES = 16 * 2**20
GPU_FACTOR = 32


class ProductSearch(Index):
    """Scores all N vectors for each query by a product, chunk by chunk, and keeps the k best. k has no limit.

    All work stays on the device of the vectors.

    Args:
        compute: number type of the products: one of `types`, or `auto` for the fastest that the device multiplies
            natively.

    Raises:
        InputError: an unknown type; at `build` and `to`, a type that the device does not multiply natively.
    """

    built_on_cpu = False
    types: tuple[str, ...] = ("float16",)
    """Allowed number types of products, besides `float32` and `bfloat16`."""

    def __init__(self, compute: str = "auto") -> None:
        self.compute = check_compute(type(self).__name__, compute, *self.types)
        self._values: Tensor | None = None

    def _hold(self, values: Tensor, half_sq_norms: Tensor) -> None:
        """Store the vectors, (N, r) of any type, and ‖values‖²/2, (N,) float32."""
        self._dtype = self._product_type(values.device)
        self._values, self._half_sq_norms = values, half_sq_norms

    def to(self, device: torch.device) -> None:
        """See `Index.to`."""
        if self._values is not None and self._values.device != device:
            self._hold(self._values.to(device), self._half_sq_norms.to(device))

    def _product_type(self, device: torch.device) -> torch.dtype:
        return compute_dtype(type(self).__name__, self.compute, device, int8="int8" in self.types)

    def _check_built(self) -> None:
        if self._values is None:
            raise InputError(f"{type(self).__name__}: search before build")

    def _nearest(self, u: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Find the k nearest values. Distances are in the units of the values.

        Args:
            u: (B, r), the queries.
            k: number of neighbours.

        Returns:
            ‖u − v‖² for the k nearest values v, (B, k) ascending, their ids (B, k), and ‖u‖² (B, 1).
        """
        sq_norms = u.square().sum(1, keepdim=True)
        if len(u) == 0:
            return u.new_empty(0, k), torch.empty(0, k, dtype=torch.long, device=u.device), sq_norms
        # A chunk has at least k rows, so that merging costs little compared to the scores.
        best, ids = _k_smallest(self._scores(u, step=max(_score_bytes(u) // (4 * len(u)), k)), k)
        return torch.add(sq_norms, best, alpha=2), ids, sq_norms

    def _scores(self, u: Tensor, step: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and (‖u − v‖² − ‖u‖²)/2, (B, c) float32, for c <= `step` vectors at a time."""
        assert self._values is not None
        multiply = self._multiplier(u, self._values)
        for start in range(0, len(self._values), step):
            rows = slice(start, start + step)
            scores = multiply(rows)
            yield start, torch.sub(self._half_sq_norms[rows], scores, out=scores)

    def _multiplier(self, u: Tensor, values: Tensor) -> Callable[[slice], Tensor]:
        """Return a function that multiplies all queries with some rows of the values, (B, c) float32."""
        if self._dtype == torch.int8:
            digits, unit = digits_of(u, 1)
            return lambda rows: product(digits, values[rows].T).mul_(unit)
        if self._dtype != torch.float16:
            return _product_with(u.to(self._dtype), values)
        # float16 ends at 65504, which is |z| = 514 in pixels. Dividing by a power of two causes no rounding.
        unit = torch.exp2(torch.frexp(u.abs().amax(1, keepdim=True)).exponent.float())
        multiply = _product_with((u / unit).to(torch.float16), values)
        return lambda rows: multiply(rows).mul_(unit)


def _product_with(queries: Tensor, values: Tensor) -> Callable[[slice], Tensor]:
    """Return a function that multiplies all queries with some rows of the values, in the type of the queries."""
    step = max(_score_bytes(queries) // (queries.itemsize * values.shape[1]), 1)

    def multiply(rows: slice) -> Tensor:
        chunk = values[rows]
        if chunk.dtype == queries.dtype or len(chunk) <= step:
            return matmul_float32(queries, chunk.to(queries.dtype).T)
        out = torch.empty(len(queries), len(chunk), device=queries.device)
        # Few vectors are converted at a time, because a whole converted chunk would be larger than its scores.
        for start in range(0, len(chunk), step):
            some = slice(start, start + step)
            out[:, some] = matmul_float32(queries, chunk[some].to(queries.dtype).T)
        return out

    return multiply


def _score_bytes(u: Tensor) -> int:
    return SCORE_BYTES * (GPU_FACTOR if u.is_cuda else 1)


def _k_smallest(scores: Iterator[tuple[int, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """Return the k smallest scores of each row over all chunks, ascending, and their columns: (B, k) each."""
    (_, chunk), second = next(scores), next(scores, None)
    if second is None:
        best, ids = chunk.topk(k, dim=1, largest=False)
        return best, ids
    best, ids = chunk.topk(min(k, chunk.shape[1]), dim=1, largest=False, sorted=False)
    for start, chunk in itertools.chain([second], scores):
        near, near_ids = chunk.topk(min(k, chunk.shape[1]), dim=1, largest=False, sorted=False)
        best, ids = torch.cat([best, near], 1), torch.cat([ids, near_ids + start], 1)
        if best.shape[1] > k:
            best, order = best.topk(k, dim=1, largest=False, sorted=False)
            ids = ids.gather(1, order)
    best, order = best.sort(1)
    return best, ids.gather(1, order)
