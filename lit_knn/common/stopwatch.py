"""A stopwatch that does not stall a GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time that a device spends inside `with running():` blocks. It waits only in `read_and_reset`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __deepcopy__(self, memo: dict[int, object]) -> "Stopwatch":
        # CUDA's events cannot be copied.
        return Stopwatch(torch.device("cuda" if self._cuda else "cpu"))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the block."""
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def read_and_reset(self) -> float:
        """Return the seconds measured since the last reading. Waits for the device."""
        # When the last event is over, all earlier ones are, too.
        if self._events:
            self._events[-1][1].synchronize()
        for start, end in self._events:
            self._seconds += start.elapsed_time(end) / 1000  # from milliseconds
        seconds, self._seconds, self._events = self._seconds, 0.0, []
        return seconds
