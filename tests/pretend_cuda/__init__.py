"""A pretended CUDA device for machines that have none: runs `device="cuda"` code on the CPU and polices it.

Inside `with PretendCuda() as gpu:` a tensor made with `device="cuda"` (or moved there) is a `PretendTensor`. To Python
and to PyTorch's dispatcher it is on `cuda:0` (`.device`, `.is_cuda`, autograd and autocast keys); its values live on
the CPU. Each ATen operation that touches one passes through `police.Police.run`, which

* raises `DeviceMismatch` where CUDA would: an operation that mixes tensors of the two devices (0-dimensional CPU
  tensors may take part in pointwise operations, and CPU index tensors may index a CUDA tensor), a generator of the
  other device, a result on the device written into a CPU tensor, shapes that `_int_mm` and `mm(out_dtype=)` refuse, an
  operation without a CUDA kernel. PyTorch itself refuses `.numpy()`;
* counts, per source line of the project: synchronisations (`.item()`, `bool()`, `.tolist()`, `.cpu()`, blocking copies
  to the device, `nonzero`, boolean masks, `unique`, `multinomial` with checks, factorisations that look at an info
  flag);
* keeps separate default random streams for the CPU and the pretended device.

A custom operator of `torch.library` is one operation. It runs with its CPU implementation.

`torch.cuda` is patched for the time of the block, so that Lightning's `accelerator="gpu"` and `torch.autocast("cuda")`
run. `install_fake_faiss_gpu()` lets FAISS's indexes of the CPU stand for those of a GPU.
`install_fake_nccl()` gives torch.distributed a backend `nccl` that refuses CPU tensors; one process stands for each
GPU.

    with PretendCuda(project=".") as gpu:
        x = torch.randn(3, device="cuda")
        with gpu.record() as seen:
            (x > 0).any().item()
        assert seen.syncs == 1
        print(seen.report())               # by source line

Not seen: real kernels (their numbers, determinism, launch limits, memory, speed), and which types a kernel takes; code
that takes `data_ptr()` (Triton, FAISS, NCCL, extensions); `torch.compile`, CUDA graphs, FakeTensorMode; streams and
races, because all happens in order; several GPUs; pinned memory; autocast inside C++ functions (its lists apply to
calls from Python); the device of tensors in checkpoints, which are pickled as the CPU's. `Module.to` makes new
Parameters here, on a GPU the old ones stay. After the first block, device guards do
nothing for the rest of the process.
"""

from tests.pretend_cuda.cuda import PretendCuda
from tests.pretend_cuda.device import DeviceMismatch, NotOnCuda
from tests.pretend_cuda.faiss_gpu import install_fake_faiss_gpu
from tests.pretend_cuda.nccl import install_fake_nccl
from tests.pretend_cuda.tensor import PretendTensor, real

__all__ = [
    "DeviceMismatch",
    "NotOnCuda",
    "PretendCuda",
    "PretendTensor",
    "install_fake_faiss_gpu",
    "install_fake_nccl",
    "real",
]
