"""Patches `torch.cuda` for the time of a block."""

import contextlib
import importlib
import time
import types

import torch

# takes stock of torch.cuda's functions, so it is imported before they are patched
import torch._dynamo

from tests.pretend_cuda.police import Police, Waits
from tests.pretend_cuda.tensor import PretendGenerator, PretendTensor, active


class PretendCuda(contextlib.ExitStack):
    """A block in which `cuda` is the pretended device. See the package."""

    def __enter__(self):
        super().__enter__()
        self.police = Police()
        active.append(self.police)
        self.callback(active.clear)
        # Compiled code takes `data_ptr()`.
        self.enter_context(torch.compiler.set_stance("force_eager"))
        # Guards of devices that are not there then do nothing, for the rest of the process.
        torch._C._ensureCUDADeviceGuardSet()
        # Module.to() then makes new parameters: the data of a CPU parameter cannot be set to a pretended tensor.
        self.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        # torch.tensor(…, device="cuda") then makes a CPU tensor, and moves it where the stand-in sees it.
        self.callback(torch._C._set_only_lift_cpu_tensors, False)
        torch._C._set_only_lift_cpu_tensors(True)
        for owner, name, value in self._patches():
            self.callback(setattr, owner, name, getattr(owner, name, None))
            setattr(owner, name, value)
        # Optimisers take their foreach path, as on a GPU.
        supported = importlib.import_module("torch.optim.optimizer")._foreach_supported_types
        supported.append(PretendTensor)
        self.callback(supported.remove, PretendTensor)
        for mode in self.police.modes:
            self.enter_context(mode)
        return self

    @contextlib.contextmanager
    def record(self):
        """Count the waits of the block."""
        self.police.seen = seen = Waits()
        try:
            yield seen
        finally:
            self.police.seen = None

    def _patches(self):
        """List owner, name and value of what is patched."""
        random, waits = _random_state(torch.default_generator), self.police.waits
        cuda = {
            **_device_facts(),
            **random,
            "Event": _events(waits),
            "synchronize": lambda *_: waits("device sync"),
        }
        return [
            (torch, "Generator", PretendGenerator),
            (torch.Tensor, "pin_memory", lambda tensor, device=None: tensor.clone()),
            (torch._C, "_cuda_clearCublasWorkspaces", lambda: None),
            (torch._C, "_cuda_isCurrentStreamCapturing", lambda: False),
            *(
                (torch.cuda.random, name, random[name])
                for name in ("get_rng_state", "set_rng_state")
            ),
            *((torch.cuda, name, value) for name, value in cuda.items()),
        ]


def _random_state(generator):
    return {
        **dict.fromkeys(
            ("manual_seed", "manual_seed_all"), lambda seed: generator.manual_seed(int(seed))
        ),
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
    }


def _device_facts():
    properties = types.SimpleNamespace(
        name="Pretended GPU", major=9, minor=0, total_memory=141 * 10**9
    )
    ignored = ("_lazy_init", "init", "set_device", "empty_cache", "reset_peak_memory_stats")
    return {
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device=None: contextlib.nullcontext(),
        "_lazy_call": lambda call, **kwargs: call(),
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "max_memory_allocated": lambda device=None: 0,
        # PyTorch's compiler wants another object for each name.
        **{name: lambda *args, **kwargs: None for name in ignored},
    }


def _events(waits):
    """The class `torch.cuda.Event`. All happens in order; waiting for an event is counted."""

    class Event:
        def __init__(self, enable_timing=False):
            self.time = None

        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle 'Event' object")

        def record(self):
            self.time = time.perf_counter()

        def synchronize(self):
            waits("event sync")

        def query(self):
            return True

        def elapsed_time(self, other):
            return 1000 * (other.time - self.time)

    return Event
