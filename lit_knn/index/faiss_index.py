"""Neighbour search by FAISS, as in the paper. The module `faiss_kind` lists the limits of FAISS's GPU kernels."""

from typing import Any

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.index.base import Index, Vectors, numbered
from lit_knn.index.cache import IndexCache
from lit_knn.index.faiss_build import build_faiss
from lit_knn.index.faiss_kind import MAX_SELECTION, FaissKind
from lit_knn.index.faiss_library import (
    Searcher,
    copied_to_cpu,
    copied_to_gpu,
    import_faiss,
    parts_of,
)
from lit_knn.index.precision import full_float32

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
        self._cache: IndexCache | None = None
        if cache_dir is not None:
            self._cache = IndexCache(cache_dir)
        self._probes = nprobe or max(kind.lists // 50, 1)
        self._index: Searcher | None = None
        self._components: list[Tensor] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on in another process, where FAISS may not take tensors yet."""
        if state["_index"] is not None:
            import_faiss()
        self.__dict__.update(state)

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        """Raise InputError for settings that FAISS cannot build, or that crash a process with a GPU; see `Index`."""
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
        """Raise InputError if FAISS cannot do this search on the device, which is not the CPU.

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
        """Raise InputError if k is more than FAISS finds on a GPU. If d is too large, FAISS finds none."""
        largest = self._kind.largest_k(d)
        if k > largest:
            searched_d = self._kind.searched_d(d)
            kind = f"neighbours with factory={self.factory!r} at d={searched_d}"
            raise InputError(f"k={k}: FAISS on a GPU finds at most {largest} {kind}; {ADVICE}")

    def build(self, vectors: Vectors) -> None:
        """Train components, lists and the quantiser on a subset, and add all vectors; or map the file of a cache."""

        def build(vectors: Vectors) -> Searcher:
            return build_faiss(self.factory, self._kind, vectors)

        if self._cache is None:
            index = build(vectors)
        else:
            version = import_faiss().__version__
            label = {"factory": self.factory, "lossless": self.lossless, "faiss": version}
            index = self._cache.get(vectors, label, build)

        self._device = torch.device("cpu")
        self._components = []
        # The whole index owns its parts, so it must live as long as they do.
        self._whole: Searcher | None = index
        if self._kind.components:
            index, *self._components = parts_of(index)
        if self._kind.lists:
            index.nprobe = self._probes
        self._index = index

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search on the device of the index, without copies to the host."""
        if queries.device != self._device:
            places = f"on {self._device} but the queries are on {queries.device}"
            raise InputError(f"FaissIndex is {places}: use to()")
        if queries.is_cuda:
            self._check_k(k, queries.shape[1])

        queries = queries.float().contiguous()
        # The squared distance of each query from the subspace of the components, if there are any.
        left_out: Tensor | float = 0.0
        if self._components:
            queries, left_out = self._project(queries, *self._components)
        assert self._index is not None, "search before build"
        # FAISS takes the stream of the current device, which may be another GPU.
        with torch.cuda.device_of(queries):
            sq_dist, ids = self._index.search(queries, k)
        return (sq_dist + left_out).masked_fill(ids < 0, torch.inf), ids

    def locate(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Search one list, because a vector is in the list with the nearest centre."""
        if not self._kind.lists or queries.is_cuda:
            return self.search(queries, 1)
        assert self._index is not None, "search before build"
        self._index.nprobe = 1
        try:
            return self.search(queries, 1)
        finally:
            self._index.nprobe = self._probes

    @full_float32()
    def _project(self, queries: Tensor, centre: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries projected on the components, and their squared distances from the subspace, (B, 1).

        FAISS's distances lack this second part, so they would be too small beside the exact ones of `KNN`. `rows`
        (r, d) are the components, and `centre` (d,) is subtracted first.
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

        if device.type != "cpu":
            self._check_gpu(device)
        if self._device.type == "cuda":
            self._index = copied_to_cpu(self._index)
        if device.type == "cuda":
            self._index = copied_to_gpu(self._index, device.index)
            # The copy on the GPU does not use the memory of the whole index.
            self._whole = None

        self._device = device
        self._components = [part.to(device) for part in self._components]

    def memory(self, N: int, d: int) -> dict[str, int]:
        """Predict the bytes of the index, and the additional bytes that its build needs."""
        return {
            "index": self._kind.nbytes(N, d),
            "building of the index": self._kind.build_bytes(N, d),
        }
