"""What is known of ATen's operations: what they read, write, wait for, and what CUDA asks of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.pretend_cuda.device import DeviceMismatch

aten = torch.ops.aten

# Pointwise, but a CPU scalar does not mix with CUDA tensors there.
NO_CPU_SCALAR = {aten.nextafter.default}
# Not tagged as pointwise, but 0-dimensional CPU tensors are read on the host.
CPU_SCALAR_TOO = {
    "aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::index_put", "aten::index_put_",
    "aten::_index_put_impl_", "aten::index_fill", "aten::index_fill_", "aten::fill", "aten::fill_", "aten::lerp",
    "aten::lerp_", "aten::clamp", "aten::clamp_", "aten::add", "aten::mul", "aten::pow", "aten::_foreach_mul_",
    "aten::_foreach_mul", "aten::_foreach_add_", "aten::_foreach_add", "aten::_foreach_div_", "aten::_foreach_div",
    "aten::_foreach_lerp_", "aten::copysign", "aten::addcmul_", "aten::addcdiv_", "aten::addcmul", "aten::addcdiv",
}  # fmt: skip
INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
            "aten::_unsafe_index_put"}  # fmt: skip
COPIES = {"aten::copy_", "aten::_foreach_copy_", "aten::_to_copy"}
# These read a number or a size from the device.
SYNCS = {
    "aten::_local_scalar_dense": "item", "aten::item": "item", "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique", "aten::unique_consecutive": "unique", "aten::unique_dim": "unique",
    "aten::_unique": "unique", "aten::bincount": "bincount", "aten::equal": "equal", "aten::is_nonzero": "item",
    "aten::_linalg_eigh": "linalg info", "aten::linalg_eig": "linalg info", "aten::_linalg_svd": "linalg info",
    "aten::linalg_eigvalsh": "linalg info", "aten::_linalg_check_errors": "linalg info", "aten::histc": "histc",
    "aten::allclose": "equal",
}  # fmt: skip
# C++ takes the tensors for the CPU's and picks its fused attention, which stands for the GPU's.
STAND_INS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip
# A kernel under one of these keys runs on CUDA tensors.
CUDA_KEYS = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional",
             "CompositeImplicitAutograd", "BackendSelect")  # fmt: skip


class Op:
    """What the schema of an operation says, looked up once."""

    def __init__(self, func: Any) -> None:
        arguments = func._schema.arguments
        self.name = func._schema.name
        self.short = self.name.removeprefix("aten::")
        if func._overloadname != "default":
            self.short += f".{func._overloadname}"
        self.arg_names = [a.name for a in arguments]
        self.writes = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.returned = _returned_arguments(func._schema)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        pointwise = torch.Tag.pointwise in func.tags
        self.cpu_scalars = (pointwise or self.name in CPU_SCALAR_TOO) and func not in NO_CPU_SCALAR
        has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
        # Where PyTorch was built for CUDA, it knows its kernels, whether there is a GPU or not.
        known = self.name.startswith("aten::") and torch.backends.cuda.is_built()
        allowed = not known or self.short in SPECIAL or self.name in STAND_INS
        self.on_cuda = allowed or any(map(has_kernel, CUDA_KEYS))
        # `item` is made of other operations, too, but reads a number from the device either way.
        self.composite = has_kernel("CompositeImplicitAutograd") and self.name != "aten::item"

    def argument(self, name: str, args: tuple, kwargs: dict) -> Any:
        """The value of an argument of a call, None if it is not given."""
        position = self.arg_names.index(name) if name in self.arg_names else len(args)
        return args[position] if position < len(args) else kwargs.get(name)


def _returned_arguments(schema: Any) -> list[int | None]:
    """For each return value the argument that it is, or None."""
    infos = [argument.alias_info for argument in schema.arguments]
    returned: list[int | None] = []
    for value in schema.returns:
        found, info = None, value.alias_info
        if info is not None and info.is_write:
            same = [i for i, own in enumerate(infos) if own and own.is_write and own.before_set & info.before_set]
            found = same[-1] if same else None
        returned.append(found)
    return returned


@functools.cache
def op_of(func: Any) -> Op:
    return Op(func)


# Operations that the CPU lacks or that CUDA restricts.


def _int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[0] <= 16 or a.shape[1] % 8 or b.shape[1] % 8:
        raise DeviceMismatch(
            f"_int_mm: CUDA wants self.size(0) > 16 and size(1) and mat2.size(1) multiples of 8, got "
            f"{tuple(a.shape)} @ {tuple(b.shape)}"
        )
    # cuBLAS has kernels of all layouts only on some GPUs (PyTorch issue 169956).
    if not a.is_contiguous() or not b.T.is_contiguous():
        raise DeviceMismatch(
            f"_int_mm: cuBLAS wants rows of self and columns of mat2, strides {a.stride()}, {b.stride()}"
        )
    return torch._int_mm(a, b)


def _mm_dtype(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    wider = out_dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16)
    if a.dtype != b.dtype or not (out_dtype == a.dtype or wider):
        raise DeviceMismatch(f"mm: out_dtype={out_dtype} does not go with {a.dtype} @ {b.dtype}")
    return (a.float() @ b.float()).to(out_dtype)


SPECIAL: dict[str, Callable] = {"_int_mm": _int_mm, "mm.dtype": _mm_dtype, "bmm.dtype": _mm_dtype}
