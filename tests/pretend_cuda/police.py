"""Runs each operation with the CPU's values, after it has refused what CUDA refuses, and counts the waits."""

import contextlib
import functools
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretend_cuda.tensor import (
    CPU,
    DEVICE,
    DeviceMismatch,
    PretendTensor,
    canonical,
    check_generators,
    inner,
)

PROJECT, HERE = (str(Path(__file__).parents[above]) for above in (2, 0))
# CUDA reads numbers of the CPU in all operations of these tensors but these.
NO_CPU_SCALAR = {
    "aten::cat",
    "aten::stack",
    "aten::mm",
    "aten::bmm",
    "aten::gather",
    "aten::index_select",
}
INDEXING = {
    "aten::index",
    "aten::_unsafe_index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
}
COPIES = {"aten::copy_", "aten::_foreach_copy_", "aten::_to_copy"}
# These read a number or a size from the device.
SYNCS = {
    "item",
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "allclose",
    "bincount",
    "histc",
}
SYNCS |= {"_unique2", "unique_consecutive", "unique_dim", "_unique"}
SYNCS |= {"_linalg_eigh", "linalg_eig", "_linalg_svd", "linalg_eigvalsh", "_linalg_check_errors"}
# C++ takes the tensors for the CPU's and picks its fused attention, which stands for the GPU's.
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
# A kernel under one of these keys runs on CUDA tensors.
CUDA_KEYS = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
CUDA_KEYS += ("CompositeImplicitAutograd", "BackendSelect")


def _mm_dtype(a, b, out_dtype):
    if (
        a.dtype != b.dtype
        or a.dtype not in (torch.bfloat16, torch.float16)
        or out_dtype != torch.float32
    ):
        raise DeviceMismatch(f"mm: out_dtype={out_dtype} does not go with {a.dtype} @ {b.dtype}")
    return a.float() @ b.float()


# Operations that the CPU lacks or that CUDA restricts.
SPECIAL = {"aten::mm.dtype": _mm_dtype, "aten::bmm.dtype": _mm_dtype}


class Op:
    """What the schema of an operation says."""

    def __init__(self, func):
        self.full, self.name = func.name(), func._schema.name
        self.arguments = [argument.name for argument in func._schema.arguments]
        self.writes = [
            a.name
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, self.full)
        # Where PyTorch was built for CUDA, it knows its kernels, whether there is a GPU or not.
        known = self.name.startswith("aten::") and torch.backends.cuda.is_built()
        allowed = not known or self.full in SPECIAL or self.name.startswith(ATTENTION)
        self.on_cuda = allowed or any(map(has_kernel, CUDA_KEYS))
        # `item` is made of other operations, too, but reads a number from the device either way.
        self.composite = has_kernel("CompositeImplicitAutograd") and self.name != "aten::item"


op_of = functools.cache(Op)


class Waits(Counter):
    """Waits of the host for the device, by kind and source line of the project."""

    syncs = property(Counter.total)

    def report(self):
        """The source lines that wait."""
        return "\n".join(f"{n:4d} x {what}" for what, n in self.most_common(12))


class Police:
    """Runs the operations of one `PretendCuda` block.

    Attributes:
        seen: what has waited; None while nobody records.
    """

    def __init__(self):
        self.seen = None
        # Calls in progress that have tensors on the device and name no device.
        self.implicit = 0
        self.modes = DispatchMode(), FunctionMode()
        for mode in self.modes:
            mode.police = self

    def waits(self, kind):
        """Count a wait at the innermost line of the project."""
        frame = sys._getframe(1)
        while self.seen is not None and frame is not None:
            file = frame.f_code.co_filename
            if (
                file.startswith(PROJECT)
                and not file.startswith(HERE)
                and "site-packages" not in file
            ):
                self.seen[f"{kind} {file[len(PROJECT) + 1 :]}:{frame.f_lineno}"] += 1
                return
            frame = frame.f_back

    def run(self, func, args, kwargs):
        """Run an operation of any tensors."""
        op = op_of(func)
        if op.composite:
            with self.modes[0]:
                return func.decompose(*args, **kwargs)
        given, named = leaves((args, kwargs)), dict(zip(op.arguments, args, strict=False)) | kwargs
        pretended = any(isinstance(value, PretendTensor) for value in given)
        check_collective(op.name, given, pretended)
        target = None if named.get("device") is None else canonical(named["device"])
        if target == CPU and self.implicit:
            # A C++ function makes a tensor where its arguments are, and takes them for the CPU's.
            target = DEVICE
        if not pretended and target != DEVICE:
            check_generators(op.full, given, CPU)
            return func(*args, **kwargs)
        if op.name in COPIES:
            return self._copy(func, op, args, kwargs, target, named.get("non_blocking"))
        self._check(op, args, given, named, DEVICE if target is None else target)
        out = SPECIAL.get(op.full, func)(*mapped(_on_cpu, args), **mapped(_on_cpu, kwargs))
        # What is an argument stays the same object.
        same = {id(value._values): value for value in given if isinstance(value, PretendTensor)}
        on_device = target is None or target == DEVICE
        return mapped(
            lambda value: same[id(value)] if id(value) in same else _wrapped(value, on_device),
            [out],
        )[0]

    def _copy(self, func, op, args, kwargs, target, non_blocking):
        if op.name == "aten::_to_copy":
            from_device = isinstance(args[0], PretendTensor)
            to_device = from_device if target is None else target == DEVICE
            kept = {name: value for name, value in kwargs.items() if name != "non_blocking"}
            out = func(*mapped(_on_cpu, args), **mapped(_on_cpu, kept))
            self._copied(from_device, to_device, non_blocking)
            return PretendTensor(out) if to_device else out
        many = op.name == "aten::_foreach_copy_"
        for into, source in zip(*(args[:2] if many else ([args[0]], [args[1]])), strict=True):
            self._copied(
                isinstance(source, PretendTensor),
                isinstance(into, PretendTensor),
                many or non_blocking,
            )
        func(*mapped(_on_cpu, args[:2]))
        return None if many else args[0]

    def _copied(self, from_device, to_device, non_blocking):
        """A copy between the devices waits, unless it goes to the device and need not."""
        if from_device != to_device and not (non_blocking and to_device):
            self.waits("D2H" if from_device else "H2D")

    def _check(self, op, args, given, named, target):
        """Refuse what CUDA refuses, and count a wait."""
        if not op.on_cuda:
            raise DeviceMismatch(f"{op.full}: it has no kernel for CUDA")
        check_generators(op.full, given, target)
        plain = [
            t for t in given if isinstance(t, torch.Tensor) and not isinstance(t, PretendTensor)
        ]
        if plain and any(isinstance(t, PretendTensor) for t in given):
            written = {id(t) for t in leaves([named.get(name) for name in op.writes])}
            if op.name in INDEXING and isinstance(args[0], PretendTensor):
                on_cpu = {
                    id(i) for i in args[1] if i is not None and not isinstance(i, PretendTensor)
                }
                for _ in on_cpu:
                    self.waits("H2D index")
                plain = [t for t in plain if id(t) not in on_cpu]
            if op.name in NO_CPU_SCALAR or any(t.ndim > 0 or id(t) in written for t in plain):
                shapes = [tuple(t.shape) for t in plain]
                raise DeviceMismatch(
                    f"{op.full}: tensors are on two devices, those on the CPU have shapes {shapes}"
                )
        if _waits(op, args, named):
            self.waits(op.name.removeprefix("aten::"))


def _waits(op, args, named):
    """Whether the host waits for an operation."""
    if op.name == "aten::repeat_interleave":
        return named.get("output_size") is None
    if op.name == "aten::multinomial":  # It checks the probabilities.
        return not named.get("replacement") or named["num_samples"] == 1
    if op.name in INDEXING:
        masks = [
            i
            for i in args[1]
            if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)
        ]
        # One number for all chosen places becomes `masked_fill`.
        return bool(masks) and not (
            op.name != "aten::index" and len(masks) == 1 and args[2].numel() == 1
        )
    return op.name.removeprefix("aten::") in SYNCS


def _on_cpu(value):
    if isinstance(value, PretendTensor):
        return inner(value)
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _wrapped(value, on_device):
    # Fake and meta tensors keep a device of their own.
    return (
        PretendTensor(value)
        if on_device and type(value) is torch.Tensor and value.device == CPU
        else value
    )


# PyTorch's own walk through arguments takes several times as long.


def leaves(tree):
    """All values in a nest of lists, tuples and dicts."""
    if isinstance(tree, dict):
        tree = tree.values()
    return [
        value
        for part in tree
        for value in (leaves(part) if isinstance(part, (list, tuple, dict)) else (part,))
    ]


def mapped(function, tree):
    """The same nest with `function` of each value."""
    if isinstance(tree, dict):
        return {name: mapped(function, part) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([mapped(function, part) for part in tree])
    return function(tree)


class DispatchMode(TorchDispatchMode):
    """Sees the operations of the dispatcher, also those without a pretended tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.police.run(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Sees the calls of PyTorch's functions from Python, before C++ looks at the devices of their tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if not any(isinstance(value, PretendTensor) for value in leaves((args, kwargs))):
            return func(*args, **kwargs)
        func, args, kwargs = _moved(func, args, kwargs)
        named = kwargs.get("device") is not None or any(isinstance(a, torch.device) for a in args)
        self.police.implicit += not named
        try:
            return func(*args, **kwargs)
        finally:
            self.police.implicit -= not named


def _moved(func, args, kwargs):
    """Name the device in calls where C++ would take pretended tensors for the CPU's."""
    first, *rest = args or (None,)
    if func in (torch.tensor, torch.as_tensor, torch.asarray) and isinstance(first, PretendTensor):
        return func, args, {"device": DEVICE, **kwargs}
    like_other = (
        func in (torch.Tensor.to, torch.Tensor.type_as)
        and rest
        and isinstance(rest[0], PretendTensor)
    )
    if like_other and not isinstance(first, PretendTensor):
        return (
            torch.Tensor.to,
            (first, *rest[1:]),
            {**kwargs, "device": DEVICE, "dtype": rest[0].dtype},
        )
    return func, args, kwargs


# NCCL is gloo, whose default group takes tensors on the device alone. The set holds its name.
_pretending = set()


@contextlib.contextmanager
def world_of_nccl():
    """Let the default group of gloo refuse tensors on the CPU; other groups stay gloo's.

    Collectives of objects then go through tensors on the device, as with NCCL.
    """
    before = distributed_c10d._get_object_coll_device
    distributed_c10d._get_object_coll_device = lambda group=None: (
        DEVICE if group in (None, dist.group.WORLD) else before(group)
    )
    _pretending.add(dist.group.WORLD.group_name)
    try:
        yield
    finally:
        _pretending.clear()
        distributed_c10d._get_object_coll_device = before


def check_collective(name, given, pretended):
    """Refuse a collective operation of CPU tensors in a group of NCCL."""
    # A barrier passes a tensor that it does not use.
    if pretended or not _pretending or not name.startswith("c10d::") or name == "c10d::barrier":
        return
    groups = [
        v for v in given if isinstance(v, torch.ScriptObject) and "ProcessGroup" in str(v._type())
    ]
    if any(dist.ProcessGroup.unbox(group).group_name in _pretending for group in groups):
        raise DeviceMismatch(f"{name}: No backend type associated with device type cpu")
