"""Neighbour search by FAISS (Johnson et al. 2019), as in the paper. No other file imports faiss."""

import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.index.base import Index, Vectors, with_progress
from lit_knn.index.cache import IndexCache

LARGEST_DIMENSION = 2**31 - 1
# With these numbers FAISS ends the process, or never comes back.
TOO_SMALL = re.compile(r"(?:HNSW|NSG)0*1(?!\d)|[A-Za-z]*(?<!\d)0+(?!\d)")
# FAISS trains k-means on at most this many points per list, and discards more.
TRAINING_POINTS_PER_LIST = 256
# Scalar quantisers learn a range per dimension. This many images are enough to learn the range.
QUANTISER_TRAINING_POINTS = 50_000
# Limit of the training points, which are float32. Without it, ImageNet's would take more memory than the index.
TRAINING_BYTES = 2 * 2**30
GPU_MAX_K = 2048
# FAISS reserves this much memory on a large GPU by default.
GPU_SCRATCH_MIB = 1536
GPU_ADVICE = "it can Flat and IVF<c>,SQ8, and lit_knn.index.TorchIndex searches 8-bit vectors there"
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
            range of its difference from the centre of the list.
        cache_dir: folder that keeps built indexes. A later run with the same images, `factory` and `lossless` maps the
            file instead of building, and all processes of a machine share its memory. null builds in each process.
        gpu_float16: on a GPU, hold the vectors of `Flat` and the centres of lists in half precision.
        gpu_scratch_mib: on a GPU, memory in MiB that FAISS reserves for intermediate results; null for FAISS's own
            choice, about 1.5 GiB.

    Raises:
        InputError: nprobe < 1, gpu_scratch_mib < 0, an empty cache_dir; at `check`, a factory FAISS refuses or
            whose distances are not L2, nprobe
            above the number of lists or without lists, more lists than vectors, `lossless` with another factory; at
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
        self._on_gpu = False
        self._projections: list[tuple[Tensor, Tensor]] = []

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        """See `Index.check`. Creates the empty FAISS index, which costs almost nothing."""
        index = self._create(N, d)
        if device is not None and device.type != "cpu":
            self._check_device(index, device, k)

    def build(self, vectors: Vectors) -> None:
        """See `Index.build`. Trains the lists and the quantiser on a subset, then adds all vectors."""
        if self._cache is None:
            index = self._build(vectors)
        else:
            settings = {"factory": self.factory, "lossless": self.lossless}
            index = self._cache.get(vectors, settings, {"faiss": _import_faiss().__version__}, self._build)
            self._set_nprobe(index, vectors.N)
        self._index, self._on_gpu, self._projections = index, False, _projections(index)

    def _build(self, vectors: Vectors) -> Any:
        N = vectors.N
        probe = self._checked(vectors.sample(min(N, 16)))
        index = self._create(N, probe.shape[1])
        try:
            self._train(index, vectors.sample, N)
            for chunk in with_progress(vectors.chunks(), N, f"building FAISS index {self.factory}"):
                index.add(self._checked(chunk.cpu().contiguous()))
        except RuntimeError as error:
            raise InputError(f"FaissIndex: FAISS cannot build factory={self.factory!r}: {_reason(error)}") from error
        return index

    def _train(self, index: Any, sample: Callable[[int], Tensor], N: int) -> None:
        """Train the lists and the quantiser. The sample is freed before vectors are added."""
        if self.lossless:
            _code_vectors_themselves(index)
        if not index.is_trained:
            rows = sample(min(N, self._training_points(index)))
            _expect_few_points(index, N, self.factory)
            for piece in with_progress([rows], len(rows), f"training FAISS index {self.factory}"):
                index.train(piece)
        if self.lossless:
            _let_codes_be_pixels(index)

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
        if self._index is None:
            raise InputError("FaissIndex: search before build")
        if queries.is_cuda != self._on_gpu:
            place = "on a GPU" if self._on_gpu else "on the CPU"
            raise InputError(f"FaissIndex is {place} but the queries are on {queries.device}: move it with to()")
        if self._on_gpu and k > GPU_MAX_K:
            raise InputError(f"k={k}: FAISS on a GPU finds at most {GPU_MAX_K} neighbours")
        queries = queries.float().contiguous()
        try:
            sq_dist, ids = self._index.search(queries, k)
        except RuntimeError as error:
            raise InputError(f"FaissIndex: FAISS cannot search factory={self.factory!r}: {_reason(error)}") from error
        if self._projections:
            sq_dist = sq_dist + self._left_out(queries)
        return sq_dist.masked_fill(ids < 0, torch.inf), ids

    def locate(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """See `Index.locate`. Searches one list, because a vector is in the list with the nearest centre."""
        lists = None if self._index is None or self._on_gpu else _inverted_lists(self._index)
        if lists is None:
            return self.search(queries, 1)
        nprobe, lists.nprobe = lists.nprobe, 1
        try:
            return self.search(queries, 1)
        finally:
            lists.nprobe = nprobe

    def _check_device(self, index: Any, device: torch.device, k: int) -> None:
        """Refuse what FAISS cannot do on a GPU. The check needs no GPU, so a machine without a GPU can plan a run."""
        if device.type != "cuda":
            raise InputError(f"FaissIndex: FAISS does not run on {device.type!r}; use the CPU or a CUDA device")
        # This machine may plan a run for the GPUs of another machine, and the faiss here may lack GPU support.
        if torch.cuda.is_available() and not hasattr(_import_faiss(), "StandardGpuResources"):
            raise InputError("FaissIndex: this faiss build has no GPU support; install faiss-gpu")
        if not _runs_on_gpu(index):
            raise InputError(f"FaissIndex: FAISS cannot move factory={self.factory!r} to a GPU; {GPU_ADVICE}")
        lists = _inverted_lists(index)
        if lists is not None and lists.nprobe > GPU_MAX_K:
            raise InputError(f"nprobe={lists.nprobe}: FAISS on a GPU searches at most {GPU_MAX_K} lists")
        if k > GPU_MAX_K:
            raise InputError(f"k={k}: FAISS on a GPU finds at most {GPU_MAX_K} neighbours")

    def _left_out(self, queries: Tensor) -> Tensor:
        """Return the squared length of the part of each query that projections drop: (B, 1). FAISS's distances lack it.

        KNN mixes these distances with exact ones of the nearest images. Without this part, all others would seem too
        near.
        """
        left_out = torch.zeros(len(queries), 1, device=queries.device)
        for centre, rows in self._projections:
            centred = queries - centre
            queries = centred @ rows.T
            left_out += centred.square().sum(1, keepdim=True) - queries.square().sum(1, keepdim=True)
        return left_out

    def to(self, device: torch.device) -> None:
        """See `Index.to`. FAISS runs on the CPU and on CUDA devices."""
        faiss = _import_faiss()
        if device.type != "cpu":
            self._check_device(self._index, device, k=1)
        if device.type == "cuda" and not self._on_gpu:
            self._index = self._gpu_copy(torch.cuda.current_device() if device.index is None else device.index)
            self._on_gpu = True
        elif device.type == "cpu" and self._on_gpu:
            self._index = faiss.index_gpu_to_cpu(self._index)
            self._on_gpu = False
        self._projections = [(centre.to(device), rows.to(device)) for centre, rows in self._projections]

    def nbytes(self, N: int, d: int, device: torch.device) -> int | None:
        """See `Index.nbytes`. The size is known for flat codes and lists of flat codes, also after linear transforms.

        On a GPU the scratch memory is included.
        """
        index = self._create(N, d)
        held = _held_bytes(index, N)
        if held is None or device.type == "cpu":
            return held
        scratch = GPU_SCRATCH_MIB if self._gpu_scratch_mib is None else self._gpu_scratch_mib
        flat = isinstance(index, _import_faiss().IndexFlat)
        return (held // 2 if flat and self.gpu_float16 else held) + scratch * 2**20

    def build_bytes(self, N: int, d: int) -> int:
        """See `Index.build_bytes`. Counts the training points, in float32 and as stored, or the vectors being added.

        With lists, FAISS also copies the training points, to code their differences from the centres. Without lists,
        it copies the codes each time their array grows.
        """
        index = self._create(N, d)
        lists = _inverted_lists(index)
        growth = N * getattr(index, "code_size", 0) if lists is None else 0
        if index.is_trained:
            return CHUNK_BYTES + growth
        residual = getattr(lists, "by_residual", False) and not self.lossless
        return max((4 + 1 + 4 * residual) * d * min(N, self._training_points(index)), CHUNK_BYTES + growth)

    def _gpu_copy(self, device_number: int) -> Any:
        faiss = _import_faiss()
        resources, options = _gpu_resources(self._gpu_scratch_mib), faiss.GpuClonerOptions()
        options.useFloat16 = options.useFloat16CoarseQuantizer = self.gpu_float16
        try:
            return faiss.index_cpu_to_gpu(resources, device_number, self._index, options)
        except RuntimeError as error:
            raise InputError(
                f"FaissIndex: FAISS cannot move factory={self.factory!r} to a GPU ({_reason(error)}); {GPU_ADVICE}"
            ) from error

    def _create(self, N: int, d: int) -> Any:
        faiss = _import_faiss()
        if d > LARGEST_DIMENSION:
            raise InputError(f"FaissIndex: vectors may have at most {LARGEST_DIMENSION} values, got d={d}")
        if too_small := TOO_SMALL.search(self.factory):
            raise InputError(f"FaissIndex: factory={self.factory!r} has a number that is too small: {too_small[0]}")
        try:
            index = faiss.index_factory(d, self.factory)
        except RuntimeError as error:
            raise InputError(
                f"FaissIndex: FAISS refuses factory={self.factory!r} at d={d}: {_reason(error)}"
            ) from error
        if reason := _not_l2(index):
            raise InputError(f"FaissIndex: factory={self.factory!r} does not search by L2 distance: {reason}")
        if (components := _most_components(index)) > min(N, d):
            raise InputError(
                f"FaissIndex: factory={self.factory!r} has {components} components of min(N, d) = min({N}, {d})"
            )
        if self.lossless and not _is_plain_sq8(index):
            raise InputError(f"FaissIndex: lossless=True is for SQ8 and IVF<c>,SQ8, not for factory={self.factory!r}")
        self._set_nprobe(index, N)
        return index

    def _set_nprobe(self, index: Any, N: int) -> None:
        lists = _inverted_lists(index)
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
        lists = _inverted_lists(index)
        if lists is None:
            return min(QUANTISER_TRAINING_POINTS, TRAINING_BYTES // (4 * index.d))
        return max(min(lists.nlist * TRAINING_POINTS_PER_LIST, TRAINING_BYTES // (4 * index.d)), lists.nlist)


def _import_faiss() -> Any:
    try:
        import faiss
        import faiss.contrib.torch_utils  # Every index then takes and returns torch tensors, on their device.
    except ImportError as error:
        raise InputError("FaissIndex needs faiss: pip install faiss-cpu, or faiss-gpu on Linux x86-64") from error
    return faiss


@cache
def _gpu_resources(scratch_mib: int | None) -> Any:
    """Return GPU resources for all indexes of the process. Otherwise each of 1000 classes would reserve memory."""
    resources = _import_faiss().StandardGpuResources()
    if scratch_mib is not None:
        resources.setTempMemory(scratch_mib * 2**20)
    return resources


def _inverted_lists(index: Any) -> Any:
    """Return the IVF part of an index, or None."""
    faiss = _import_faiss()
    try:
        return faiss.extract_index_ivf(index)
    except RuntimeError:
        return None


def _transforms(index: Any) -> list[Any]:
    """Return the transforms that an index applies to vectors first."""
    faiss = _import_faiss()
    if not isinstance(index, faiss.IndexPreTransform):
        return []
    return [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]


def _projections(index: Any) -> list[tuple[Tensor, Tensor]]:
    """Return centre (d,) and orthonormal rows (r, d) of each projection before the search, as in `PCA256,…`."""
    faiss = _import_faiss()
    found = []
    for step in _transforms(index):
        if not isinstance(step, faiss.LinearTransform) or not step.is_orthonormal:
            return []  # A step that stretches changes the distances anyway.
        rows = torch.from_numpy(faiss.vector_to_array(step.A).reshape(step.d_out, step.d_in))
        is_pca = isinstance(step, faiss.PCAMatrix)
        centre = torch.from_numpy(faiss.vector_to_array(step.mean)) if is_pca else torch.zeros(step.d_in)
        found.append((centre, rows))
    return found


def _held_bytes(index: Any, N: int) -> int | None:
    """Predict the bytes of an empty index after N vectors are added. Returns None if unknown."""
    faiss = _import_faiss()
    if isinstance(index, faiss.IndexPreTransform):
        held = _held_bytes(faiss.downcast_index(index.index), N)
        # FAISS's PCA also keeps the components that it does not use.
        transforms = sum(4 * s.d_in * (s.d_out + s.d_in * isinstance(s, faiss.PCAMatrix)) for s in _transforms(index))
        return None if held is None else held + transforms
    if isinstance(index, faiss.IndexIVF):
        centres = _held_bytes(faiss.downcast_index(index.quantizer), index.nlist)
        return None if centres is None else N * (index.code_size + 8) + centres
    return N * index.code_size if hasattr(index, "code_size") else None


def _expect_few_points(index: Any, N: int, factory: str) -> None:
    """Warn once that the lists have few points. FAISS would warn at each clustering, in its own terms."""
    lists = _inverted_lists(index)
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


def _runs_on_gpu(index: Any) -> bool:
    """Tells whether FAISS has this kind of index for GPUs. It may still refuse some sizes of product codes in lists."""
    faiss = _import_faiss()
    if isinstance(index, faiss.IndexPreTransform):
        return _runs_on_gpu(faiss.downcast_index(index.index))
    if isinstance(index, faiss.IndexIVF):
        kinds = (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)
        return isinstance(index, kinds) and _runs_on_gpu(faiss.downcast_index(index.quantizer))
    return isinstance(index, faiss.IndexFlat)


def _most_components(index: Any) -> int:
    """Return the most PCA components before an index, 0 without a PCA. FAISS refuses too many only after minutes."""
    steps, pca = _transforms(index), _import_faiss().PCAMatrix
    return max((step.d_out for step in steps if isinstance(step, pca)), default=0)


def _not_l2(index: Any) -> str:
    """Return why the distances of an empty index are not L2 distances of the vectors; empty if they are."""
    faiss = _import_faiss()
    if isinstance(index, faiss.IndexRefine):
        # Only the distances of the second index are returned.
        return _not_l2(faiss.downcast_index(index.refine_index))
    keeping = (faiss.OPQMatrix, faiss.RandomRotationMatrix, faiss.RemapDimensionsTransform, faiss.CenteringTransform)
    for step in _transforms(index):
        projects = isinstance(step, faiss.PCAMatrix) and step.eigen_power == 0
        if not projects and not isinstance(step, keeping):
            return f"{type(step).__name__} changes lengths"
    for part in ("index", "storage"):
        if inner := getattr(index, part, None):
            return _not_l2(faiss.downcast_index(inner))
    if index.metric_type != faiss.METRIC_L2 or isinstance(index, (faiss.IndexLSH, faiss.IndexIVFSpectralHash)):
        return f"{type(index).__name__} has another distance"
    sq = faiss.ScalarQuantizer
    if getattr(getattr(index, "sq", None), "qtype", None) in (sq.QT_8bit_direct, sq.QT_8bit_direct_signed):
        return "its codes are the whole numbers 0 to 255, and images are in [-1, 1]; use SQ8 with lossless=True"
    return ""


def _is_plain_sq8(index: Any) -> bool:
    faiss = _import_faiss()
    plain = isinstance(index, (faiss.IndexScalarQuantizer, faiss.IndexIVFScalarQuantizer))
    return plain and index.sq.qtype == faiss.ScalarQuantizer.QT_8bit


def _code_vectors_themselves(index: Any) -> None:
    """Make lists code the vectors themselves, not their differences from the centre of the list."""
    if isinstance(index, _import_faiss().IndexIVFScalarQuantizer):
        index.by_residual = False


def _let_codes_be_pixels(index: Any) -> None:
    """Make code p of a trained and empty 8-bit index stand for p / 127.5 − 1, exactly.

    FAISS decodes p to minimum + range · (p + 1/2) / 255. FAISS's own pixel codes, `SQ8_direct`, do not work in lists:
    there FAISS codes differences from the centre, which are no pixels.
    """
    faiss = _import_faiss()
    minimum, spread = np.full(index.d, -1 - 0.5 / 127.5), np.full(index.d, 2.0)
    faiss.copy_array_to_vector(np.concatenate([minimum, spread]).astype(np.float32), index.sq.trained)


def _write(index: Any, file: BinaryIO) -> None:
    # Python writes the file, because FAISS ignores a disk that is full when it closes a file.
    faiss = _import_faiss()
    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, 2**20))


def _read(path: Path) -> Any:
    faiss = _import_faiss()
    # This flag maps every kind of index into memory. An older faiss lacks the flag and reads the file.
    return faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))


def _reason(error: RuntimeError) -> str:
    """Return FAISS's message without the C++ signature in front of it."""
    return str(error).rsplit(": ", 1)[-1].strip()
