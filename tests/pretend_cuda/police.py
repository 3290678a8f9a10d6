"""Runs each operation with the CPU's values, after it has refused what CUDA refuses, and counts the waits."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.pretend_cuda.device import CPU, DEVICE, DeviceMismatch, canonical, check_generators
from tests.pretend_cuda.nccl import check_collective
from tests.pretend_cuda.operations import COPIES, INDEXING, SPECIAL, SYNCS, Op, op_of
from tests.pretend_cuda.tensor import PretendTensor, inner, real

PROJECT, HERE = (str(Path(__file__).parents[above]) for above in (2, 0))


class Waits(Counter):
    """Waits of the host for the device, by kind and source line of the project."""

    @property
    def syncs(self) -> int:
        """Times that the host waits."""
        return self.total()

    def report(self) -> str:
        """The source lines that wait."""
        return "\n".join(f"{n:4d} x {what}" for what, n in self.most_common(12))


class Police:
    """Runs the operations of one `PretendCuda` block.

    Attributes:
        seen: what has waited; None while nobody records.
    """

    def __init__(self) -> None:
        self.seen: Waits | None = None
        self.cuda_rng = torch._C.Generator("cpu").manual_seed(1).get_state()
        # Calls in progress that have tensors on the device and name no device.
        self.implicit = 0

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation of any tensors."""
        op = op_of(func)
        if op.composite:
            out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        given = leaves((args, kwargs))
        pretended = any(isinstance(value, PretendTensor) for value in given)
        check_collective(op.name, given, pretended)
        device = op.argument("device", args, kwargs)
        target = None if device is None else canonical(device)
        if target == CPU and self.implicit:
            # A C++ function makes a tensor where its arguments are, and takes them for the CPU's.
            target = DEVICE
        if not pretended and target != DEVICE:
            check_generators(op.short, given, CPU)
            return func(*args, **kwargs)
        if op.name in COPIES:
            return self._copy(func, op, args, kwargs, target)
        return self._compute(func, op, args, kwargs, given, target)

    def waits(self, kind: str) -> None:
        """Count a wait at the innermost line of the project."""
        if self.seen is None:
            return
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(PROJECT) and not file.startswith(HERE) and "site-packages" not in file:
                self.seen[f"{kind} {file[len(PROJECT) + 1 :]}:{frame.f_lineno}"] += 1
                return
            frame = frame.f_back
        self.seen[kind] += 1

    def _copied(self, from_device: bool, to_device: bool, non_blocking: bool) -> None:
        """A copy between the devices waits, unless it goes to the device and need not."""
        if from_device != to_device and not (non_blocking and to_device):
            self.waits("D2H" if from_device else "H2D")

    def _compute(self, func: Any, op: Op, args: tuple, kwargs: dict, given: list, target: torch.device | None) -> Any:
        if not op.on_cuda:
            raise DeviceMismatch(
                f"{op.short}: Could not run with arguments from the 'CUDA' backend: it has no kernel there"
            )
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        plain = [t for t in tensors if not isinstance(t, PretendTensor)]
        if 0 < len(plain) < len(tensors):
            self._check_mixed(op, args, kwargs, plain)
        check_generators(op.short, given, DEVICE if target is None else target)
        kind = _sync_of(op, args, kwargs)
        if kind:
            self.waits(kind)
        real_args, real_kwargs = mapped(_on_cpu, args), mapped(_on_cpu, kwargs)
        with self._own_stream(op, given):
            out = SPECIAL.get(op.short, func)(*real_args, **real_kwargs)
        return _wrapped(op, args, kwargs, out, on_device=target is None or target == DEVICE)

    def _copy(self, func: Any, op: Op, args: tuple, kwargs: dict, target: torch.device | None) -> Any:
        if op.name == "aten::_to_copy":
            source, from_device = args[0], isinstance(args[0], PretendTensor)
            to_device = from_device if target is None else target == DEVICE
            options = {name: _on_cpu(value) for name, value in kwargs.items() if name != "non_blocking"}
            out = func(real(source), **options)
            self._copied(from_device, to_device, kwargs.get("non_blocking", False))
            return PretendTensor(out) if to_device else out
        many = op.name == "aten::_foreach_copy_"
        non_blocking = many or op.argument("non_blocking", args, kwargs)
        for into, source in zip(*(args[:2] if many else ([args[0]], [args[1]])), strict=True):
            self._copied(isinstance(source, PretendTensor), isinstance(into, PretendTensor), non_blocking)
        func(real(args[0]), real(args[1]))
        return None if many else args[0]

    def _check_mixed(self, op: Op, args: tuple, kwargs: dict, plain: list) -> None:
        """Refuse what CUDA refuses when CPU tensors, `plain`, are among the arguments."""
        written = [op.argument(op.arg_names[i], args, kwargs) for i in op.writes]
        if any(isinstance(t, torch.Tensor) and not isinstance(t, PretendTensor) for t in leaves(written)):
            raise DeviceMismatch(f"{op.short}: writes a CUDA result into a CPU tensor")
        if op.name in INDEXING:
            if not isinstance(args[0], PretendTensor):
                raise DeviceMismatch(
                    f"{op.short}: indices should be either on cpu or on the same device as the indexed tensor (cpu)"
                )
            on_cpu = [i for i in args[1] if i is not None and not isinstance(i, PretendTensor)]
            for _ in on_cpu:
                self.waits("H2D index")
            plain = [t for t in plain if not any(t is i for i in on_cpu)]
        if (op.cpu_scalars or op.name in INDEXING) and all(t.ndim == 0 for t in plain):
            return
        raise DeviceMismatch(
            f"{op.short}: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
            f"cpu (CPU tensors of shape {[tuple(t.shape) for t in plain]})"
        )

    @contextlib.contextmanager
    def _own_stream(self, op: Op, given: list) -> Iterator[None]:
        """Operations without a generator draw from the random stream of the pretended device."""
        if not op.random or any(isinstance(value, torch._C.Generator) for value in given):
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


def _sync_of(op: Op, args: tuple, kwargs: dict) -> str:
    """Why the host waits for an operation; empty if it does not."""
    if op.name == "aten::repeat_interleave" and isinstance(args[0], PretendTensor):
        return "" if kwargs.get("output_size") is not None else "repeat_interleave"
    if op.name == "aten::multinomial":
        with_check = not op.argument("replacement", args, kwargs) or args[1] == 1
        return "multinomial check" if with_check else ""
    if op.name in INDEXING:
        masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
        # One number for all chosen places becomes `masked_fill`.
        fills = op.name != "aten::index" and len(masks) == 1 and args[2].numel() == 1
        return "boolean mask" if masks and not fills else ""
    return SYNCS.get(op.name, "")


def _on_cpu(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return inner(value)
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _wrapped(op: Op, args: tuple, kwargs: dict, out: Any, on_device: bool) -> Any:
    """The values `out` as tensors on the device. What is an argument stays the same object."""

    def one(value: Any, argument: int | None) -> Any:
        if argument is not None:
            outer = op.argument(op.arg_names[argument], args, kwargs)
            _fix_shape(op, outer, value)
            return outer
        if isinstance(value, (list, tuple)):
            return type(value)(one(part, None) for part in value)
        # Fake and meta tensors keep a device of their own.
        plain = on_device and type(value) is torch.Tensor and value.device == CPU
        return PretendTensor(value) if plain else value

    if len(op.returned) == 1 or not isinstance(out, tuple):
        return one(out, op.returned[0] if op.returned else None)
    return tuple(map(one, out, op.returned))


def _fix_shape(op: Op, outer: Any, values: Any) -> None:
    """After squeeze_, resize_ or out= the tensor must have the shape of its values."""
    if not isinstance(outer, PretendTensor) or not isinstance(values, torch.Tensor):
        return
    if outer.shape != values.shape or outer.stride() != values.stride():
        with torch._C._DisableTorchDispatch():
            outer.as_strided_(values.shape, values.stride(), values.storage_offset())
        if outer.shape != values.shape:
            raise NotImplementedError(f"{op.short} changes the shape of its argument")


# PyTorch's own walk through arguments takes several times as long.


def leaves(tree: Any) -> list:
    """All values in a nest of lists, tuples and dicts."""
    if isinstance(tree, dict):
        tree = tree.values()
    return [value for part in tree for value in (leaves(part) if isinstance(part, (list, tuple, dict)) else (part,))]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nest with `function` of each value."""
    if isinstance(tree, dict):
        return {name: mapped(function, part) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([mapped(function, part) for part in tree])
    return function(tree)
