"""FAISS on the pretended GPU: the CPU's index, which takes and returns tensors on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.pretend_cuda.tensor import PretendTensor, inner


class FakeGpuIndex:
    """A FAISS index on the pretended GPU. Like GpuIndexFlat and GpuIndexIVF… it is none of the CPU's classes."""

    def __init__(self, index: Any, device: int = 0) -> None:
        self.cpu, self.d, self._device = index, index.d, device

    def __getattr__(self, name: str) -> Any:
        if name in ("ntotal", "is_trained", "nprobe", "metric_type", "nlist"):
            return getattr(self.cpu, name)
        raise AttributeError(name)

    def getDevice(self) -> int:
        return self._device

    def search(self, x: PretendTensor, k: int) -> tuple:
        """As GpuIndex.search, with what faiss.contrib.torch_utils asks of its arguments."""
        assert x.dtype == torch.float32, "faiss wants float32"
        assert x.is_contiguous(), "faiss wants contiguous rows"
        assert torch.cuda.current_device() == self._device, "the work would wait in the stream of another device"
        found = self.cpu.search(np.ascontiguousarray(inner(x).numpy()), k)
        sq_dist, ids = (PretendTensor(torch.from_numpy(part)) for part in found)
        return sq_dist, ids


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
