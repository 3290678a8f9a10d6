"""Checks of values on a GPU that fail later, so that a training step does not wait for the device."""

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Failure = Callable[[int, float, str], Exception]
"""(number of the failed check, its value, where it failed, such as " at step 7", or "") -> the error to raise."""


class DeferredChecks:
    """Notes the first failure of each check on the device. `raise_first` reads the notes.

    Inside `with checks.collect(step):`, `refuse` notes a failure on a GPU without waiting for the GPU. On the CPU it
    raises the error at once. A failure stays noted, so that nothing is saved after it.
    """

    def __init__(self) -> None:
        # For each group of n checks, (n, 2) float64 on the device: the step of the first failure of each check, or −1,
        # and the value there.
        self._first: dict[Hashable, Tensor] = {}
        self._failures: dict[Hashable, Failure] = {}
        self._step = 0

    @contextmanager
    def collect(self, step: int) -> Iterator[None]:
        """Note failures inside the block with this optimiser step."""
        self._step = step
        token = _COLLECTING.set(self)
        try:
            yield
        finally:
            _COLLECTING.reset(token)

    def note(self, name: str, bad: Tensor, values: Tensor, failure: Failure) -> None:
        """Note each failed check that did not fail before.

        Args:
            name: name of the group of checks.
            bad: (n,) bool, on the device: whether each check fails.
            values: (n,), for the messages.
            failure: makes the error.
        """
        key = name, len(bad), bad.device
        values = values.detach().double()
        failures = torch.stack([torch.full_like(values, self._step), values], dim=1)
        first = self._first.get(key, torch.full_like(failures, -1))
        fresh = bad & (first[:, 0] < 0)
        self._first[key] = torch.where(fresh[:, None], failures, first)
        self._failures[key] = failure

    def raise_first(self) -> None:
        """Raise the earliest failure; within a step, that of the first check. Waits for the device once."""
        if not self._first:
            return
        # One transfer brings the notes of all checks.
        rows = iter(torch.cat(list(self._first.values())).tolist())

        earliest = math.inf
        error = None
        for key, first in self._first.items():
            for number in range(len(first)):
                step, value = next(rows)
                if 0 <= step < earliest:
                    earliest = step
                    error = self._failures[key](number, value, f" at step {step:.0f}")
        if error is not None:
            raise error


_COLLECTING: ContextVar[DeferredChecks | None] = ContextVar("collecting", default=None)


def deferring() -> bool:
    """Return whether checks of values on a GPU are noted for later."""
    return _COLLECTING.get() is not None


def refuse(name: str, bad: Tensor, values: Callable[[], Tensor], failure: Failure) -> None:
    """Raise the error of the first check that fails, or note it inside `DeferredChecks.collect` if it is on a GPU.

    Args:
        name: name of the group of checks.
        bad: (n,) bool: whether each check fails.
        values: computes (n,) numbers for the messages.
        failure: makes the error.
    """
    checks = _COLLECTING.get()
    if checks is not None and bad.is_cuda:
        checks.note(name, bad, values(), failure)
        return
    # All results come from a GPU in one transfer.
    flags = bad.tolist()
    if any(flags):
        i = flags.index(True)
        raise failure(i, float(values()[i]), "")
