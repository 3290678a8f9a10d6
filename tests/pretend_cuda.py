# ruff: noqa: E501, SIM102, PT018
"""A pretended CUDA device, for machines that have none: runs `device="cuda"` code on the CPU and polices it.

Inside `with PretendCuda() as gpu:` a tensor made with `device="cuda"` (or moved there) is a `PretendTensor`: to Python and
to PyTorch's dispatcher it *is* on `cuda:0` (`.device`, `.is_cuda`, autograd and autocast keys), its values live on the CPU.
Every ATen operation that touches one passes through `_Policeman.run`, which

* raises `DeviceMismatch` where CUDA would: an operation that mixes tensors of the two devices (0-dimensional CPU tensors may
  take part in pointwise operations; CPU index tensors may index a CUDA tensor), a generator of the other device, CUDA-only
  shape rules (`_int_mm`, `mm(out_dtype=)`), writing a CUDA result into a CPU tensor, `.numpy()` of a CUDA tensor (PyTorch
  itself);
* counts, per source line of the project: synchronisations (`.item()`, `bool()`, `.tolist()`, `.cpu()`, blocking
  host-to-device copies, `nonzero` and boolean-mask indexing, `unique`, `multinomial` with checks, factorisations that look
  at an info flag), operations (a stand-in for kernel launches), bytes moved and multiply-adds by type;
* keeps separate default random streams for the CPU and the pretended device.

`torch.cuda.*` (is_available, events, streams, seeds, memory, capability 9.0 …) is patched for the time of the block, so that
PyTorch Lightning's `accelerator="gpu"` and `torch.autocast("cuda")` run. `install_fake_faiss_gpu()` gives FAISS a pretended
GPU that enforces the rules of `faiss.contrib.torch_utils`.

    with PretendCuda(project=".") as gpu:
        x = torch.randn(3, device="cuda")
        with gpu.record() as seen:
            (x > 0).any().item()
        assert seen.syncs == 1 and seen.ops == 2
        seen.report()                      # by source line

As pytest fixture::

    @pytest.fixture
    def gpu():
        with PretendCuda() as gpu:
            yield gpu

Not seen: real kernels (numerics, determinism, launch limits, memory, speed); code that takes `data_ptr()` (Triton, FAISS,
NCCL, extensions; FAISS has a stand-in below); `torch.compile`, CUDA graphs, FakeTensorMode (`main.py plan`); streams and
races (all is in order here); several GPUs; pinned memory; which types a kernel takes (that one exists is checked, where
PyTorch was built for CUDA); autocast inside C++ functions (its lists are applied to calls from Python); devices in
checkpoints (tensors are pickled as the CPU's). `Module.to` makes new Parameters here, on a GPU the old ones stay.
Attention is counted as one operation. Entering it lets device guards do nothing for the rest of the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # before torch.cuda is patched: it takes stock of its functions
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")


class DeviceMismatch(RuntimeError):
    """What CUDA would refuse."""


class NotOnCuda(DeviceMismatch):
    """An operation that has no CUDA kernel, or not for these shapes and types."""


# --------------------------------------------------------------------------------------------------------------------
# The tensor


class PretendTensor(torch.Tensor):
    """A tensor that says it is on cuda:0.

    For C++ it is a CPU tensor with the dispatch keys of CUDA (autograd, autocast) and Python's, so that autograd needs no
    driver; every operation comes to `__torch_dispatch__`. What asks a tensor for its device from Python is told cuda:0.
    """

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> PretendTensor:
        assert type(values) is torch.Tensor, type(values)
        out = torch.Tensor._make_subclass(cls, values, False, device_for_backend_keys=DEVICE)  # type: ignore[attr-defined]
        out._cached = values
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Where no mode is active: threads that autograd starts."""
        if _active is None:
            raise RuntimeError(f"{func}: a pretended CUDA tensor is used outside `with PretendCuda()`")
        return _active.run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return 0

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Here, because C++ takes it for a CPU tensor, which .to("cpu") leaves as it is."""
        args = list(args)
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, torch.Tensor):
            (args.__setitem__(0, other.device) if args else kwargs.pop("other"))
            kwargs["device"] = other.device
            kwargs["dtype"] = other.dtype
            args = args[1:]
        copy = kwargs.pop("copy", False)
        memory_format = kwargs.pop("memory_format", None)
        for _name, position in (("copy", 3), ("copy", 4)):
            if len(args) > position and isinstance(args[position], bool):
                copy = args[position]
                args = args[:position]
        device, dtype, non_blocking, parsed_format = torch._C._nn._parse_to(*args, **kwargs)
        memory_format = memory_format or parsed_format
        dtype = dtype or self.dtype
        keep = memory_format is None or memory_format == torch.preserve_format
        if device is None or _canonical(device) == DEVICE:
            if dtype == self.dtype and not copy and (keep or self.is_contiguous(memory_format=memory_format)):
                return self
            device = DEVICE
        options = {} if memory_format is None else {"memory_format": memory_format}
        return aten._to_copy.default(self, dtype=dtype, device=device, non_blocking=non_blocking, **options)

    def cpu(self, memory_format: Any = torch.preserve_format) -> Any:
        return self.to("cpu", memory_format=memory_format)

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        return self

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("pretended CUDA tensors have no DLPack")

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
        dtype, device = dtype or self.dtype, DEVICE if device is None else device
        return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)

    def pin_memory(self, device: Any = None) -> Any:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"pretend_cuda({_inner(self)!r}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copied = self.detach().clone()
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = _inner(self)
        with torch._C._DisableTorchDispatch():
            if getattr(self, "_is_param", False):
                values = torch.nn.Parameter(values, requires_grad=self.requires_grad)
            return values.__reduce_ex__(protocol)


def _inner(t: PretendTensor) -> torch.Tensor:
    """A CPU tensor of the same memory."""
    cached = t._cached
    with torch._C._DisableTorchDispatch():
        if cached.data_ptr() == t.data_ptr() and cached.shape == t.shape and cached.stride() == t.stride():
            return cached
        made = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride())
    t._cached = made
    return made


def real(tree: Any) -> Any:
    """The values of pretended tensors in any nest of containers, without counting anything."""
    return tree_map_only(PretendTensor, _inner, tree)


# --------------------------------------------------------------------------------------------------------------------
# Generators


_generators: dict[int, torch.device] = {}


class _GeneratorType(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class PretendGenerator(torch._C.Generator, metaclass=_GeneratorType):
    """`torch.Generator` that can say it is on the pretended device; the numbers are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> PretendGenerator:
        out = super().__new__(cls, "cpu")
        out._on = _canonical(device)
        # PyTorch hands operations another Python object of the same generator: known by its address.
        _generators[out._cdata] = out._on
        weakref.finalize(out, _generators.pop, out._cdata, None)
        return out

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._on


def _canonical(device: Any) -> torch.device:
    device = torch.device(device) if not isinstance(device, torch.device) else device
    return DEVICE if device.type == "cuda" else device


def _where(generator: Any) -> torch.device:
    return _generators.get(generator._cdata, CPU)


# --------------------------------------------------------------------------------------------------------------------
# What is known of operations

# Pointwise, but a CPU scalar does not mix with CUDA tensors there (FakeTensor's list, and those without a TensorIterator).
NO_CPU_SCALAR = {aten.nextafter.default}
# Not tagged as pointwise, yet 0-dimensional CPU tensors are read on the host (TensorIterator or an explicit rule).
CPU_SCALAR_TOO = {
    "aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::index_put", "aten::index_put_",
    "aten::_index_put_impl_", "aten::index_fill", "aten::index_fill_", "aten::fill", "aten::fill_", "aten::lerp",
    "aten::lerp_", "aten::clamp", "aten::clamp_", "aten::add", "aten::mul", "aten::pow", "aten::_foreach_mul_",
    "aten::_foreach_mul", "aten::_foreach_add_", "aten::_foreach_add", "aten::_foreach_div_", "aten::_foreach_div",
    "aten::_foreach_lerp_", "aten::copysign", "aten::addcmul_", "aten::addcdiv_", "aten::addcmul", "aten::addcdiv",
}  # fmt: skip
INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
            "aten::_unsafe_index_put"}  # fmt: skip
COPIES = {"aten::copy_", "aten::copy", "aten::_foreach_copy_", "aten::_copy_from"}
# Read a number or a size from the device.
SYNCS = {
    "aten::_local_scalar_dense": "item", "aten::nonzero": "nonzero", "aten::masked_select": "masked_select",
    "aten::_unique2": "unique", "aten::unique_consecutive": "unique", "aten::unique_dim": "unique",
    "aten::_unique": "unique", "aten::bincount": "bincount", "aten::equal": "equal", "aten::is_nonzero": "item",
    "aten::_linalg_eigh": "linalg info", "aten::linalg_eig": "linalg info", "aten::_linalg_svd": "linalg info",
    "aten::_linalg_solve_ex": "", "aten::linalg_eigvalsh": "linalg info", "aten::_linalg_check_errors": "linalg info",
    "aten::histc": "histc", "aten::allclose": "equal", "aten::_linalg_det": "",
}  # fmt: skip
FREE = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
        "aten::resize_", "aten::set_", "aten::lift_fresh", "aten::_fused_sdp_choice", "aten::is_pinned"}  # fmt: skip
# Read only the rows that they give.
GATHERS = {"aten::index_select", "aten::gather", "aten::index", "aten::embedding", "aten::searchsorted",
           "aten::_unsafe_index", "aten::scatter_", "aten::index_put_", "aten::_index_put_impl_", "aten::index_add_"}  # fmt: skip


# C++ takes these tensors for the CPU's and picks its fused attention, which stands for the GPU's.
STAND_INS = {
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip


class _Op:
    """What the schema of an operation says, looked up once."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name
        self.short = schema.name.removeprefix("aten::") + (
            "" if func._overloadname == "default" else f".{func._overloadname}"
        )
        self.arg_names = [a.name for a in schema.arguments]
        self.writes = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        aliases = [a.alias_info for a in schema.arguments]
        self.returned: list[int | None] = []  # the argument that a return value is
        view = False
        for r in schema.returns:
            found = None
            if r.alias_info is not None and r.alias_info.is_write:
                for i, info in enumerate(aliases):
                    if info is not None and info.is_write and info.before_set & r.alias_info.before_set:
                        found = i
            elif r.alias_info is not None:
                view = True
            self.returned.append(found)
        self.is_view = view
        self.inplace_view = torch.Tag.inplace_view in func.tags
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        pointwise = torch.Tag.pointwise in func.tags
        self.cpu_scalars = (pointwise or self.name in CPU_SCALAR_TOO) and func not in NO_CPU_SCALAR
        self.has_device = "device" in self.arg_names
        packet = func._overloadpacket
        self.flops = flop_registry.get(packet)
        # Where PyTorch was built for CUDA it knows its kernels, whether there is a GPU or not.
        keys = (
            "CUDA",
            "CompositeExplicitAutograd",
            "CompositeExplicitAutogradNonFunctional",
            "CompositeImplicitAutograd",
        )
        known = not func.name().startswith("aten::") or not torch.backends.cuda.is_built()
        self.on_cuda = known or any(
            torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in (*keys, "BackendSelect")
        )
        self.composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


_op = functools.cache(_Op)


class Seen:
    """What happened while recording."""

    def __init__(self) -> None:
        self.ops = 0
        self.op_names: Counter = Counter()
        self.sync_kinds: Counter = Counter()
        self.sync_sites: Counter = Counter()
        self.op_sites: Counter = Counter()
        self.async_copies = 0
        self.bytes = 0
        self.site_bytes: Counter = Counter()
        self.bytes_of_op: Counter = Counter()
        self.flops: defaultdict = defaultdict(int)

    @property
    def syncs(self) -> int:
        """Times that the host waits for the device."""
        return sum(self.sync_kinds.values())

    def report(self, sites: int = 12) -> str:
        """One line, then the source lines that synchronise."""
        lines = [f"ops {self.ops}  syncs {self.syncs} {dict(self.sync_kinds)}  MB {self.bytes / 1e6:.1f}  "
                 f"GFLOP {({k: round(v / 1e9, 3) for k, v in self.flops.items()})}"]  # fmt: skip
        lines += [f"   {n:4d} x {kind:12s} {site}" for (kind, site), n in self.sync_sites.most_common(sites)]
        return "\n".join(lines)


class _Policeman:
    def __init__(self, project: str | None) -> None:
        self.project = project
        self.recorders: list[Seen] = []
        self.cuda_rng = torch._C.Generator("cpu").manual_seed(1).get_state()
        self.implicit = 0  # calls in progress that have tensors on the device and name no other

    # Entry

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        op = _op(func)
        if op.composite and op.name not in ("aten::item",):
            out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        flat, _ = tree_flatten((args, kwargs))
        pretended = [a for a in flat if isinstance(a, PretendTensor)]
        device = kwargs.get("device")
        if device is None and op.has_device:
            position = op.arg_names.index("device")
            device = args[position] if position < len(args) else None
        target = None if device is None else _canonical(device)
        if target == CPU and self.implicit:
            # A C++ function makes a tensor where those of its arguments are, which C++ takes for the CPU.
            target = DEVICE
        if not pretended and (target is None or target == CPU or target.type == "meta"):
            self._check_generator(op, flat, CPU)
            return func(*args, **kwargs)  # nothing to do with the device
        return self._on_device(func, op, args, kwargs, flat, pretended, target)

    def _on_device(
        self, func: Any, op: _Op, args: tuple, kwargs: dict, flat: list, pretended: list, target: torch.device | None
    ) -> Any:
        plain = [a for a in flat if isinstance(a, torch.Tensor) and not isinstance(a, PretendTensor)]
        if op.name in COPIES or op.name == "aten::_to_copy":
            return self._copy(func, op, args, kwargs, target)
        if not op.on_cuda and op.short not in SPECIAL and op.short not in STAND_INS:
            raise NotOnCuda(f"{op.short}: Could not run with arguments from the 'CUDA' backend: it has no kernel there")
        if pretended and plain:
            self._check_mixed(func, op, args, kwargs, plain)
        # The device where it computes: that of its tensors, else the one asked for.
        here = DEVICE if pretended or target == DEVICE else CPU
        self._check_generator(op, flat, here if target is None else target)
        self._count_syncs(op, args, kwargs, plain)
        special = SPECIAL.get(op.short)
        real_args, real_kwargs = self._cpu(op, args), self._cpu_kwargs(kwargs)
        with self._random(op, flat):
            out = (special or func)(*real_args, **real_kwargs)
        on_device = target is None or target == DEVICE
        wrapped = self._wrap(func, op, args, kwargs, out, on_device)
        self._count_op(func, op, args, kwargs, out, real_args, real_kwargs)
        return wrapped

    # Copies

    def _copy(self, func: Any, op: _Op, args: tuple, kwargs: dict, target: torch.device | None) -> Any:
        if op.name == "aten::_to_copy":
            source = args[0]
            from_device = isinstance(source, PretendTensor)
            to_device = from_device if target is None else target == DEVICE
            out = func(real(source), **{k: v for k, v in self._cpu_kwargs(kwargs).items() if k != "non_blocking"})
            self._count_copy(from_device, to_device, kwargs.get("non_blocking", False), source)
            self._count_op(func, op, args, kwargs, out, (real(source),), {})
            return PretendTensor(out) if to_device else out
        if op.name == "aten::_foreach_copy_":
            for into, source in zip(args[0], args[1], strict=True):
                self._count_copy(isinstance(source, PretendTensor), isinstance(into, PretendTensor), True, source)
            func(real(args[0]), real(args[1]))
            self._count_op(func, op, args, kwargs, None, (), {})
            return None
        into, source, *rest = args
        non_blocking = kwargs.get("non_blocking", rest[0] if rest else False)
        self._count_copy(isinstance(source, PretendTensor), isinstance(into, PretendTensor), non_blocking, source)
        func(real(into), real(source))
        self._count_op(func, op, args, kwargs, real(into), (real(into), real(source)), {})
        return into

    def _count_copy(self, from_device: bool, to_device: bool, non_blocking: bool, source: Any) -> None:
        if from_device == to_device:
            return
        kind = "D2H" if from_device else "H2D"
        if non_blocking and not from_device:
            for seen in self.recorders:
                seen.async_copies += 1
            return
        self._sync(kind)

    # Rules

    def _check_mixed(self, func: Any, op: _Op, args: tuple, kwargs: dict, plain: list) -> None:
        written = []
        for i in op.writes:
            value = args[i] if i < len(args) else kwargs.get(op.arg_names[i])
            written += [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]
        if any(not isinstance(t, PretendTensor) for t in written):
            raise DeviceMismatch(f"{op.short}: writes a CUDA result into a CPU tensor")
        if op.name in INDEXING and isinstance(args[0], PretendTensor):
            indices = [i for i in args[1] if i is not None]
            others = [t for t in plain if not any(t is i for i in indices)]
            for index in indices:
                if not isinstance(index, PretendTensor):
                    self._sync("H2D index")
            if all(t.ndim == 0 for t in others):
                return
        elif op.name in INDEXING:
            raise DeviceMismatch(
                f"{op.short}: indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        if op.cpu_scalars and all(t.ndim == 0 for t in plain):
            return
        shapes = [tuple(t.shape) for t in plain]
        raise DeviceMismatch(
            f"{op.short}: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu "
            f"(CPU tensors of shape {shapes})"
        )

    def _check_generator(self, op: _Op, flat: list, device: torch.device) -> None:
        for generator in (a for a in flat if isinstance(a, torch._C.Generator)):
            if _where(generator).type != device.type:
                raise DeviceMismatch(
                    f"{op.short}: Expected a '{device.type}' device type for generator but found "
                    f"'{_where(generator).type}'"
                )

    @contextlib.contextmanager
    def _random(self, op: _Op, flat: list) -> Iterator[None]:
        """Operations without a generator draw from the stream of the pretended device."""
        if not op.random or any(isinstance(a, torch._C.Generator) for a in flat):
            yield
            return
        default = torch.default_generator
        before = default.get_state()
        default.set_state(self.cuda_rng)
        try:
            yield
        finally:
            self.cuda_rng = default.get_state()
            default.set_state(before)

    # Values

    @staticmethod
    def _cpu(op: _Op, args: tuple) -> tuple:
        return tuple(tree_map(_to_cpu, a) for a in args)

    @staticmethod
    def _cpu_kwargs(kwargs: dict) -> dict:
        return {k: (False if k == "pin_memory" and v else tree_map(_to_cpu, v)) for k, v in kwargs.items()}

    def _wrap(self, func: Any, op: _Op, args: tuple, kwargs: dict, out: Any, on_device: bool) -> Any:
        def given(i: int) -> Any:
            return args[i] if i < len(args) else kwargs[op.arg_names[i]]

        def one(value: Any, argument: int | None) -> Any:
            if argument is not None:
                outer = given(argument)
                self._fix_shape(func, op, outer, value)
                return outer
            if isinstance(value, torch.Tensor) and on_device:
                # Fake and meta tensors keep a device of their own.
                return PretendTensor(value) if type(value) is torch.Tensor and value.device == CPU else value
            if isinstance(value, (list, tuple)):
                return type(value)(one(v, None) for v in value)
            return value

        if len(op.returned) == 1 or not isinstance(out, tuple):
            return one(out, op.returned[0] if op.returned else None)
        return tuple(one(v, i) for v, i in zip(out, op.returned, strict=True))

    @staticmethod
    def _fix_shape(func: Any, op: _Op, outer: Any, values: Any) -> None:
        """After squeeze_, resize_ or out= the wrapper must have the shape of its values."""
        if not isinstance(outer, PretendTensor) or not isinstance(values, torch.Tensor):
            return
        if outer.shape != values.shape or outer.stride() != values.stride():
            with torch._C._DisableTorchDispatch():
                outer.as_strided_(values.shape, values.stride(), values.storage_offset())
            if outer.shape != values.shape:
                raise NotImplementedError(f"{op.short} changes the shape of its argument")

    # Counting

    def _count_syncs(self, op: _Op, args: tuple, kwargs: dict, plain: list) -> None:
        kind = SYNCS.get(op.name, "")
        if op.name == "aten::repeat_interleave" and isinstance(args[0], PretendTensor):
            kind = "" if kwargs.get("output_size") is not None else "repeat_interleave"
        if op.name == "aten::multinomial":
            replacement = args[2] if len(args) > 2 else kwargs.get("replacement", False)
            kind = "" if replacement and args[1] > 1 else "multinomial check"
        if op.name in INDEXING and len(args) > 1:
            masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
            scalar = (
                op.name != "aten::index"
                and len(args) > 2
                and isinstance(args[2], torch.Tensor)
                and args[2].numel() == 1
            )
            if masks and not (scalar and len(masks) == 1):
                kind = "boolean mask"
        if kind:
            self._sync(kind)

    def _sync(self, kind: str) -> None:
        if self.recorders:
            site = self._site()
            for seen in self.recorders:
                seen.sync_kinds[kind] += 1
                seen.sync_sites[kind, site] += 1

    def _count_op(
        self, func: Any, op: _Op, args: tuple, kwargs: dict, out: Any, real_args: Any, real_kwargs: Any
    ) -> None:
        if (
            not self.recorders
            or op.is_view
            or op.inplace_view
            or op.name in FREE
            or op.name == "aten::_local_scalar_dense"
        ):
            return
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        outs = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        moved = sum(_bytes(t) for t in outs)
        if op.name in GATHERS:
            moved *= 2
        elif op.name == "aten::copy_":
            moved += _bytes(tensors[1])
        else:
            moved += sum(_bytes(t) for t in tensors)
        site = self._site()
        for seen in self.recorders:
            seen.ops += 1
            seen.op_names[op.short] += 1
            seen.bytes += moved
            seen.op_sites[site] += 1
            seen.site_bytes[site] += moved
            seen.bytes_of_op[op.short] += moved
            if op.flops is not None and real_args:
                try:
                    count = op.flops(*real_args, **real_kwargs, out_val=out)
                except Exception:
                    count = 0
                seen.flops[str(real_args[0].dtype).removeprefix("torch.")] += count

    def _site(self) -> str:
        """The innermost line that is not PyTorch's or this file's, and the line of the project that led there."""
        frame, first = sys._getframe(2), None
        while frame is not None:
            code = frame.f_code
            name = code.co_filename
            ours = self.project is not None and name.startswith(self.project) and name != __file__
            if ours or (first is None and name != __file__ and "/torch/" not in name and not name.startswith("<")):
                short = name[len(self.project or "") :].lstrip("/") if ours else "/".join(name.split("/")[-3:])
                line = f"{short}:{frame.f_lineno} {code.co_name}"
                if ours or self.project is None:
                    return line if first is None else f"{first} < {line}"
                first = line
            frame = frame.f_back
        return first or "?"


def _to_cpu(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return _inner(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return value


def _bytes(t: torch.Tensor) -> int:
    """Of the elements that are different places in memory."""
    count = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride != 0 else 1
    return count * t.element_size()


# Operations that the CPU lacks or that CUDA restricts


def _int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[0] <= 16 or a.shape[1] % 8 or b.shape[1] % 8:
        raise NotOnCuda(
            f"_int_mm: CUDA wants self.size(0) > 16 and size(1) and mat2.size(1) multiples of 8, got {tuple(a.shape)} @ "
            f"{tuple(b.shape)}"
        )
    return torch._int_mm(a, b)


def _mm_dtype(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if not (
        a.dtype == b.dtype
        and (out_dtype == a.dtype or (out_dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16)))
    ):
        raise NotOnCuda(f"mm: out_dtype={out_dtype} does not go with {a.dtype} @ {b.dtype}")
    return (a.float() @ b.float()).to(out_dtype)


def _dtype_bmm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return torch.bmm(a.float(), b.float()).to(out_dtype)


SPECIAL: dict[str, Callable] = {
    "_int_mm": _int_mm,
    "mm.dtype": _mm_dtype,
    "bmm.dtype": _dtype_bmm,
    "cudnn_batch_norm": lambda x, w, b, m, v, training, momentum, eps: (
        *torch.native_batch_norm(x, w, b, m, v, training, momentum, eps),
        torch.empty(0, dtype=torch.uint8),
    ),
    "is_pinned": lambda *args, **kwargs: False,
    "_pin_memory": lambda t, device=None: t.clone(),
    "record_stream": lambda *args: None,
}


class _Mode(TorchDispatchMode):
    def __init__(self, police: _Policeman) -> None:
        super().__init__()
        self.police = police

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = _op(func)
        if op.composite and op.name not in ("aten::item",):
            with self:
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        return self.police.run(func, args, kwargs or {})


def _functions(*names: str) -> set:
    owners = (torch, torch.Tensor, torch.nn.functional, torch._C._nn, torch.special)
    return {getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)}


# The lists of torch.amp for CUDA; C++ does not apply them, for it takes these tensors for those of a CPU.
TO_LOWER = _functions(
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "addmv", "addr", "mv", "linear",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu", "einsum",
    "scaled_dot_product_attention",
)  # fmt: skip
TO_FLOAT32 = _functions(
    "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "__pow__", "reciprocal", "rsqrt", "sinh", "cosh", "tan", "acos",
    "asin", "erfinv", "softmax", "log_softmax", "softmin", "softplus", "layer_norm", "group_norm", "norm", "cumsum",
    "cumprod", "prod", "sum", "dist", "cdist", "cosine_similarity", "mse_loss", "l1_loss", "smooth_l1_loss", "nll_loss",
    "cross_entropy", "renorm", "kl_div",
)  # fmt: skip


def _autocast(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if func in TO_LOWER:
        dtype = torch.get_autocast_dtype("cuda")
        sources: tuple = (torch.float32, torch.float16, torch.bfloat16)
    elif func in TO_FLOAT32:
        dtype, sources = torch.float32, (torch.float16, torch.bfloat16)
    else:
        return args, kwargs

    def cast(a: Any) -> Any:
        return a.to(dtype) if isinstance(a, PretendTensor) and a.dtype in sources and a.dtype != dtype else a

    return tuple(map(cast, args)), {name: cast(a) for name, a in kwargs.items()}


class _FunctionMode(TorchFunctionMode):
    """Sees the calls of PyTorch's functions from Python, before C++ looks at the devices of their tensors."""

    def __init__(self, police: _Policeman) -> None:
        super().__init__()
        self.police = police

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [*args, *kwargs.values()]
        touches = any(
            isinstance(a, PretendTensor)
            or (isinstance(a, (list, tuple)) and any(isinstance(b, PretendTensor) for b in a))
            for a in given
        )
        if not touches:
            return func(*args, **kwargs)
        if torch.is_autocast_enabled("cuda"):
            args, kwargs = _autocast(func, args, kwargs)
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and isinstance(args[0], PretendTensor):
            kwargs.setdefault("device", DEVICE)
        if func in (torch.Tensor.to, torch.Tensor.type_as) and not isinstance(args[0], PretendTensor):
            if isinstance(args[1], PretendTensor):
                return args[0].to(device=DEVICE, dtype=args[1].dtype)
        if func is torch.Tensor.__setitem__ and isinstance(args[0], PretendTensor):
            # A mask on the CPU goes to the device as indices; C++ would take both for the CPU's.
            mask = args[1]
            if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and not isinstance(mask, PretendTensor):
                args = (args[0], mask.to(DEVICE), *args[2:])
        if func is torch.nn.functional.one_hot and len(args) + len(kwargs) == 2:
            # On a GPU the classes are not looked at.
            labels, classes = args[0], kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            if classes > 0:
                out = torch.zeros(*labels.shape, classes, dtype=torch.int64, device=DEVICE)
                return out.scatter_(-1, labels.unsqueeze(-1), 1)
        explicit = kwargs.get("device") is not None or any(isinstance(a, torch.device) for a in args)
        if explicit:
            return func(*args, **kwargs)
        self.police.implicit += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.police.implicit -= 1


_active: _Policeman | None = None


# --------------------------------------------------------------------------------------------------------------------
# torch.cuda


class _Stream:
    cuda_stream = 0
    device = DEVICE
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def synchronize(self) -> None:
        if _active is not None:
            _active._sync("stream sync")

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time: float | None = None

    def record(self, stream: Any = None) -> None:
        import time

        self.time = time.perf_counter()

    def synchronize(self) -> None:
        if _active is not None:
            _active._sync("event sync")

    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        if self.time is None or other.time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (other.time - self.time)


class _DeviceContext(contextlib.ContextDecorator):
    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


class PretendCuda(contextlib.ExitStack):
    """See the module.

    Args:
        project: folder whose source lines events are attributed to.
        capability: of the pretended GPU.
        memory: of the pretended GPU, bytes.
    """

    def __init__(
        self, project: str | None = None, capability: tuple[int, int] = (9, 0), memory: int = 141 * 10**9
    ) -> None:
        super().__init__()
        self.police = _Policeman(project)
        self.capability = capability
        self.memory = memory

    def __enter__(self) -> PretendCuda:
        global _active
        if _active is not None:
            raise RuntimeError("PretendCuda does not nest")
        super().__enter__()
        _active = self.police
        self.callback(_clear_active)
        # Guards of devices that are not there then do nothing; for the rest of the process.
        torch._C._ensureCUDADeviceGuardSet()
        # Module.to() then makes new parameters: the data of a CPU parameter cannot be set to a pretended tensor.
        self.callback(
            torch.__future__.set_overwrite_module_params_on_conversion,
            torch.__future__.get_overwrite_module_params_on_conversion(),
        )
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        # torch.tensor(…, device="cuda") makes a CPU tensor and then moves it where we see it.
        self.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        for owner, name, value in self._patches():
            self._patch(owner, name, value)
        # Optimisers take their foreach path, as on a GPU.
        supported = importlib.import_module("torch.optim.optimizer")._foreach_supported_types
        supported.append(PretendTensor)
        self.callback(supported.remove, PretendTensor)
        self.enter_context(_Mode(self.police))
        self.enter_context(_FunctionMode(self.police))
        return self

    @contextlib.contextmanager
    def record(self) -> Iterator[Seen]:
        """Count what happens in the block."""
        seen = Seen()
        self.police.recorders.append(seen)
        try:
            yield seen
        finally:
            self.police.recorders.remove(seen)

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        if hasattr(owner, name):
            self.callback(setattr, owner, name, getattr(owner, name))
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def _patches(self) -> list[tuple[Any, str, Any]]:
        police, cuda = self.police, torch.cuda
        total = self.memory

        def seed(value: int) -> None:
            police.cuda_rng = torch._C.Generator("cpu").manual_seed(int(value)).get_state()

        properties = types.SimpleNamespace(
            name="Pretended GPU",
            major=self.capability[0],
            minor=self.capability[1],
            total_memory=total,
            multi_processor_count=132,
            L2_cache_size=50 * 2**20,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            gcnArchName="",
        )
        nothing = lambda *args, **kwargs: None  # noqa: E731
        zero = lambda *args, **kwargs: 0  # noqa: E731
        return [
            (torch, "Generator", PretendGenerator),
            (torch.Tensor, "pin_memory", lambda tensor, device=None: tensor.clone()),
            (cuda, "is_available", lambda: True),
            (cuda, "is_initialized", lambda: True),
            (cuda, "device_count", lambda: 1),
            (cuda, "current_device", lambda: 0),
            (cuda, "_lazy_init", nothing),
            (cuda, "init", nothing),
            (cuda, "_lazy_call", lambda call, **kwargs: call()),
            (cuda, "set_device", nothing),
            (cuda, "device", _DeviceContext),
            (cuda, "Stream", _Stream),
            (cuda, "Event", _Event),
            (cuda, "current_stream", lambda device=None: _Stream()),
            (cuda, "default_stream", lambda device=None: _Stream()),
            (cuda, "stream", lambda stream: contextlib.nullcontext()),
            (cuda, "synchronize", lambda device=None: police._sync("device sync")),
            (cuda, "manual_seed", seed),
            (cuda, "manual_seed_all", seed),
            (cuda, "seed", lambda: seed(0)),
            (cuda, "seed_all", lambda: seed(0)),
            (cuda, "get_rng_state", lambda device="cuda": police.cuda_rng.clone()),
            (cuda, "get_rng_state_all", lambda: [police.cuda_rng.clone()]),
            (cuda, "set_rng_state", lambda state, device="cuda": setattr(police, "cuda_rng", state.clone())),
            (cuda, "set_rng_state_all", lambda states: setattr(police, "cuda_rng", states[0].clone())),
            (cuda.random, "get_rng_state", lambda device="cuda": police.cuda_rng.clone()),
            (cuda.random, "set_rng_state", lambda state, device="cuda": setattr(police, "cuda_rng", state.clone())),
            (cuda, "get_device_capability", lambda device=None: self.capability),
            (cuda, "get_device_properties", lambda device=None: properties),
            (cuda, "get_device_name", lambda device=None: properties.name),
            (cuda, "is_bf16_supported", lambda *args, **kwargs: self.capability[0] >= 8),
            (cuda, "get_arch_list", lambda: [f"sm_{self.capability[0]}{self.capability[1]}"]),
            (cuda, "empty_cache", nothing),
            (cuda, "ipc_collect", nothing),
            (cuda, "memory_allocated", zero),
            (cuda, "max_memory_allocated", zero),
            (cuda, "memory_reserved", zero),
            (cuda, "max_memory_reserved", zero),
            (cuda, "reset_peak_memory_stats", nothing),
            (cuda, "memory_stats", lambda device=None: {}),
            (cuda, "mem_get_info", lambda device=None: (total, total)),
            (torch._C, "_cuda_clearCublasWorkspaces", nothing),
            (torch._C, "_cuda_isCurrentStreamCapturing", lambda: False),
        ]


def _clear_active() -> None:
    global _active
    _active = None


# --------------------------------------------------------------------------------------------------------------------
# FAISS


class FaissAbort(BaseException):
    """Where FAISS would call abort(), which no `except` stops."""


# Shared memory of a block that a kernel gets without asking for more: FAISS never asks, and has found the same on all GPUs.
SHARED_MEMORY = 48 * 1024


class FakeGpuIndex:
    """A FAISS index on the pretended GPU, with the rules of GpuIndex.search under faiss.contrib.torch_utils.

    Like GpuIndexFlat and GpuIndexIVF… it is none of the CPU's classes. Rules of 8-bit lists, read in FAISS's sources
    (GpuIndexIVFScalarQuantizer.cu, IVFInterleaved.cu; its issues 3207 and 4509): d below 6144, and the heap of the
    k-selection has to fit into shared memory beside 8·d bytes of the quantiser.
    """

    MAX_K = 2048

    def __init__(self, index: Any) -> None:
        import faiss

        self.cpu = index
        self.d = index.d
        inner = faiss.downcast_index(index)
        lists = isinstance(inner, faiss.IndexIVFScalarQuantizer)
        self._quantiser_bytes = 8 * self.d if lists and inner.sq.qtype == faiss.ScalarQuantizer.QT_8bit else 0
        self._lists = isinstance(inner, faiss.IndexIVF)
        if self._quantiser_bytes >= SHARED_MEMORY:
            raise RuntimeError(
                f"GpuIndexIVFScalarQuantizer: Insufficient shared memory available on the GPU for QT_8bit or QT_4bit with "
                f"{self.d} dimensions; maximum dimensions possible is {SHARED_MEMORY // 8}"
            )

    def _check_shared_memory(self, k: int) -> None:
        width = next(q for q in (1, 32, 64, 128, 256, 512, 1024, 2048) if q >= k)
        heap = (2 if width == 2048 else 4) * width * 12
        if self._lists and heap + self._quantiser_bytes > SHARED_MEMORY:
            raise FaissAbort(
                f"Faiss assertion 'err__ == cudaSuccess' failed in ivfInterleavedScanImpl; CUDA error 1 invalid argument: "
                f"k={k} needs {heap} bytes of shared memory and d={self.d} {self._quantiser_bytes}, of {SHARED_MEMORY}"
            )

    def __getattr__(self, name: str) -> Any:
        if name in ("ntotal", "is_trained", "nprobe", "metric_type", "nlist"):
            return getattr(self.cpu, name)
        raise AttributeError(name)

    def getDevice(self) -> int:
        return 0

    def search(self, x: Any, k: int) -> tuple:
        """As GpuIndex.search."""
        if isinstance(x, torch.Tensor) and not isinstance(x, PretendTensor):
            # contrib.torch_utils accepts CPU tensors for GPU indexes too (FAISS copies them over).
            return self.cpu.search(x, k)
        assert x.dtype == torch.float32 and x.is_contiguous(), "faiss wants contiguous float32"
        if k > self.MAX_K:
            raise RuntimeError(f"GPU index only supports min/max-K selection up to {self.MAX_K} (requested {k})")
        self._check_shared_memory(k)
        import numpy as np

        sq_dist, ids = self.cpu.search(np.ascontiguousarray(_inner(x).numpy()), k)
        if _active is not None:
            for seen in _active.recorders:
                seen.ops += 1
                seen.op_names["faiss.search"] += 1
        return PretendTensor(torch.from_numpy(sq_dist)), PretendTensor(torch.from_numpy(ids))


@contextlib.contextmanager
def install_fake_faiss_gpu() -> Iterator[None]:
    """Let `faiss.index_cpu_to_gpu` give a `FakeGpuIndex`; what stays a CPU class in FAISS stays one here."""
    import faiss
    import faiss.contrib.torch_utils

    class Resources:
        def setTempMemory(self, size: int) -> None: ...

    def to_gpu(resources: Any, device: int, index: Any, options: Any = None) -> Any:
        copied = faiss.clone_index(index)  # as FAISS does, so that the original may go
        if isinstance(faiss.downcast_index(index), faiss.IndexPreTransform):
            # FAISS moves the inner index alone; the result is an IndexPreTransform, a CPU class without getDevice.
            return _PreTransformOnGpu(copied)
        return FakeGpuIndex(copied)

    names = {"StandardGpuResources": Resources, "index_cpu_to_gpu": to_gpu, "index_gpu_to_cpu": lambda i: i.cpu}
    before = {name: getattr(faiss, name, None) for name in names}
    for name, value in names.items():
        setattr(faiss, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(faiss, name, value)


class _PreTransformOnGpu:
    def __init__(self, index: Any) -> None:
        self.cpu = index
        self.d = index.d

    def search(self, x: Any, k: int) -> tuple:
        if isinstance(x, PretendTensor):
            # faiss/contrib/torch_utils.py: `if x.is_cuda: assert hasattr(self, 'getDevice')`
            raise AssertionError("GPU tensor on CPU index not allowed")
        return self.cpu.search(x, k)


if __name__ == "__main__":
    with PretendCuda() as gpu:
        x = torch.randn(3, device="cuda")
        with gpu.record() as seen:
            print((x > 0).any().item())
        print(seen.report())
