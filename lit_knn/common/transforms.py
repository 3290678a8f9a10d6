"""Keeps results out of the transforms of `torch.func`, such as `jvp`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def outside_transforms(make: Callable[[], T]) -> T:
    """Return the result of `make`, computed so that it can be kept.

    Inside a transform such as `jvp` new tensors belong to it, and cannot be pickled after it. Transforms are of one
    thread, so `make` runs in another one then.
    """
    if not _is_transforming():
        return make()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _is_transforming() -> bool:
    """Return whether new tensors belong to a transform of `torch.func`: they have no memory of their own."""
    try:
        torch.empty(1).data_ptr()
    except RuntimeError:
        return True
    return False
