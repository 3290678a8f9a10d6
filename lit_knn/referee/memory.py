"""The memory that an estimator takes, measured in a process of its own."""

import contextlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from lit_knn.common.errors import InputError
from lit_knn.common.memory import process_bytes
from lit_knn.common.rng import keyed_generator
from lit_knn.index import Index
from lit_knn.referee.behaviour import Contestant
from lit_knn.referee.cases import Case
from lit_knn.referee.entry import Make
from lit_knn.reference import ReferenceSet


def in_own_process(work: Callable[..., Any], *args: Any) -> Any:
    """Run `work(*args)` in a new process and return its result. An error there is raised here."""
    spawn, threads = multiprocessing.get_context("spawn"), (torch.get_num_threads(),)
    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, threads) as pool:
        try:
            return pool.submit(work, *args).result()
        except BrokenProcessPool as error:
            raise InputError(f"{args[0]}: the process that measures its memory was killed") from error


def peak_mib(name: str, make: Make, case: Case, data: Path | None, batch: int) -> int | str:
    """Bind and call an estimator in this process; return the MiB that it took beyond the images, "" if unknown."""
    reference = case.reference_set(data)
    x, noise = case.draw(reference, min(batch, case.latents))
    t = case.levels[len(case.levels) // 2]
    z = (x + t * noise).float()
    estimator, index = make()
    images = copy_of_set(reference, index)
    images.images.amax()  # Pages of a mapped file count as memory once they are read.
    # Reading the images may have set the peak of this process.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = process_bytes("VmRSS")
    Contestant.bound(name, estimator, images).mean(z, t, x.float(), keyed_generator("cpu", 0))
    peak = process_bytes("VmHWM")  # Only Linux tells it.
    return max(peak - before, 0) // 2**20 if peak else ""


def copy_of_set(reference: ReferenceSet, index: Index) -> ReferenceSet:
    """Return a set of the same images with its own index, and without what other estimators have kept in it."""
    # The set has expanded the labels to mirrored images.
    labels = None if reference.labels is None else reference.labels[: len(reference.images)]
    return ReferenceSet(reference.images, index, reference.hflip, labels)
