"""Brute-force neighbour search in PyTorch, in the fastest type that the device multiplies."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.index.base import Index, with_progress
from lit_knn.linalg.dtypes import check_compute, compute_dtype, matmul_float32
from lit_knn.linalg.int8 import HALF_SQ_NORM_ROWS, Codes, digits_of, half_sq_norms, product, quantise
from lit_knn.linalg.pca import PrincipalComponents, principal_components, sample_size

# Upper bound of the float32 scores of one chunk, and of vectors that are converted to be multiplied; larger arrays come
# fresh from the operating system on a CPU.
SCORE_BYTES = 16 * 2**20
GPU_FACTOR = 32


class TorchIndex(Index):
    """Scores all N vectors for each query by a product, chunk by chunk, and keeps the k best; no limit on k.

    It works where the vectors are; nothing leaves the device. The vectors are held in 8 bits, a quarter of FAISS's
    `Flat` and without loss if they are pixels; or, with `r`, as r principal components in the type of the products.

    What it finds is approximate. Of 8-bit vectors the query is rounded: to 1/127 of its largest entry for `int8`, to 8
    or 11 bits for `bfloat16` and `float16`. With `r`, distances are those within the subspace plus the query's squared
    distance from it, which is the same for all vectors. Noise is isotropic and images are not, so the directions left
    out hold mostly noise. `search_recall` of `callbacks.EstimatorError` tells what is lost; estimators compute the
    likelihood of what they use themselves.

    Args:
        compute: type of the products: `int8` (CPUs; not with `r`), `bfloat16`, `float16`, `float32`, or `auto` for the
            fastest that the device multiplies natively.
        r: principal components to search in; null for all dimensions.

    Raises:
        InputError: an unknown type, r < 1, `int8` with `r`; at `check`, r > min(N, d); at `build` and `to`, a type that
            the device does not multiply natively.
    """

    def __init__(self, compute: str = "auto", r: int | None = None) -> None:
        self.compute = check_compute("TorchIndex", compute, "float16", "int8")
        self.r = r
        if r is not None and r < 1:
            raise InputError(f"TorchIndex: r must be at least 1, got {r}")
        if r is not None and compute == "int8":
            raise InputError("TorchIndex: compute=int8 does not go with r: components differ too much in size")
        self._components: PrincipalComponents | None = None
        self._codes: Codes | None = None

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        """See `Index.check`."""
        if self.r is not None and self.r > min(N, d):
            raise InputError(f"TorchIndex: r={self.r} is more than min(N, d) = min({N}, {d})")

    def build(
        self,
        chunks: Callable[[], Iterable[Tensor]],
        sample: Callable[[int], Tensor],
        N: int,
        fingerprint: Callable[[], str],
        shared: bool = True,
    ) -> None:
        """See `Index.build`; always builds, which takes about as long as reading a file would."""
        if self.r is None:
            self._codes = quantise(lambda: with_progress(chunks(), N, "building TorchIndex"), N)
        else:
            d = sample(1).shape[1]
            rows = sample(sample_size(N, d, self.r))
            self._components = principal_components(rows, rows.mean(0), self.r)
            self._codes = self._project(with_progress(chunks(), N, f"building TorchIndex, r={self.r}"), N)
        self._dtype = self._product_type(self._codes.values.device)
        self._half_sq_norms = half_sq_norms(self._codes.values.split(HALF_SQ_NORM_ROWS))

    def _project(self, chunks: Iterable[Tensor], N: int) -> Codes:
        components = self._components
        assert components is not None
        values, start = None, 0
        for chunk in chunks:
            components = components.to(chunk.device)
            dtype = self._product_type(chunk.device)
            values = torch.empty(N, self.r or 0, dtype=dtype, device=chunk.device) if values is None else values
            values[start : start + len(chunk)] = components.project(chunk)
            start += len(chunk)
        self._components = components
        assert values is not None
        return Codes(values, scale=1.0, offset=0.0, exact=False)

    def _product_type(self, device: torch.device) -> torch.dtype:
        return compute_dtype("TorchIndex", self.compute, device, int8=self.r is None)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Index.search`."""
        if self._codes is None:
            raise InputError("TorchIndex: search before build")
        if len(queries) == 0:
            return queries.new_empty(0, k), torch.empty(0, k, dtype=torch.long, device=queries.device)
        codes, components = self._codes, self._components
        u = (queries if components is None else components.project(queries)) / codes.scale - codes.offset
        # At least k at a time, so that merging costs no more than a few scores of each.
        scores = self._scores(u, step=max(_score_bytes(u) // (4 * len(u)), k))
        best, ids = _k_smallest(scores, k)
        sq_norms = u.square().sum(1, keepdim=True)
        sq_dist = (2 * best + sq_norms) * codes.scale**2
        if components is not None:
            sq_dist += (queries - components.mean).square().sum(1, keepdim=True) - sq_norms
        return sq_dist, ids

    def _scores(self, u: Tensor, step: int) -> Iterator[tuple[int, Tensor]]:
        """Half the squared distances, less their ‖u‖²/2, to `step` vectors at a time: first row and (B, c) float32."""
        assert self._codes is not None
        multiply = self._multiplier(u)
        for start in range(0, len(self._codes.values), step):
            rows = slice(start, start + step)
            yield start, self._half_sq_norms[rows] - multiply(rows)

    def _multiplier(self, u: Tensor) -> Callable[[slice], Tensor]:
        """The products of all queries with some of the vectors, (B, c) float32."""
        assert self._codes is not None
        values = self._codes.values
        if self._dtype == torch.int8:
            digits, unit = digits_of(u, 1)
            return lambda rows: product(digits, values[rows].T).mul_(unit)
        # float16 ends at 65504, which is |z| = 514 in pixels. A power of two rounds nothing.
        unit = torch.exp2(torch.frexp(u.abs().amax(1, keepdim=True)).exponent.float())
        rounded, dtype = (u / unit).to(self._dtype), self._dtype
        if values.dtype == dtype:
            return lambda rows: matmul_float32(rounded, values[rows].T).mul_(unit)
        step = max(_score_bytes(u) // (dtype.itemsize * values.shape[1]), 1)

        def multiply(rows: slice) -> Tensor:
            chunk = values[rows]
            out = torch.empty(len(u), len(chunk), device=u.device)
            # A few converted vectors at a time: all of a chunk would be an array larger than its scores.
            for start in range(0, len(chunk), step):
                some = slice(start, start + step)
                out[:, some] = matmul_float32(rounded, chunk[some].to(dtype).T)
            return out.mul_(unit)

        return multiply

    def nbytes(self, N: int, d: int, device: torch.device) -> int:
        """See `Index.nbytes`."""
        if self.r is None:
            return N * (d + 4)
        known = device.type != "cuda" or torch.cuda.is_available()
        # A GPU of another machine: two bytes, unless said otherwise.
        value = self._product_type(device).itemsize if known else 4 if self.compute == "float32" else 2
        return N * (self.r * value + 4) + 4 * d * (self.r + 1)

    def build_bytes(self, N: int, d: int) -> int:
        """See `Index.build_bytes`: the sample that principal components come from."""
        return 0 if self.r is None else 4 * d * sample_size(N, d, self.r)

    def to(self, device: torch.device) -> None:
        """See `Index.to`."""
        if self._codes is None or self._codes.values.device == device:
            return
        self._dtype = self._product_type(device)
        self._codes = self._codes._replace(values=self._codes.values.to(device))
        self._half_sq_norms = self._half_sq_norms.to(device)
        self._components = None if self._components is None else self._components.to(device)


def _score_bytes(u: Tensor) -> int:
    return SCORE_BYTES * (GPU_FACTOR if u.is_cuda else 1)


def _k_smallest(scores: Iterator[tuple[int, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The k smallest scores of each row over all chunks, ascending, and their columns: (B, k) each."""
    start, chunk = next(scores)
    best, ids = chunk.topk(min(k, chunk.shape[1]), dim=1, largest=False, sorted=False)
    for start, chunk in scores:
        near, near_ids = chunk.topk(min(k, chunk.shape[1]), dim=1, largest=False, sorted=False)
        best, ids = torch.cat([best, near], 1), torch.cat([ids, near_ids + start], 1)
        if best.shape[1] > k:
            best, order = best.topk(k, dim=1, largest=False, sorted=False)
            ids = ids.gather(1, order)
    best, order = best.sort(1)
    return best, ids.gather(1, order)
