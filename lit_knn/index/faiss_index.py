"""Neighbour search by FAISS (Johnson et al. 2019), as in the paper."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.index import faiss_gpu
from lit_knn.index.base import Index, Vectors, numbered, with_progress
from lit_knn.index.cache import IndexCache
from lit_knn.index.faiss_parts import (
    after_transforms,
    code_vectors_themselves,
    held_bytes,
    import_faiss,
    inverted_lists,
    is_plain_sq8,
    let_codes_be_pixels,
    let_codes_share_their_range,
    most_components,
    not_l2,
    projections,
    put_projections_before,
    reason,
    transforms,
)

LARGEST_DIMENSION = 2**31 - 1
# With these numbers FAISS ends the process, or never comes back.
TOO_SMALL = re.compile(r"(?:HNSW|NSG)0*1(?!\d)|[A-Za-z]*(?<!\d)0+(?!\d)")
# FAISS trains k-means on at most this many points per list, and discards more.
TRAINING_POINTS_PER_LIST = 256
# Scalar quantisers learn a range per dimension. This many images are enough to learn the range.
QUANTISER_TRAINING_POINTS = 50_000
# Limit of the training points, which are float32. Without it, ImageNet's would take more memory than the index.
TRAINING_BYTES = 2 * 2**30
# Vectors are added about this many bytes at a time.
CHUNK_BYTES = 64 * 2**20
# Number of rows that are checked at a time. The results of so few rows stay in the processor's cache.
CHECKED_ROWS = 64
# Tolerance in grey levels. It is above the largest rounding error of a pixel in float32.
PIXEL_TOLERANCE = 1e-3


class FaissIndex(Index):
    """An index described by a FAISS factory string, over float32 vectors with the L2 metric.

    Args:
        factory: `Flat` (exact, 4 bytes a dimension), `SQ8` (8-bit, a quarter of the memory), `IVF<c>,Flat` or
            `IVF<c>,SQ8` (c lists, `nprobe` of them searched) are the paper's kinds. Other L2 indexes work, too, if
            FAISS can build them from vectors alone; other distances (`LSH`, `L2norm,…`) are refused. Distances in
            principal components (`PCA256,IVF<c>,SQ8`) get the query's squared distance from the subspace added.
        nprobe: lists searched per query, for IVF only. The default searches 1/50 of them, about the share of the
            paper (25 of 1788 on CelebA, 100 of 4527 on ImageNet).
        lossless: make the 256 codes of `SQ8` and `IVF<c>,SQ8` the 256 values of a pixel, so that uint8 images keep
            every digit. By default FAISS spreads the codes over the range of each dimension; with lists, over the
            range of its difference from the centre of the list. On a GPU, lossless codes in lists work for any d and
            k <= 2048, others only for few neighbours; see `lit_knn.index.faiss_gpu`.
        cache_dir: folder that keeps built indexes. A later run with the same images, `factory` and `lossless` maps the
            file instead of building, and all processes of a machine share its memory. null builds in each process.
        gpu_float16: on a GPU, hold the vectors of `Flat` and the centres of lists in half precision.
        gpu_scratch_mib: on a GPU, memory in MiB that FAISS reserves for intermediate results; null for FAISS's own
            choice, about 1.5 GiB.

    Raises:
        InputError: nprobe < 1, gpu_scratch_mib < 0, an empty cache_dir; at `check`, a factory FAISS refuses or
            whose distances are not L2, nprobe
            above the number of lists or without lists, more lists than vectors, `lossless` with another factory, what
            FAISS cannot do on the device (see `faiss_gpu.check_gpu`); at
            `build`, a folder that cannot be written to, `lossless` with values that are not pixels, and other data
            that FAISS refuses.
    """

    def __init__(
        self,
        factory: str = "Flat",
        nprobe: int | None = None,
        lossless: bool = False,
        cache_dir: str | None = None,
        gpu_float16: bool = False,
        gpu_scratch_mib: int | None = None,
    ) -> None:
        if nprobe is not None and nprobe < 1:
            raise InputError(f"FaissIndex: nprobe must be at least 1, got {nprobe}")
        if gpu_scratch_mib is not None and gpu_scratch_mib < 0:
            raise InputError(f"FaissIndex: gpu_scratch_mib must be at least 0, got {gpu_scratch_mib}")
        self.factory = factory
        self.nprobe = nprobe
        self.lossless = lossless
        self.gpu_float16 = gpu_float16
        # This attribute is private, because results depend only on the public attributes.
        self._gpu_scratch_mib = gpu_scratch_mib
        self._cache = None if cache_dir is None else IndexCache(cache_dir, _write, _read)
        self.shared = cache_dir is not None
        self._index: Any = None
        self._gpu: faiss_gpu.GpuIndex | None = None
        self._projections: list[tuple[Tensor, Tensor]] = []

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        """See `Index.check`. Creates the empty FAISS index, which costs almost nothing."""
        index = self._create(N, d)
        if device is not None and device.type != "cpu":
            if self.lossless:
                let_codes_share_their_range(index)
            faiss_gpu.check_gpu(index, device, k, self.factory)

    def build(self, vectors: Vectors) -> None:
        """See `Index.build`. Trains the lists and the quantiser on a subset, then adds all vectors."""
        if self._cache is None:
            index = self._build(vectors)
        else:
            settings = {"factory": self.factory, "lossless": self.lossless}
            index = self._cache.get(vectors, settings, {"faiss": import_faiss().__version__}, self._build)
            self._set_nprobe(index, vectors.N)
        self._index, self._gpu, self._projections = index, None, projections(index)

    def _build(self, vectors: Vectors) -> Any:
        N = vectors.N
        probe = self._checked(vectors.sample(min(N, 16)))
        index = self._create(N, probe.shape[1])
        try:
            self._train(index, vectors.sample, N)
            for chunk in with_progress(vectors.chunks(), N, f"building FAISS index {self.factory}"):
                index.add(self._checked(chunk.cpu().contiguous()))
        except RuntimeError as error:
            raise InputError(f"FaissIndex: FAISS cannot build factory={self.factory!r}: {reason(error)}") from error
        return index

    def _train(self, index: Any, sample: Callable[[int], Tensor], N: int) -> None:
        """Train the lists and the quantiser. The sample is freed before vectors are added."""
        if not index.is_trained:
            rows = sample(min(N, self._training_points(index)))
            _expect_few_points(index, N, self.factory)
            for piece in with_progress([rows], len(rows), f"training FAISS index {self.factory}"):
                index.train(piece)
        if self.lossless:
            let_codes_be_pixels(index)

    def _checked(self, vectors: Tensor) -> Tensor:
        """Return the vectors. With `lossless`, refuse values that are not pixels."""
        for rows in vectors.split(CHECKED_ROWS) if self.lossless else ():
            pixels = (rows + 1) * 127.5
            strange = ((pixels - pixels.round()).abs() > PIXEL_TOLERANCE) | (pixels < -0.5) | (pixels > 255.5)
            if strange.any():
                value = rows[strange][0].item()
                raise InputError(f"FaissIndex: lossless=True needs uint8 images, the data holds the float {value:.6g}")
        return vectors

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Index.search`. Runs on the device of the index, without copies to the host."""
        if self._index is None and self._gpu is None:
            raise InputError("FaissIndex: search before build")
        if queries.device != self._device:
            raise InputError(
                f"FaissIndex is on {self._device} but the queries are on {queries.device}: move it with to()"
            )
        queries = queries.float().contiguous()
        projected, left_out = self._project(queries)
        try:
            if self._gpu is None:
                sq_dist, ids = self._index.search(queries, k)
            else:
                sq_dist, ids = self._gpu.search(projected, k)
        except RuntimeError as error:
            raise InputError(f"FaissIndex: FAISS cannot search factory={self.factory!r}: {reason(error)}") from error
        if self._projections:
            sq_dist = sq_dist + left_out
        return sq_dist.masked_fill(ids < 0, torch.inf), ids

    def locate(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """See `Index.locate`. Searches one list, because a vector is in the list with the nearest centre."""
        lists = None if self._index is None else inverted_lists(self._index)
        if lists is None:
            return self.search(queries, 1)
        nprobe, lists.nprobe = lists.nprobe, 1
        try:
            return self.search(queries, 1)
        finally:
            lists.nprobe = nprobe

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self._gpu is None else self._gpu.device

    def _project(self, queries: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the queries after the projections, and the squared length of what these drop: (B, 1).

        FAISS's distances lack this part. KNN mixes these distances with exact ones of the nearest images. Without this
        part, all others would seem too near. On a CPU, FAISS projects the queries itself.
        """
        left_out: Tensor | float = 0.0
        for centre, rows in self._projections:
            centred = queries - centre
            queries = centred @ rows.T
            left_out = left_out + (centred.square().sum(1, keepdim=True) - queries.square().sum(1, keepdim=True))
        return queries, left_out

    def to(self, device: torch.device) -> None:
        """See `Index.to`. FAISS runs on the CPU and on CUDA devices. An index goes from GPU to GPU through the CPU."""
        device, built = numbered(device), self._index is not None or self._gpu is not None
        if not built or device == self._device:
            return
        if self._gpu is not None:
            self._to_cpu(self._gpu)
        if device.type != "cpu":
            self._to_gpu(device)

    def _to_cpu(self, gpu: faiss_gpu.GpuIndex) -> None:
        index = gpu.to_cpu()
        if self.lossless:
            let_codes_be_pixels(index)
        self._projections = [(centre.cpu(), rows.cpu()) for centre, rows in self._projections]
        self._index, self._gpu = put_projections_before(index, self._projections), None

    def _to_gpu(self, device: torch.device) -> None:
        if self.lossless:
            let_codes_share_their_range(self._index)
        faiss_gpu.check_gpu(self._index, device, 1, self.factory)
        if transforms(self._index) and not self._projections:
            raise InputError(f"FaissIndex: factory={self.factory!r} stretches vectors: it searches only on the CPU")
        self._gpu = faiss_gpu.GpuIndex(self._index, device, self.factory, self.gpu_float16, self._gpu_scratch_mib)
        self._index = None
        self._projections = [(centre.to(device), rows.to(device)) for centre, rows in self._projections]

    def nbytes(self, N: int, d: int, device: torch.device) -> int | None:
        """See `Index.nbytes`. The size is known for flat codes and lists of flat codes, also after linear transforms.

        On a GPU the scratch memory is included.
        """
        index = self._create(N, d)
        if device.type == "cpu":
            return held_bytes(index, N)
        held = held_bytes(after_transforms(index), N)
        if held is None:
            return None
        scratch = faiss_gpu.SCRATCH_MIB if self._gpu_scratch_mib is None else self._gpu_scratch_mib
        flat = isinstance(after_transforms(index), import_faiss().IndexFlat)
        steps = sum(4 * step.d_in * (step.d_out + 1) for step in transforms(index))
        return (held // 2 if flat and self.gpu_float16 else held) + steps + scratch * 2**20

    def build_bytes(self, N: int, d: int) -> int:
        """See `Index.build_bytes`. Counts the training points, in float32 and as stored, or the vectors being added.

        With lists, FAISS also copies the training points, to code their differences from the centres. Without lists,
        it copies the codes each time their array grows.
        """
        index = self._create(N, d)
        lists = inverted_lists(index)
        growth = N * getattr(index, "code_size", 0) if lists is None else 0
        if index.is_trained:
            return CHUNK_BYTES + growth
        residual = getattr(lists, "by_residual", False)
        return max((4 + 1 + 4 * residual) * d * min(N, self._training_points(index)), CHUNK_BYTES + growth)

    def _create(self, N: int, d: int) -> Any:
        faiss = import_faiss()
        if d > LARGEST_DIMENSION:
            raise InputError(f"FaissIndex: vectors may have at most {LARGEST_DIMENSION} values, got d={d}")
        if too_small := TOO_SMALL.search(self.factory):
            raise InputError(f"FaissIndex: factory={self.factory!r} has a number that is too small: {too_small[0]}")
        try:
            index = faiss.index_factory(d, self.factory)
        except RuntimeError as error:
            raise InputError(f"FaissIndex: FAISS refuses factory={self.factory!r} at d={d}: {reason(error)}") from error
        if difference := not_l2(index):
            raise InputError(f"FaissIndex: factory={self.factory!r} does not search by L2 distance: {difference}")
        if (components := most_components(index)) > min(N, d):
            raise InputError(
                f"FaissIndex: factory={self.factory!r} has {components} components of min(N, d) = min({N}, {d})"
            )
        if self.lossless and not is_plain_sq8(index):
            raise InputError(f"FaissIndex: lossless=True is for SQ8 and IVF<c>,SQ8, not for factory={self.factory!r}")
        if self.lossless:
            code_vectors_themselves(index)
        self._set_nprobe(index, N)
        return index

    def _set_nprobe(self, index: Any, N: int) -> None:
        lists = inverted_lists(index)
        if lists is None:
            if self.nprobe is not None:
                raise InputError(f"FaissIndex: nprobe={self.nprobe} needs IVF lists, factory={self.factory!r} has none")
            return
        if lists.nlist > N:
            raise InputError(f"FaissIndex: factory={self.factory!r} has more lists than the {N} images")
        nprobe = max(lists.nlist // 50, 1) if self.nprobe is None else self.nprobe
        if nprobe > lists.nlist:
            raise InputError(f"FaissIndex: nprobe={nprobe} is more than the {lists.nlist} lists of {self.factory!r}")
        lists.nprobe = nprobe

    @staticmethod
    def _training_points(index: Any) -> int:
        lists = inverted_lists(index)
        if lists is None:
            return min(QUANTISER_TRAINING_POINTS, TRAINING_BYTES // (4 * index.d))
        return max(min(lists.nlist * TRAINING_POINTS_PER_LIST, TRAINING_BYTES // (4 * index.d)), lists.nlist)


def _expect_few_points(index: Any, N: int, factory: str) -> None:
    """Warn once that the lists have few points. FAISS would warn at each clustering, in its own terms."""
    lists = inverted_lists(index)
    if lists is None:
        return
    enough = lists.cp.min_points_per_centroid
    if enough * lists.nlist > N:
        warnings.warn(
            f"{N} images are few for factory={factory!r}: FAISS advises {enough} or more for each list, so at most "
            f"{max(N // enough, 1)} lists",
            stacklevel=2,
        )
    lists.cp.min_points_per_centroid = 1


def _write(index: Any, file: BinaryIO) -> None:
    # Python writes the file, because FAISS ignores a disk that is full when it closes a file.
    faiss = import_faiss()
    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, 2**20))


def _read(path: Path) -> Any:
    faiss = import_faiss()
    # This flag maps every kind of index into memory. An older faiss lacks the flag and reads the file.
    return faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
