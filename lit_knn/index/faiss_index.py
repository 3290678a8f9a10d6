"""Neighbour search by FAISS (Johnson et al. 2019), as in the paper. Only this file imports faiss.

`faiss_kind` lists the limits of FAISS's GPU kernels. `contrib/torch_utils.py` of FAISS orders its work
after PyTorch's on the stream of the *current* device.
"""

import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.progress import with_progress
from lit_knn.index.base import Index, Vectors, numbered
from lit_knn.index.cache import IndexCache
from lit_knn.index.faiss_kind import MAX_SELECTION, FaissKind
from lit_knn.index.precision import full_float32

# Number of rows that are checked, or coded, at a time. The results of so few rows stay in the processor's cache.
CHECKED_ROWS = 64
# Tolerance in grey levels. It is above the largest rounding error of a pixel in float32.
PIXEL_TOLERANCE = 1e-3
# FAISS decodes p to minimum + range · (p + 1/2) / 255. With these values, code p stands for p / 127.5 − 1. FAISS's own
# pixel codes, `SQ8_direct`, do not work in lists, where FAISS codes differences from the centre.
PIXEL_MINIMUM, PIXEL_RANGE = -1 - 0.5 / 127.5, 2.0
ADVICE = (
    "there it searches Flat, IVF<c>,Flat and, with lossless=True, IVF<c>,SQ8; lit_knn.index.TorchIndex (8 bits) and "
    "SubspaceIndex have no such limits"
)


class FaissIndex(Index):
    """An index described by a FAISS factory string, over float32 vectors with the L2 metric.

    Args:
        factory: `Flat` (exact, 4 bytes a dimension), `SQ8` (8-bit, a quarter of the memory), `IVF<c>,Flat` or
            `IVF<c>,SQ8` (c lists, of which `nprobe` are searched). `PCA<r>,` before any of these searches r principal
            components and adds the query's squared distance from the subspace.
        nprobe: lists searched per query, for IVF only. By default 1/50 of the lists, about the share of the paper (25
            of 1788 on CelebA, 100 of 4527 on ImageNet).
        lossless: make the 256 codes of `SQ8` and `IVF<c>,SQ8` the 256 values of a pixel, so that uint8 images keep
            every digit. By default FAISS spreads the codes over the range of each dimension (with lists, over the range
            of the differences from the list's centre). On a GPU, lossless codes in lists work for any d and k <= 2048;
            other codes work only for few neighbours.
        cache_dir: folder that keeps built indexes. A later run with the same images, `factory` and `lossless` maps the
            file instead of building, and all processes of a machine share this memory. With null, each process builds.
    """

    def __init__(
        self,
        factory: str = "Flat",
        nprobe: int | None = None,
        lossless: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        kind = FaissKind.read(factory, lossless)
        if nprobe is not None and not 1 <= nprobe <= kind.lists:
            rule = f"must be from 1 to the {kind.lists} lists of {factory!r}"
            raise InputError(f"FaissIndex: nprobe={nprobe} {rule}")
        if lossless and (kind.components or not kind.is_sq8):
            rule = "is for SQ8 and IVF<c>,SQ8"
            raise InputError(f"FaissIndex: lossless=True {rule}, not for factory={factory!r}")

        self.factory = factory
        self.nprobe = nprobe
        self.lossless = lossless
        self.shared = cache_dir is not None
        self._kind = kind
        self._cache = None if cache_dir is None else IndexCache(cache_dir, _write, _read)
        self._probes = nprobe or max(kind.lists // 50, 1)
        self._index: Any = None
        self._components: tuple[Tensor, ...] = ()

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        import_faiss()
        option = f"FaissIndex: factory={self.factory!r}"
        if self._kind.lists > N:
            raise InputError(f"{option} has more lists than the {N} images")
        if self._kind.components > min(N, d):
            raise InputError(
                f"{option} has {self._kind.components} components of min(N, d) = min({N}, {d})"
            )

        if device is not None and device.type != "cpu":
            self._check_gpu(device)
            self._check_k(k, d)

    def _check_gpu(self, device: torch.device) -> None:
        """Refuse what FAISS cannot do on a GPU.

        The check needs no GPU, so a machine without a GPU can plan a run.
        """
        if device.type != "cuda":
            advice = "use the CPU or a CUDA device"
            raise InputError(f"FaissIndex: FAISS does not run on {device.type!r}; {advice}")

        # This machine may plan a run for the GPUs of another machine, and the faiss here may lack GPU support.
        if torch.cuda.is_available() and not hasattr(import_faiss(), "StandardGpuResources"):
            raise InputError("FaissIndex: this faiss build has no GPU support; install faiss-gpu")

        if self._kind.is_sq8 and not self._kind.lists:
            reason = f"FAISS cannot move factory={self.factory!r} to a GPU"
            raise InputError(f"FaissIndex: {reason}; {ADVICE}")
        if self._probes > MAX_SELECTION:
            limit = f"FAISS on a GPU searches at most {MAX_SELECTION} lists"
            raise InputError(f"nprobe={self._probes}: {limit}")

    def _check_k(self, k: int, d: int) -> None:
        """Refuse more neighbours than FAISS finds on a GPU. If d is too large, FAISS finds none."""
        largest = self._kind.largest_k(d)
        if k > largest:
            searched_d = self._kind.searched_d(d)
            kind = f"neighbours with factory={self.factory!r} at d={searched_d}"
            raise InputError(f"k={k}: FAISS on a GPU finds at most {largest} {kind}; {ADVICE}")

    def build(self, vectors: Vectors) -> None:
        """Train components, lists and the quantiser on a subset, and add all vectors; or map the file of a cache."""
        faiss = import_faiss()
        if self._cache is None:
            index = self._build(vectors)
        else:
            label = {"factory": self.factory, "lossless": self.lossless, "faiss": faiss.__version__}
            index = self._cache.get(vectors, label, self._build)

        self._device = torch.device("cpu")
        self._components = ()
        if self._kind.components:
            step = faiss.downcast_VectorTransform(index.chain.at(0))
            centre = torch.from_numpy(faiss.vector_to_array(step.mean))
            rows = torch.from_numpy(faiss.vector_to_array(step.A))
            self._components = centre, rows.reshape(step.d_out, step.d_in)
            # The outer index owns the inner one.
            self._whole = index
            index = faiss.downcast_index(index.index)
        if self._kind.lists:
            index.nprobe = self._probes
        self._index = index

    def _build(self, vectors: Vectors) -> Any:
        """Train an index of FAISS and add all vectors."""
        faiss = import_faiss()
        N = vectors.N
        d = self._checked(vectors.sample(min(N, 16))).shape[1]
        index = faiss.index_factory(d, self.factory)

        if self._kind.lists:
            lists = faiss.extract_index_ivf(index)
            self._warn_of_few_images(N, lists.cp.min_points_per_centroid)
            lists.cp.min_points_per_centroid = 1  # Otherwise FAISS itself warns at each clustering.
            lists.by_residual = lists.by_residual and not self.lossless

        if self.lossless:
            # All dimensions share one range, so that GPU kernels need no shared memory for ranges.
            index.sq.qtype = faiss.ScalarQuantizer.QT_8bit_uniform
            index.sq.set_derived_sizes()
        if not index.is_trained:
            index.train(vectors.sample(self._kind.training_points(N, d)))
        if self.lossless:
            ranges = torch.tensor([PIXEL_MINIMUM, PIXEL_RANGE], dtype=torch.float32)
            faiss.copy_array_to_vector(ranges.numpy(), index.sq.trained)

        for chunk in with_progress(vectors.chunks(), N, f"building FAISS index {self.factory}"):
            index.add(self._checked(chunk.cpu().contiguous()))
        return index

    def _warn_of_few_images(self, N: int, enough: int) -> None:
        """Warn if the lists have on average fewer than `enough` of the N images."""
        if enough * self._kind.lists <= N:
            return
        most_lists = max(N // enough, 1)
        advice = f"FAISS advises {enough} or more for each list, so at most {most_lists} lists"
        message = f"{N} images are few for factory={self.factory!r}: {advice}"
        warnings.warn(message, stacklevel=3)

    def _checked(self, vectors: Tensor) -> Tensor:
        """Return the vectors. With `lossless`, refuse values that are not pixels."""
        if not self.lossless:
            return vectors

        for rows in vectors.split(CHECKED_ROWS):
            pixels = (rows + 1) * 127.5
            strange = (pixels - pixels.round().clamp(0, 255)).abs() > PIXEL_TOLERANCE
            if strange.any():
                value = f"the float {rows[strange][0].item():.6g}"
                raise InputError(
                    f"FaissIndex: lossless=True needs uint8 images, the data holds {value}"
                )
        return vectors

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search on the device of the index, without copies to the host."""
        if queries.device != self._device:
            places = f"on {self._device} but the queries are on {queries.device}"
            raise InputError(f"FaissIndex is {places}: use to()")
        if queries.is_cuda:
            self._check_k(k, queries.shape[1])

        queries = queries.float().contiguous()
        left_out: Tensor | float = 0.0
        if self._components:
            queries, left_out = self._project(queries, *self._components)
        # FAISS takes the stream of the current device, which may be another GPU.
        with torch.cuda.device(self._device) if queries.is_cuda else nullcontext():
            sq_dist, ids = self._index.search(queries, k)
        return (sq_dist + left_out).masked_fill(ids < 0, torch.inf), ids

    def locate(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Search one list, because a vector is in the list with the nearest centre."""
        if not self._kind.lists or queries.is_cuda:
            return self.search(queries, 1)
        self._index.nprobe = 1
        try:
            return self.search(queries, 1)
        finally:
            self._index.nprobe = self._probes

    @full_float32()
    def _project(self, queries: Tensor, centre: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries in the components, and their squared distances from the subspace, (B, 1).

        FAISS's distances lack this second part, so they would be too small beside the exact ones of `KNN`.
        """
        centred = queries - centre
        projected = centred @ rows.T
        sq_norms = centred.square().sum(1, keepdim=True)
        return projected, sq_norms - projected.square().sum(1, keepdim=True)

    def to(self, device: torch.device) -> None:
        """Move to the CPU or a CUDA device. An index goes from GPU to GPU through the CPU."""
        device = numbered(device)
        if self._index is None or device == self._device:
            return

        faiss = import_faiss()
        if device.type != "cpu":
            self._check_gpu(device)
        if self._device.type == "cuda":
            self._index = faiss.index_gpu_to_cpu(self._index)
        if device.type == "cuda":
            gpu = device.index
            self._index = faiss.index_cpu_to_gpu(_resources(gpu), gpu, self._index)
            self._whole = None

        self._device = device
        self._components = tuple(part.to(device) for part in self._components)

    def memory(self, N: int, d: int) -> dict[str, int]:
        """Predict the bytes of the index, and those that its build needs besides."""
        return {
            "index": self._kind.nbytes(N, d),
            "building of the index": self._kind.build_bytes(N, d),
        }


def import_faiss() -> Any:
    """Import faiss with its support for torch tensors. Raises InputError if faiss does not load."""
    try:
        import faiss

        # Every index then takes and returns torch tensors, on their device.
        import faiss.contrib.torch_utils
    except ImportError as error:
        raise InputError(
            f"FaissIndex needs faiss ({error}): pip install 'lit_knn[faiss]'"
        ) from error
    return faiss


@cache
def _resources(device_number: int) -> Any:
    """Return the GPU resources that all indexes of one GPU share. Else each of 1000 classes would reserve memory."""
    return import_faiss().StandardGpuResources()


def _write(index: Any, file: BinaryIO) -> None:
    # Python writes the file, because FAISS does not notice a full disk when it closes a file.
    faiss = import_faiss()
    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, 2**20))


def _read(path: Path) -> Any:
    faiss = import_faiss()
    try:
        # This flag maps every kind of index into memory. An older faiss lacks the flag and reads the file.
        return faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
    except RuntimeError as error:
        raise InputError(
            f"index cache: {path} is damaged, remove it: {str(error).splitlines()[0]}"
        ) from error
