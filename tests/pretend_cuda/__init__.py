"""A pretended CUDA device for machines that have none: runs `device="cuda"` code on the CPU and polices it.

Inside `with PretendCuda() as gpu:` a tensor made with `device="cuda"` (or moved there) is a `PretendTensor`. To Python
and to PyTorch's dispatcher it is on `cuda:0` (`.device`, `.is_cuda`, autograd keys); its values live on the CPU. Each
ATen operation that touches one passes through `police.Police.run`, which

* raises `DeviceMismatch` where CUDA would: an operation that mixes tensors of the two devices (0-dimensional CPU
  tensors may take part in most, and CPU index tensors may index a CUDA tensor), a generator of the other device, a
  result on the device written into a CPU tensor, shapes that `mm(out_dtype=)` refuses, an operation
  without a CUDA kernel. PyTorch itself refuses `.numpy()`;
* counts, per source line of the project, how often the host waits: `.item()`, `bool()`, `.tolist()`, `.cpu()`, blocking
  copies to the device, `nonzero`, boolean masks, `unique`, `multinomial` with checks, factorisations that look at an
  info flag.

`torch.cuda` is patched for the time of the block, so that Lightning's `accelerator="gpu"` runs. In a block of
`world_of_nccl()` the default group of torch.distributed refuses CPU tensors; one process stands for each GPU.

    with PretendCuda() as gpu:
        x = torch.randn(3, device="cuda")
        with gpu.record() as seen:
            (x > 0).any().item()
        assert seen.syncs == 1, seen.report()

Not seen: real kernels (their numbers, determinism, launch limits, memory, speed), and which types a kernel takes;
autocast, which leaves all types as they are; code that takes `data_ptr()` (Triton, FAISS, NCCL, extensions);
`torch.compile` and CUDA graphs; streams and races, because all happens in order; several GPUs; pinned memory; the
device of tensors in checkpoints, which are pickled as the CPU's. `Module.to` makes new Parameters here, on a GPU the
old ones stay. After the first block, device guards do nothing for the rest of the process.
"""

from tests.pretend_cuda.cuda import PretendCuda
from tests.pretend_cuda.police import world_of_nccl
from tests.pretend_cuda.tensor import DeviceMismatch, PretendTensor, active

__all__ = ["DeviceMismatch", "PretendCuda", "PretendTensor", "active", "world_of_nccl"]
