"""Patches `torch.cuda` for the time of a block."""

from __future__ import annotations

import contextlib
import importlib
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # takes stock of torch.cuda's functions, so it is imported before they are patched

from tests.pretend_cuda.counts import Counts, Seen
from tests.pretend_cuda.device import DEVICE, PretendGenerator
from tests.pretend_cuda.modes import DispatchMode, FunctionMode
from tests.pretend_cuda.police import Police
from tests.pretend_cuda.tensor import PretendTensor, active


class PretendCuda(contextlib.ExitStack):
    """A block in which `cuda` is the pretended device. See the package.

    Args:
        project: folder whose source lines are named in reports.
        capability: compute capability of the pretended GPU.
        memory: of the pretended GPU, bytes.
    """

    def __init__(
        self, project: str | None = None, capability: tuple[int, int] = (9, 0), memory: int = 141 * 10**9
    ) -> None:
        super().__init__()
        self.counts = Counts(project)
        self.police = Police(self.counts)
        self.capability = capability
        self.memory = memory

    def __enter__(self) -> PretendCuda:
        if active:
            raise RuntimeError("PretendCuda does not nest")
        super().__enter__()
        active.append(self.police)
        self.callback(active.clear)
        self.callback(setattr, _DeviceContext, "current", 0)
        # Guards of devices that are not there then do nothing, for the rest of the process.
        torch._C._ensureCUDADeviceGuardSet()
        # Module.to() then makes new parameters: the data of a CPU parameter cannot be set to a pretended tensor.
        future = torch.__future__
        before = future.get_overwrite_module_params_on_conversion()
        self.callback(future.set_overwrite_module_params_on_conversion, before)
        future.set_overwrite_module_params_on_conversion(True)
        # torch.tensor(…, device="cuda") then makes a CPU tensor, and moves it where the stand-in sees it.
        self.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        for owner, name, value in self._patches():
            self._patch(owner, name, value)
        # Optimisers take their foreach path, as on a GPU.
        supported = importlib.import_module("torch.optim.optimizer")._foreach_supported_types
        supported.append(PretendTensor)
        self.callback(supported.remove, PretendTensor)
        self.enter_context(DispatchMode(self.police))
        self.enter_context(FunctionMode(self.police))
        return self

    @contextlib.contextmanager
    def record(self) -> Iterator[Seen]:
        """Count what happens in the block."""
        seen = Seen()
        self.counts.recorders.append(seen)
        try:
            yield seen
        finally:
            self.counts.recorders.remove(seen)

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        if hasattr(owner, name):
            self.callback(setattr, owner, name, getattr(owner, name))
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def _patches(self) -> list[tuple[Any, str, Any]]:
        """List owner, name and value of what is patched."""
        cuda = {**self._device_facts(), **self._random_state(), **_streams(self.counts.sync)}
        state = {name: cuda[name] for name in ("get_rng_state", "set_rng_state")}
        own = [
            (torch, "Generator", PretendGenerator),
            (torch.Tensor, "pin_memory", lambda tensor, device=None: tensor.clone()),
            (torch._C, "_cuda_clearCublasWorkspaces", _nothing),
            (torch._C, "_cuda_isCurrentStreamCapturing", lambda: False),
        ]
        own += [(torch.cuda.random, name, value) for name, value in state.items()]
        return own + [(torch.cuda, name, value) for name, value in cuda.items()]

    def _device_facts(self) -> dict[str, Any]:
        major, minor = self.capability
        properties = types.SimpleNamespace(
            name="Pretended GPU",
            major=major,
            minor=minor,
            total_memory=self.memory,
            multi_processor_count=132,
            L2_cache_size=50 * 2**20,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            gcnArchName="",
        )
        no_memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        ignored = ("_lazy_init", "init", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: _DeviceContext.current,
            "set_device": lambda device: _DeviceContext(device).__enter__(),
            "device": _DeviceContext,
            "_lazy_call": lambda call, **kwargs: call(),
            "get_device_capability": lambda device=None: self.capability,
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: properties.name,
            "is_bf16_supported": lambda *args, **kwargs: major >= 8,
            "get_arch_list": lambda: [f"sm_{major}{minor}"],
            "memory_stats": lambda device=None: {},
            "mem_get_info": lambda device=None: (self.memory, self.memory),
            **{name: lambda *args, **kwargs: 0 for name in no_memory},
            **dict.fromkeys(ignored, _nothing),
        }

    def _random_state(self) -> dict[str, Any]:
        def seed(value: int = 0) -> None:
            self.police.cuda_rng = torch._C.Generator("cpu").manual_seed(int(value)).get_state()

        def get(device: Any = "cuda") -> torch.Tensor:
            return self.police.cuda_rng.clone()

        def put(state: torch.Tensor, device: Any = "cuda") -> None:
            self.police.cuda_rng = state.clone()

        return {
            **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), seed),
            "get_rng_state": get,
            "get_rng_state_all": lambda: [get()],
            "set_rng_state": put,
            "set_rng_state_all": lambda states: put(states[0]),
        }


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _DeviceContext(contextlib.ContextDecorator):
    """`torch.cuda.device`. Only FAISS's rules look at the current device; all tensors are on `cuda:0`."""

    current = 0

    def __init__(self, device: Any = None) -> None:
        number = device if device is None or isinstance(device, int) else torch.device(device).index
        self.idx = _DeviceContext.current if number is None or number < 0 else number

    def __enter__(self) -> None:
        self.before, _DeviceContext.current = _DeviceContext.current, self.idx

    def __exit__(self, *_: Any) -> None:
        _DeviceContext.current = self.before


def _streams(sync: Callable[[str], None]) -> dict[str, Any]:
    """Streams and events of `torch.cuda`. All happens in order; waiting for them is counted."""

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.time: float | None = None

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle 'Event' object")

        def record(self, stream: Any = None) -> None:
            self.time = time.perf_counter()

        def synchronize(self) -> None:
            sync("event sync")

        def wait(self, stream: Any = None) -> None: ...

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Event) -> float:
            if self.time is None or other.time is None:
                raise RuntimeError("Both events must be recorded before calculating elapsed time.")
            return 1000 * (other.time - self.time)

    class Stream(contextlib.nullcontext):
        cuda_stream = device_index = 0
        device = DEVICE

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(self)

        def synchronize(self) -> None:
            sync("stream sync")

        def wait_stream(self, other: Any) -> None: ...

        def wait_event(self, event: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def query(self) -> bool:
            return True

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: sync("device sync"),
    }
