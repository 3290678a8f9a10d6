"""Brute-force neighbour search in PyTorch: in 8 bits, or in float32."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from lit_knn.common.extras import is_installed
from lit_knn.common.memory import work_bytes
from lit_knn.common.progress import with_progress
from lit_knn.index.base import Index, Vectors
from lit_knn.index.faiss_build import CHECKED_ROWS, PIXEL_TOLERANCE
from lit_knn.index.faiss_index import FaissIndex
from lit_knn.index.precision import (
    check_compute,
    compute_dtype,
    encode,
    full_float32,
    matmul_float32,
    whole_tiles,
)

# Pixel p has the code p − 128. In model space it is p/127.5 − 1 = (code + 1/2)/127.5.
PIXEL_SCALE, PIXEL_OFFSET = 1 / 127.5, 0.5


class TorchIndex(Index):
    """Searches vectors that it holds in 8 bits a dimension: a quarter of the memory of `Flat`, without loss for pixels.

    It multiplies all N vectors with each query, chunk by chunk, on the device of the vectors. k has no limit.

    The search is approximate. Vectors that are no pixels are rounded to 8 bits. `bfloat16` rounds the queries to 8
    significant bits, and on a CPU also the sums. `search_recall` of `callbacks.EstimatorError` measures the loss.

    Args:
        compute: number type of the products: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU that multiplies it,
            else float32.
    """

    def __init__(self, compute: str = "auto") -> None:
        self.compute = check_compute(type(self).__name__, compute)
        self._values: Tensor | None = None
        # A vector is scale · (value + offset).
        self._scale, self._offset = 1.0, torch.tensor(0.0)

    def build(self, vectors: Vectors) -> None:
        """Hold the codes of all vectors. There is no cache, because reading a file would take about as long."""
        scale, offset = _units(_small_chunks(vectors.chunks()))

        def code(x: Tensor) -> Tensor:
            return (x / scale - offset).round().to(torch.int8)

        self._store(vectors, code)
        self._scale = scale
        self._offset = torch.tensor(offset)

    def _store(self, vectors: Vectors, code: Callable[[Tensor], Tensor]) -> None:
        """Compute the codes of all vectors, and hold them."""
        chunks = with_progress(vectors.chunks(), vectors.N, f"building {type(self).__name__}")
        values, half_sq_norms = encode(_small_chunks(chunks), vectors.N, code)
        self._hold(values, half_sq_norms)

    def _hold(self, values: Tensor, half_sq_norms: Tensor) -> None:
        """Hold the values, (N, m) of any type, and ‖values‖²/2, (N,) float32."""
        self._dtype = compute_dtype(type(self).__name__, self.compute, values.device)
        self._values, self._half_sq_norms = values, half_sq_norms

    def to(self, device: torch.device) -> None:
        if self._values is not None and self._values.device != device:
            self._hold(self._values.to(device), self._half_sq_norms.to(device))
            self._offset = self._offset.to(device)

    @full_float32()
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        sq_dist, ids, _ = self._nearest(queries / self._scale - self._offset, k)
        # ‖z‖² + ‖x‖² − 2 z·x of equal vectors may be rounded to less than 0.
        return sq_dist.clamp_min_(0).mul_(self._scale**2), ids

    def _nearest(self, u: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Find the k values v nearest to each u.

        Args:
            u: (B, m), the queries in the units of the values.
            k: number of neighbours.

        Returns:
            ‖u − v‖² (B, k), ascending, ids (B, k), and ‖u‖² (B, 1).
        """
        assert self._values is not None, "search before build"
        fitting = whole_tiles(work_bytes(u.device) // (4 * max(len(u), 1)))
        # A chunk has at least k rows, so that merging the best of two chunks takes little time compared to the scores.
        rows = max(fitting, k)
        scores = self._scores(u.to(self._dtype), self._values.split(rows))
        best, ids = _k_smallest(scores, k)

        sq_norms = u.square().sum(1, keepdim=True)
        # ‖u − v‖² = ‖u‖² + 2·score.
        return torch.add(sq_norms, best, alpha=2), ids, sq_norms

    def _scores(self, u: Tensor, chunks: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Compare queries with the values v, chunk by chunk.

        Args:
            u: (B, m), the queries in the type of the products.
            chunks: all values, in their order.

        Yields:
            The first row of a chunk, and the scores (‖u − v‖² − ‖u‖²)/2 = ‖v‖²/2 − u·v of its values, (B, c) float32.
        """
        start = 0
        for chunk in chunks:
            products = _products(u, chunk)
            half_sq_norms = self._half_sq_norms[start : start + len(chunk)]
            yield start, torch.sub(half_sq_norms, products, out=products)
            start += len(chunk)

    def memory(self, N: int, d: int) -> dict[str, int]:
        return {"index": N * (d + 4)}


class FlatIndex(TorchIndex):
    """Searches vectors in float32, 4 bytes a dimension: exact except for rounding, like FAISS's `Flat`."""

    def __init__(self) -> None:
        super().__init__("float32")

    def build(self, vectors: Vectors) -> None:
        device = next(iter(vectors.chunks())).device
        sample = vectors.sample(min(vectors.N, 1024))
        # float32 would lose the digits of values far from 0, and keeps those of differences from a mean.
        self._offset = sample.mean(0).to(device)
        self._store(vectors, lambda x: x - self._offset)

    def memory(self, N: int, d: int) -> dict[str, int]:
        return {"index": 4 * N * (d + 1)}


def exact_index() -> Index:
    """Make an index that finds the exact neighbours: `FaissIndex("Flat")` if FAISS is installed, else `FlatIndex`."""
    return FaissIndex("Flat") if is_installed("faiss") else FlatIndex()


def default_index(device: torch.device, pixels: bool) -> Index:
    """Make the default index of a set on `device`: on a CPU `exact_index`, on CUDA a search that needs no FAISS.

    On CUDA `TorchIndex` holds pixels in 8 bits without loss. Floats are held in float32, because a single value far
    from the others would make 8-bit codes of all of them coarse.
    """
    if device.type != "cuda":
        return exact_index()
    return TorchIndex() if pixels else FlatIndex()


def _small_chunks(chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Split chunks, so that the results for a piece stay in the processor's cache."""
    for chunk in chunks:
        yield from chunk.split(CHECKED_ROWS)


def _units(chunks: Iterable[Tensor]) -> tuple[float, float]:
    """Return scale and offset of the 8-bit codes of vectors. The codes lose nothing if all values are pixels."""
    largest = 0.0
    are_pixels = True
    for x in chunks:
        largest = max(largest, x.abs().max().item())
        are_pixels = are_pixels and largest < 1 + PIXEL_TOLERANCE * PIXEL_SCALE
        if are_pixels:
            # The codes of pixels are whole numbers.
            codes = x / PIXEL_SCALE - PIXEL_OFFSET
            are_pixels = (codes - codes.round()).abs().max().item() < PIXEL_TOLERANCE

    if are_pixels:
        return PIXEL_SCALE, PIXEL_OFFSET
    # Codes from −127 to 127; the scale 1 serves vectors that are all 0.
    return largest / 127 or 1.0, 0.0


def _products(u: Tensor, values: Tensor) -> Tensor:
    """Return u·v of queries u (B, m) and values v (c, m): (B, c) float32.

    Few values are converted at a time, because a whole converted chunk would be larger than its
    products.
    """
    if values.dtype == u.dtype:
        return matmul_float32(u, values.T)

    rows = whole_tiles(work_bytes(u.device) // (u.itemsize * u.shape[1]))
    products = [matmul_float32(u, piece.to(u.dtype).T) for piece in values.split(rows)]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


def _k_smallest(scores: Iterator[tuple[int, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """Return the k smallest scores of each row over all chunks.

    Args:
        scores: the first column of a chunk, and its scores, (B, c).
        k: how many to return. A chunk may have fewer columns, if later ones have enough.

    Returns:
        Scores, ascending, and their columns: (B, k) each.
    """
    best = ids = torch.empty(0)
    for start, chunk in scores:
        columns = min(k, chunk.shape[1])
        near, near_ids = chunk.topk(columns, dim=1, largest=False, sorted=False)
        if start > 0:
            # Merge with the best of the chunks before.
            near, order = torch.cat([best, near], 1).topk(k, dim=1, largest=False, sorted=False)
            near_ids = torch.cat([ids, near_ids + start], 1).gather(1, order)
        best, ids = near, near_ids

    best, order = best.sort(1)
    return best, ids.gather(1, order)
