"""The FAISS library (Johnson et al. 2019). Only this file imports faiss.

`contrib/torch_utils.py` of FAISS orders its work after PyTorch's on the stream of the *current* device.
"""

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from lit_knn.common.errors import InputError


class Searcher(Protocol):
    """An index of FAISS, after `import_faiss`."""

    nprobe: int
    """Number of lists searched per query. Only an index with lists has it."""

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return squared distances and ids, (B, k) each. A missing neighbour has the id −1."""


def import_faiss() -> ModuleType:
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


def parts_of(index: Searcher) -> tuple[Searcher, Tensor, Tensor]:
    """Split an index that projects vectors on principal components into its two steps.

    Returns:
        The index of the projected vectors, and the components: their centre (d,) and their rows (r, d).
    """
    faiss = import_faiss()
    # FAISS returns objects of base classes. `downcast` turns them into those of their own classes, with all attributes.
    chain = faiss.downcast_index(index)
    step = faiss.downcast_VectorTransform(chain.chain.at(0))
    centre = torch.from_numpy(faiss.vector_to_array(step.mean))
    rows = torch.from_numpy(faiss.vector_to_array(step.A))
    return faiss.downcast_index(chain.index), centre, rows.reshape(step.d_out, step.d_in)


def copied_to_gpu(index: Searcher, gpu: int) -> Searcher:
    """Copy an index from the CPU to the GPU with the number `gpu`."""
    return import_faiss().index_cpu_to_gpu(_resources(gpu), gpu, index)


def copied_to_cpu(index: Searcher) -> Searcher:
    """Copy an index from its GPU to the CPU."""
    return import_faiss().index_gpu_to_cpu(index)


@cache
def _resources(gpu: int) -> object:
    """Return the resources that all indexes of one GPU share. Otherwise each of 1000 classes would reserve memory."""
    return import_faiss().StandardGpuResources()


def write_index(index: Searcher, file: BinaryIO) -> None:
    """Write an index to an open file."""
    faiss = import_faiss()
    # Python writes the file, 1 MiB at a time, because FAISS does not notice a full disk when it closes a file.
    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, 2**20))


def read_index(path: Path) -> Searcher:
    """Map the file of an index into memory. Raises InputError if it is damaged."""
    faiss = import_faiss()
    try:
        # This flag maps every kind of index into memory. An older faiss lacks the flag and reads the file.
        return faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
        raise InputError(f"index cache: {path} is damaged, remove it: {problem}") from error
