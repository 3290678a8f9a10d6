"""Keeps float32 products in full precision, whatever the process has allowed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside: list[Callable[[], None]] = []


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products in full precision inside the block. It also works as a decorator.

    `torch.set_float32_matmul_precision("high")`, which Lightning advises on GPUs, rounds the factors of float32
    products to TF32, and "medium" may round them to bfloat16, on CPUs too. Scores of images have no digits to spare.

    The setting belongs to the process and lives on the host, so nothing waits for the device. Other threads compute
    in full precision, too, while any thread is inside: slower, but never less precisely. The last thread that leaves
    restores the setting; a change that another thread makes meanwhile is lost.
    """
    with _lock:
        _inside.append(_set_highest() if not _inside else _inside[0])
    try:
        yield
    finally:
        with _lock:
            restore = _inside.pop()
            if not _inside:
                restore()


def _set_highest() -> Callable[[], None]:
    """Choose full precision. Returns a function that restores the setting."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The process has set `fp32_precision` of single backends (since PyTorch 2.9). PyTorch then refuses the older
        # functions.
        return _set_backends()
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(before)


def _set_backends() -> Callable[[], None]:
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]

    def write(values: list[str]) -> None:
        for backend, value in zip(backends, values, strict=True):
            backend.fp32_precision = value

    write(["ieee"] * len(backends))
    return lambda: write(before)
