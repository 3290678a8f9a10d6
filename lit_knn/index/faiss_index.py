"""Neighbour search by FAISS (Johnson et al. 2019), the search of the paper. The only file that imports faiss."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.index.base import Index, with_progress

# FAISS trains k-means on at most this many points per list; more are thrown away by it.
TRAINING_POINTS_PER_LIST = 256
# Scalar quantisers learn a range per dimension; this many images pin it down.
QUANTISER_TRAINING_POINTS = 50_000
# Training points are float32: without a limit those of ImageNet would take more memory than the index.
TRAINING_BYTES = 2 * 2**30
GPU_MAX_K = 2048
# Vectors are added about this many bytes at a time.
CHUNK_BYTES = 64 * 2**20


class FaissIndex(Index):
    """An index described by a FAISS factory string, over float32 vectors with the L2 metric.

    Args:
        factory: `Flat` (exact, 4 bytes a dimension), `SQ8` (8-bit, a quarter of the memory), `IVF<c>,Flat` or
            `IVF<c>,SQ8` (c lists of which `nprobe` are searched); the paper's three kinds. Other L2 indexes that
            FAISS can build from vectors alone work too.
        nprobe: lists searched per query, for IVF only. The default searches 1/50 of them, about the share the
            paper uses (25 of 1788 on CelebA, 100 of 4527 on ImageNet).

    Raises:
        InputError: nprobe < 1; at `check`, a factory FAISS refuses, nprobe above the number of lists or given
            without lists, more lists than vectors.
    """

    def __init__(self, factory: str = "Flat", nprobe: int | None = None) -> None:
        if nprobe is not None and nprobe < 1:
            raise InputError(f"FaissIndex: nprobe must be at least 1, got {nprobe}")
        self.factory = factory
        self.nprobe = nprobe
        self._index: Any = None
        self._on_gpu = False

    def check(self, N: int, d: int) -> None:
        """See `Index.check`; creates the empty FAISS index, which costs nothing."""
        self._create(N, d)

    def build(self, chunks: Callable[[], Iterable[Tensor]], sample: Callable[[int], Tensor], N: int) -> None:
        """See `Index.build`; trains the lists and the quantiser on a subset, then adds all vectors."""
        probe = sample(1)
        index = self._create(N, probe.shape[1])
        try:
            if not index.is_trained:
                index.train(sample(min(N, self._training_points(index))))
            for chunk in with_progress(chunks(), N, f"building FAISS index {self.factory}"):
                index.add(chunk.cpu().contiguous())
        except RuntimeError as error:
            raise InputError(f"FaissIndex: FAISS cannot build factory={self.factory!r}: {_reason(error)}") from error
        self._index, self._on_gpu = index, False

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Index.search`; runs where the index is, without a detour over the host."""
        if self._index is None:
            raise InputError("FaissIndex: search before build")
        if queries.is_cuda != self._on_gpu:
            place = "on a GPU" if self._on_gpu else "on the CPU"
            raise InputError(f"FaissIndex is {place} but the queries are on {queries.device}: move it with to()")
        if self._on_gpu and k > GPU_MAX_K:
            raise InputError(f"k={k}: FAISS on a GPU finds at most {GPU_MAX_K} neighbours")
        sq_dist, ids = self._index.search(queries.float().contiguous(), k)
        return sq_dist.masked_fill(ids < 0, torch.inf), ids

    def to(self, device: torch.device) -> None:
        """See `Index.to`; FAISS runs on the CPU and on CUDA devices."""
        faiss = _import_faiss()
        if device.type == "cuda" and not self._on_gpu:
            if not hasattr(faiss, "StandardGpuResources"):
                raise InputError("FaissIndex: this faiss build has no GPU support; install faiss-gpu")
            resources = faiss.StandardGpuResources()
            device_number = torch.cuda.current_device() if device.index is None else device.index
            try:
                self._index = faiss.index_cpu_to_gpu(resources, device_number, self._index)
            except RuntimeError as error:
                raise InputError(
                    f"FaissIndex: FAISS cannot move factory={self.factory!r} to a GPU ({_reason(error)}); "
                    "Flat and IVF<c>,SQ8 can"
                ) from error
            self._on_gpu = True
        elif device.type == "cpu" and self._on_gpu:
            self._index = faiss.index_gpu_to_cpu(self._index)
            self._on_gpu = False
        elif device.type not in ("cpu", "cuda"):
            raise InputError(f"FaissIndex: FAISS does not run on {device.type!r}; use the CPU or a CUDA device")

    def nbytes(self, N: int, d: int, device: torch.device) -> int | None:
        """See `Index.nbytes`; known of flat codes and of lists of them, after linear transforms or not.

        Lists grow by doubling on the CPU, so that they may take up to twice this.
        """
        return _held_bytes(self._create(N, d), N)

    def build_bytes(self, N: int, d: int) -> int:
        """See `Index.build_bytes`: the training points, float32, and the vectors that are being added."""
        index = self._create(N, d)
        return (0 if index.is_trained else 4 * d * min(N, self._training_points(index))) + CHUNK_BYTES

    def _create(self, N: int, d: int) -> Any:
        faiss = _import_faiss()
        try:
            index = faiss.index_factory(d, self.factory)
        except RuntimeError as error:
            raise InputError(
                f"FaissIndex: FAISS refuses factory={self.factory!r} at d={d}: {_reason(error)}"
            ) from error
        lists = _inverted_lists(index)
        if lists is None:
            if self.nprobe is not None:
                raise InputError(f"FaissIndex: nprobe={self.nprobe} needs IVF lists, factory={self.factory!r} has none")
            return index
        if lists.nlist > N:
            raise InputError(f"FaissIndex: factory={self.factory!r} has more lists than the {N} images")
        nprobe = max(lists.nlist // 50, 1) if self.nprobe is None else self.nprobe
        if nprobe > lists.nlist:
            raise InputError(f"FaissIndex: nprobe={nprobe} is more than the {lists.nlist} lists of {self.factory!r}")
        lists.nprobe = nprobe
        return index

    @staticmethod
    def _training_points(index: Any) -> int:
        lists = _inverted_lists(index)
        if lists is None:
            return min(QUANTISER_TRAINING_POINTS, TRAINING_BYTES // (4 * index.d))
        return max(min(lists.nlist * TRAINING_POINTS_PER_LIST, TRAINING_BYTES // (4 * index.d)), lists.nlist)


def _import_faiss() -> Any:
    try:
        import faiss
        import faiss.contrib.torch_utils  # lets every index take and return torch tensors, on their device
    except ImportError as error:
        raise InputError("FaissIndex needs faiss: pip install faiss-cpu, or faiss-gpu on Linux x86-64") from error
    return faiss


def _inverted_lists(index: Any) -> Any:
    """The IVF part of an index, or None."""
    faiss = _import_faiss()
    try:
        return faiss.extract_index_ivf(index)
    except RuntimeError:
        return None


def _held_bytes(index: Any, N: int) -> int | None:
    """What an empty index will hold when it is filled with N vectors; None if not known."""
    faiss = _import_faiss()
    if isinstance(index, faiss.IndexPreTransform):
        held = _held_bytes(faiss.downcast_index(index.index), N)
        steps = [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]
        # A PCA also keeps all its components.
        transforms = sum(4 * s.d_in * (s.d_out + s.d_in * isinstance(s, faiss.PCAMatrix)) for s in steps)
        return None if held is None else held + transforms
    if isinstance(index, faiss.IndexIVF):
        centres = _held_bytes(faiss.downcast_index(index.quantizer), index.nlist)
        return None if centres is None else N * (index.code_size + 8) + centres
    return N * index.code_size if hasattr(index, "code_size") else None


def _reason(error: RuntimeError) -> str:
    """FAISS's own words without the C++ signature in front of them."""
    return str(error).rsplit(": ", 1)[-1].strip()
