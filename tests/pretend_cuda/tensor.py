"""The pretended device: the tensors that say they are on it, and its random generators."""

import weakref

import torch
from torch import nn

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
# The police of the active `PretendCuda`, at most one.
active = []


class DeviceMismatch(RuntimeError):
    """An operation that CUDA would refuse."""


def canonical(device):
    """`cuda` -> `cuda:0`; other devices stay."""
    device = torch.device(device)
    return DEVICE if device.type == "cuda" else device


class PretendTensor(torch.Tensor):
    """A tensor that says it is on cuda:0 and keeps its values on the CPU.

    C++ sees a CPU tensor with the dispatch keys of CUDA (autograd, autocast) and of Python. So autograd needs no
    driver, and every operation comes to `__torch_dispatch__`. Python code that asks for the device is told cuda:0.
    """

    @staticmethod
    def __new__(cls, values):
        made = torch.Tensor._make_subclass(cls, values, False, device_for_backend_keys=DEVICE)
        made._values = values
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # The modes of `PretendCuda` see most operations. Those of threads that autograd starts come here.
        return active[0].run(func, args, kwargs or {})

    def to(self, *args, **kwargs):
        """As `Tensor.to`. C++ takes this tensor for a CPU tensor, and would leave it as it is in `.to("cpu")`."""
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)  # PyTorch's parser does not know it.
        memory_format = kwargs.pop("memory_format", None)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = DEVICE if device is None else canonical(device), dtype or self.dtype
        kept = memory_format in (None, torch.preserve_format) or self.is_contiguous(
            memory_format=memory_format
        )
        if (device, dtype, copy, kept) == (DEVICE, self.dtype, False, True):
            return self
        options = {} if memory_format is None else {"memory_format": memory_format}
        to_copy = torch.ops.aten._to_copy.default
        return to_copy(self, dtype=dtype, device=device, non_blocking=non_blocking, **options)

    def cpu(self):
        return self.to(CPU)

    def cuda(self, *args, **kwargs):
        return self

    def tolist(self):
        return self.detach().cpu().tolist()

    def __format__(self, spec):
        return format(self.item(), spec) if spec else repr(self)

    def __repr__(self):
        return f"pretended {inner(self)!r}"

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = (
                nn.Parameter(copied, self.requires_grad)
                if isinstance(self, nn.Parameter)
                else copied
            )
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        with torch._C._DisableTorchDispatch():
            return inner(self).__reduce_ex__(protocol)


def inner(t):
    """The CPU tensor that has the same memory."""
    values = t._values
    with torch._C._DisableTorchDispatch():
        if (
            values.data_ptr() == t.data_ptr()
            and values.shape == t.shape
            and values.stride() == t.stride()
        ):
            return values
        t._values = torch.empty(0, dtype=t.dtype).set_(
            t.untyped_storage(), t.storage_offset(), t.size(), t.stride()
        )
    return t._values


class _GeneratorType(type(torch._C.Generator)):
    def __instancecheck__(cls, instance):
        return isinstance(instance, torch._C.Generator)


# PyTorch hands a generator to operations as another Python object. Its address says which one it is.
_device_of = {}


class PretendGenerator(torch._C.Generator, metaclass=_GeneratorType):
    """A `torch.Generator` that may say it is on the pretended device. Its numbers are the CPU's."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, "cpu")
        _device_of[made._cdata] = made._on = canonical(device)
        weakref.finalize(made, _device_of.pop, made._cdata, None)
        return made

    device = property(lambda self: self._on)


def check_generators(name, given, device):
    """Refuse a generator of another device than the operation's."""
    for value in given:
        if isinstance(value, torch._C.Generator):
            found = _device_of.get(value._cdata, CPU).type
            if found != device.type:
                raise DeviceMismatch(
                    f"{name}: Expected a '{device.type}' device for generator but found '{found}'"
                )
