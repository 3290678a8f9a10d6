"""Times of calls and peaks of memory on a device."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lit_knn.common.errors import InputError, class_and_line, first_line
from lit_knn.common.memory import is_out_of_memory

WARM_UP_CALLS = 2
LEAST_CALLS = 3
MOST_CALLS = 50
MIB = 2**20
# A note that begins with this word tells of an error that nobody expects.
FAILED = "failed: "


def wait(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Free the memory of what was measured, so that the next measurement finds all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def why(error: Exception) -> str:
    """Tell in one line why there is no measurement. Unless memory or options are the reason, it begins with FAILED."""
    expected = isinstance(error, InputError) or is_out_of_memory(error)
    return first_line(error) if expected else f"{FAILED}{class_and_line(error)}"


class Times(NamedTuple):
    """Medians of a call in milliseconds: until the device has done its work, and until the host is free again."""

    ms: float
    host_ms: float


def measured(call: Callable[[], Any], device: torch.device, seconds: float) -> Times:
    """Measure a call again and again for some seconds."""
    for _ in range(WARM_UP_CALLS):
        call()
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(times) < LEAST_CALLS or (time.perf_counter() < end and len(times) < MOST_CALLS):
        wait(device)
        start = time.perf_counter()
        call()
        queued = time.perf_counter()
        wait(device)
        times.append((1000 * (time.perf_counter() - start), 1000 * (queued - start)))
    return Times(*map(statistics.median, zip(*times, strict=True)))


def peak_mib(call: Callable[[], Any], device: torch.device) -> float:
    """Return the most memory in MiB that a call takes on a GPU, in addition to what is held before. NaN on a CPU."""
    if device.type != "cuda":
        return float("nan")
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    wait(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB
