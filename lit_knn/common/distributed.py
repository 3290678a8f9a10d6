"""Distributed runs: processes work in turn or together."""

import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import torch.distributed as dist

from lit_knn.common.errors import InputError, first_line

# PyTorch may be built without distributed runs, and then has no process groups.
if TYPE_CHECKING:
    Group: TypeAlias = dist.ProcessGroup | None  # None is the group of all processes

T = TypeVar("T")

# Building an index takes long. Long waits are safe, because the others notice at once if a connected process dies.
PATIENCE = timedelta(days=7)
# A process may die before it connects, for instance if its data are missing. The others notice only after this time.
ARRIVAL = timedelta(minutes=30)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks: (0, 1) without a distributed run."""
    distributed = dist.is_available() and dist.is_initialized()
    if not distributed:
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def own_batches(num: int, batch_size: int) -> Iterator[tuple[int, range]]:
    """Divide the numbers from 0 to num − 1 into batches, and yield index and numbers of each batch of this rank.

    The batches are the same for any number of ranks.
    """
    rank, size = rank_and_size()
    # The quotient is rounded up.
    num_batches = -(-num // batch_size)
    for batch in range(rank, num_batches, size):
        start = batch * batch_size
        yield batch, range(start, min(start + batch_size, num))


def broadcast(value: T) -> T:
    """Return the first rank's value, which must be picklable, on every rank. All ranks must call this."""
    values = [value]
    if not is_alone():
        dist.broadcast_object_list(values)
    return values[0]


def on_first_rank(work: Callable[[], T]) -> T:
    """Run `work` on the first rank; every rank returns its result, or raises its InputError.

    Every rank must call this.
    """
    result, problem = None, None
    if rank_and_size()[0] == 0:
        try:
            result = work()
        except (InputError, OSError) as error:
            problem = str(error)

    result, problem = broadcast((result, problem))
    if problem is not None:
        raise InputError(problem)
    return cast(T, result)


def warn_on_first_rank(message: str) -> None:
    """Warn on the first rank only."""
    if rank_and_size()[0] == 0:
        warnings.warn(message, stacklevel=3)


def once_per_machine(lead: Callable[[], T], follow: Callable[[T], None]) -> None:
    """Run `lead` in the first process of each machine, then `follow` with its result in the others."""
    if is_alone():
        lead()
        return

    with _patient_group() as group:
        rank = dist.get_rank()
        machines = _together(machine_name, group)
        leader = machines.index(machines[rank])
        leads = rank == leader

        results = _together(lead if leads else _do_nothing, group)
        # The leaders take part, so that they learn of an error in another process.
        _together(_do_nothing if leads else lambda: follow(cast(T, results[leader])), group)


def in_every_process(work: Callable[[], T]) -> list[T]:
    """Run `work` in every process and return all results, picklable, in rank order. Every process must call this.

    If `work` fails in another process, an InputError names its rank; if one was killed, an InputError says so.
    """
    if is_alone():
        return [work()]
    with _patient_group() as group:
        return _together(work, group)


def _do_nothing() -> None:
    """Take part in a step in which this process has no work."""


def _together(work: Callable[[], T], group: "Group") -> list[T]:
    """Run `work`, wait for the other processes, and return the result of each process."""
    result: T | None = None
    error: Exception | None = None
    message: str | None = None
    try:
        result = work()
    except InputError as raised:
        error, message = raised, str(raised)
    except Exception as raised:
        error, message = raised, f"{type(raised).__name__}: {raised}"

    # The collective puts an outcome in each place.
    empty = [None] * dist.get_world_size()
    outcomes = cast(list[tuple[T | None, str, str | None]], empty)
    with _reporting_lost_processes():
        dist.all_gather_object(outcomes, (result, socket.gethostname(), message), group=group)

    if error is not None:
        raise error
    results = []
    for rank, (result, host, message) in enumerate(outcomes):
        if message is not None:
            raise InputError(f"rank {rank} on {host} failed: {message}")
        results.append(cast(T, result))
    return results


@contextmanager
def _patient_group() -> "Iterator[Group]":
    """Make a group of all processes besides the training's group, because NCCL stops waiting after minutes."""
    with _reporting_lost_processes():
        # The first group waits minutes for all to arrive, the second longer for their work. Both
        # are closed last, because a process that closes a group early looks lost to the others.
        arrival = dist.new_group(backend="gloo", timeout=ARRIVAL)
        patient = dist.new_group(backend="gloo", timeout=PATIENCE)

    try:
        yield cast("Group", patient)
    finally:
        dist.destroy_process_group(arrival)
        dist.destroy_process_group(patient)


@contextmanager
def _reporting_lost_processes() -> Iterator[None]:
    """Turn the error of a collective, in which another process cannot be reached, into an InputError."""
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error).partition(". ")[0]
        names = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME may have to name the network"
        advice = f"on several machines, {names}, see docs/troubleshooting.md"
        raise InputError(
            f"another process ended while the reference set was made ready ({reason}); {advice}"
        ) from error


def machine_name() -> str:
    """Return a name that the processes of one machine or container share, and that no other process has."""
    boot = ""
    if BOOT_ID.exists():
        boot = BOOT_ID.read_text().strip()
    return f"{socket.gethostname()} {boot}"


def is_alone() -> bool:
    """Return whether there is only one rank."""
    return rank_and_size()[1] == 1
