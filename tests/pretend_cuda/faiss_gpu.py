"""FAISS on the pretended GPU, with the rules of FAISS's GPU indexes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.pretend_cuda.device import DeviceMismatch
from tests.pretend_cuda.tensor import PretendTensor, active, inner

# Shared memory of a block of threads that did not ask for more. FAISS never asks.
SHARED_MEMORY = 48 * 1024
MAX_K = 2048


class FaissAbort(BaseException):
    """Stands for a call of abort() in FAISS, which no `except` stops."""


class FakeGpuIndex:
    """A FAISS index on the pretended GPU, with the rules of GpuIndex.search under faiss.contrib.torch_utils.

    Like GpuIndexFlat and GpuIndexIVF… it is none of the CPU's classes. The rules of 8-bit lists come from FAISS's
    sources (GpuIndexIVFScalarQuantizer.cu, IVFInterleaved.cu; its issues 3207 and 4509): d below 6144, and the heap of
    the k-selection has to fit into shared memory beside the 8·d bytes of the ranges of all dimensions.
    """

    def __init__(self, index: Any, device: int = 0) -> None:
        import faiss

        self.cpu, self.d, self._device = index, index.d, device
        found, kinds = faiss.downcast_index(index), faiss.ScalarQuantizer
        self._lists, self._quantiser_bytes = isinstance(found, faiss.IndexIVF), 0
        if isinstance(found, faiss.IndexIVFScalarQuantizer):
            if found.sq.qtype not in (kinds.QT_8bit, kinds.QT_8bit_uniform):
                raise RuntimeError("Unsupported scalar QuantizerType on GPU")
            self._quantiser_bytes = 8 * self.d if found.sq.qtype == kinds.QT_8bit else 0
        elif not isinstance(found, (faiss.IndexFlat, faiss.IndexIVFFlat)):
            raise RuntimeError("This index type is not implemented on GPU.")
        if self._quantiser_bytes >= SHARED_MEMORY:
            raise RuntimeError(
                f"GpuIndexIVFScalarQuantizer: Insufficient shared memory available on the GPU for QT_8bit or QT_4bit "
                f"with {self.d} dimensions; maximum dimensions possible is {SHARED_MEMORY // 8}"
            )

    def __getattr__(self, name: str) -> Any:
        if name in ("ntotal", "is_trained", "nprobe", "metric_type", "nlist"):
            return getattr(self.cpu, name)
        raise AttributeError(name)

    def getDevice(self) -> int:
        return self._device

    def search(self, x: Any, k: int) -> tuple:
        """As GpuIndex.search."""
        if isinstance(x, torch.Tensor) and not isinstance(x, PretendTensor):
            # contrib.torch_utils accepts CPU tensors for GPU indexes too, and FAISS copies them.
            return self.cpu.search(x, k)
        assert x.dtype == torch.float32, "faiss wants float32"
        assert x.is_contiguous(), "faiss wants contiguous rows"
        if torch.cuda.current_device() != self._device:
            # contrib.torch_utils would order the work on the stream of the current device.
            raise DeviceMismatch(f"the index is on cuda:{self._device}, not on the current device")
        if k > MAX_K:
            raise RuntimeError(f"GPU index only supports min/max-K selection up to {MAX_K} (requested {k})")
        self._check_shared_memory(k)
        found = self.cpu.search(np.ascontiguousarray(inner(x).numpy()), k)
        if active:
            active[0].counts.operation("faiss.search")
        sq_dist, ids = (PretendTensor(torch.from_numpy(part)) for part in found)
        return sq_dist, ids

    def _check_shared_memory(self, k: int) -> None:
        width = next(q for q in (1, 32, 64, 128, 256, 512, 1024, 2048) if q >= k)
        heap = (2 if width == 2048 else 4) * width * 12
        if self._lists and heap + self._quantiser_bytes > SHARED_MEMORY:
            raise FaissAbort(
                f"Faiss assertion 'err__ == cudaSuccess' failed in ivfInterleavedScanImpl; CUDA error 1 invalid "
                f"argument: k={k} needs {heap} bytes of shared memory and d={self.d} "
                f"{self._quantiser_bytes}, of {SHARED_MEMORY}"
            )


@contextlib.contextmanager
def install_fake_faiss_gpu() -> Iterator[None]:
    """Make `faiss.index_cpu_to_gpu` return a `FakeGpuIndex`."""
    import faiss
    import faiss.contrib.torch_utils

    class Resources:
        def setTempMemory(self, size: int) -> None: ...

    def to_gpu(resources: Any, device: int, index: Any, options: Any = None) -> Any:
        copied = faiss.clone_index(index)  # as FAISS does, so that the original may go
        return FakeGpuIndex(copied, device)

    names = {"StandardGpuResources": Resources, "index_cpu_to_gpu": to_gpu, "index_gpu_to_cpu": lambda i: i.cpu}
    before = {name: getattr(faiss, name, None) for name in names}
    for name, value in names.items():
        setattr(faiss, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(faiss, name, value)
