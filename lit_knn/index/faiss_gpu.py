"""A FAISS index on a GPU. FAISS ends the process where a limit of its kernels is broken, so we check each limit first.

The limits come from the sources of FAISS 1.15, of `faiss/gpu` where no other folder is named:

- Kinds: `GpuCloner.cpp` copies `Flat`, `IVF<c>,Flat`, `IVF<c>,SQ…` and `IVF<c>,PQ…`, by class; subclasses lose what
  they add. `impl/GpuScalarQuantizer.cuh` (isSQSupported) lists the codes. We leave product codes out, because their
  kernels assert more than `GpuIndexIVFPQ.cu` checks. Coarse centres must be `Flat`: other kinds would stay on the CPU.
- k and nprobe are at most 2,048 (`utils/DeviceDefs.cuh`, GPU_MAX_SELECTION_K).
- A kernel that searches lists (`impl/IVFInterleaved.cuh`) keeps the neighbours in shared memory: 12 bytes each, in
  four lists (two for k > 1,024) of the next larger width. Codes with a range for each dimension (`SQ8`, `SQ6`, `SQ4`)
  put 8·d bytes of ranges beside them. FAISS never asks for more than the default of 48 KiB, on any GPU, and calls
  `abort()` when the kernel does not start (issues 3207 and 4509). So d = 3,072 allows k <= 512, and no d allows more.
- A transform in front, such as `PCA256,…`, stays on the CPU (`GpuCloner.cpp`), and `contrib/torch_utils.py` then
  refuses tensors of a GPU. We apply linear transforms ourselves, in PyTorch.
- `contrib/torch_utils.py` orders FAISS's work after PyTorch's on the stream of the *current* device.
- The package faiss-gpu-cuvs has another search for `Flat`, which finds up to 16,384 neighbours (`impl/IndexUtils.cu`).
  We use it for `Flat` alone: `impl/CuvsIVFFlat.cu` does not mark missing neighbours by −1, and for lists of codes FAISS
  accepts a k of 16,384 but may run its own kernels, which assert k <= 2,048.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.index.faiss_parts import after_transforms, import_faiss, inverted_lists, reason, transforms

MAX_SELECTION = 2048
CUVS_MAX_SELECTION = 16_384
SHARED_BYTES = 48 * 1024
# Lengths of the lists of neighbours that FAISS's kernels have.
WIDTHS = (1, 32, 64, 128, 256, 512, 1024, 2048)
# FAISS reserves this much memory on a large GPU by default.
SCRATCH_MIB = 1536
ADVICE = (
    "there it searches Flat, IVF<c>,Flat, IVF<c>,SQfp16 and, with lossless=True, IVF<c>,SQ8; "
    "lit_knn.index.TorchIndex (8 bits) and SubspaceIndex have no such limits"
)


def check_gpu(index: Any, device: torch.device, k: int, factory: str) -> None:
    """Refuse what FAISS cannot do on a GPU. The check needs no GPU, so a machine without a GPU can plan a run.

    Args:
        index: an index on the CPU; it may be empty.
        device: device of the search.
        k: number of neighbours.
        factory: description of the index for the error message.

    Raises:
        InputError: another device than CUDA's, a faiss without GPU support, a kind of index that FAISS does not have
            there, more than 2048 lists searched, or a k beyond `largest_k`.
    """
    if device.type != "cuda":
        raise InputError(f"FaissIndex: FAISS does not run on {device.type!r}; use the CPU or a CUDA device")
    # This machine may plan a run for the GPUs of another machine, and the faiss here may lack GPU support.
    if torch.cuda.is_available() and not hasattr(import_faiss(), "StandardGpuResources"):
        raise InputError("FaissIndex: this faiss build has no GPU support; install faiss-gpu")
    if not _runs_on_gpu(index):
        raise InputError(f"FaissIndex: FAISS cannot move factory={factory!r} to a GPU; {ADVICE}")
    lists = inverted_lists(index)
    if lists is not None and lists.nprobe > MAX_SELECTION:
        raise InputError(f"nprobe={lists.nprobe}: FAISS on a GPU searches at most {MAX_SELECTION} lists")
    check_k(k, largest_k(index), after_transforms(index).d, factory)


def check_k(k: int, largest: int, d: int, factory: str) -> None:
    """Refuse a k beyond `largest` (see `largest_k`) for factory and dimension d, which the message names."""
    if k > largest:
        raise InputError(
            f"k={k}: FAISS on a GPU finds at most {largest} neighbours with factory={factory!r} at d={d}; {ADVICE}"
        )


def largest_k(index: Any) -> int:
    """Return how many neighbours FAISS finds on a GPU with this kind of index: 0 if its dimension is too large."""
    faiss, index = import_faiss(), after_transforms(index)
    if isinstance(index, faiss.IndexFlat):
        return CUVS_MAX_SELECTION if _has_cuvs() else MAX_SELECTION
    codes, kinds = getattr(index, "sq", None), faiss.ScalarQuantizer
    ranges = codes is not None and codes.qtype in (kinds.QT_8bit, kinds.QT_6bit, kinds.QT_4bit)
    free = SHARED_BYTES - 8 * index.d * ranges
    return max((width for width in WIDTHS if 12 * width * (4 if width <= 1024 else 2) <= free), default=0)


class GpuIndex:
    """An index in the memory of one GPU, without the transforms in front of it.

    Args:
        index: a built index on the CPU that `check_gpu` accepts. It is copied.
        device: a CUDA device with its number.
        factory: description of the index for error messages.
        float16: hold the vectors of `Flat` and the centres of lists in half precision.
        scratch_mib: memory in MiB that FAISS reserves; None for FAISS's own choice.

    Raises:
        InputError: FAISS refuses, for example because the memory of the GPU is too small.
    """

    def __init__(
        self, index: Any, device: torch.device, factory: str, float16: bool = False, scratch_mib: int | None = None
    ) -> None:
        faiss, index = import_faiss(), after_transforms(index)
        self.device, self._factory, self._largest_k = device, factory, largest_k(index)
        resources, options = _resources(scratch_mib, device.index), faiss.GpuClonerOptions()
        options.useFloat16 = options.useFloat16CoarseQuantizer = float16
        options.use_cuvs = _has_cuvs() and isinstance(index, faiss.IndexFlat)
        try:
            self._index = faiss.index_cpu_to_gpu(resources, device.index, index, options)
        except RuntimeError as error:
            raise InputError(
                f"FaissIndex: FAISS cannot move factory={factory!r} to a GPU ({reason(error)}); {ADVICE}"
            ) from error

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search like `Index.search`. Nothing waits for the GPU.

        Raises:
            InputError: k is beyond `largest_k`.
        """
        check_k(k, self._largest_k, queries.shape[1], self._factory)
        # FAISS takes the stream of the current device, which may be another GPU.
        with torch.cuda.device(self.device):
            return self._index.search(queries, k)

    def to_cpu(self) -> Any:
        """Copy the index to the CPU."""
        return import_faiss().index_gpu_to_cpu(self._index)


@cache
def _resources(scratch_mib: int | None, device_number: int) -> Any:
    """Return GPU resources for all indexes of one GPU. Otherwise each of 1000 classes would reserve memory."""
    resources = import_faiss().StandardGpuResources()
    if scratch_mib is not None:
        resources.setTempMemory(scratch_mib * 2**20)
    return resources


def _has_cuvs() -> bool:
    """Tells whether this is the faiss of the package faiss-gpu-cuvs."""
    return "NVIDIA_CUVS" in import_faiss().get_compile_options()


def _runs_on_gpu(index: Any) -> bool:
    """Tells whether FAISS copies an index of exactly this kind, and PyTorch can do the transforms in front of it."""
    faiss, inner = import_faiss(), after_transforms(index)
    if not all(isinstance(step, faiss.LinearTransform) for step in transforms(index)):
        return False
    if not isinstance(inner, faiss.IndexIVF):
        return type(inner) in (faiss.IndexFlat, faiss.IndexFlatL2)
    if type(inner) is faiss.IndexIVFScalarQuantizer:
        kinds = faiss.ScalarQuantizer
        known = (kinds.QT_8bit, kinds.QT_8bit_uniform, kinds.QT_6bit, kinds.QT_4bit, kinds.QT_4bit_uniform)
        if inner.sq.qtype not in (*known, kinds.QT_fp16):
            return False
    elif type(inner) is not faiss.IndexIVFFlat:
        return False
    return type(faiss.downcast_index(inner.quantizer)) in (faiss.IndexFlat, faiss.IndexFlatL2)
