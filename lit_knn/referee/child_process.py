"""Runs a piece of work in its own process, and watches how much memory it takes."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from lit_knn.common.errors import InputError, told_in_one_line
from lit_knn.common.memory import process_bytes

SECONDS_BETWEEN_SAMPLES = 0.05


def in_own_process(work: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, int]]:
    """Run `work(*args)` in its own process; return its result and the peaks of the process's memory in MiB.

    Raises:
        InputError: the process failed; it has printed the reason.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, args))
    process.start()
    assert process.pid is not None
    peak = private = 0
    while process.is_alive() and not receiver.poll(SECONDS_BETWEEN_SAMPLES):
        peak = max(peak, process_bytes("VmHWM", process.pid))
        private = max(private, process_bytes("RssAnon", process.pid))
    if not receiver.poll():
        raise InputError(f"{args[0]} failed with status {process.exitcode}, see above")
    result = receiver.recv()
    process.join()
    return result, {"peak_mib": peak // 2**20, "private_mib": private // 2**20}


def _send(sender: Connection, work: Callable[..., Any], args: Sequence[Any]) -> None:
    with told_in_one_line():
        sender.send(work(*args))
