"""Measures memory per rank, time and bytes sent, with a reference set split over 1, 2, 4, … local processes.

    python -m benchmarks.sharded --data FILE.npy [--ranks 1 2 4] [--t 2 10 80] [--batch 128] [--output STEM]

`lit-knn prepare` writes FILE.npy. The ranks share the threads of the machine and the batch, so that together
they do the work of one, plus sending. Each estimator has its own processes. The table has the held and the peak memory
of a rank above Python with its libraries, without mapped files of images. The error is the mean squared error per
dimension (Eq. 15, eq:mse) against the exact mean of the whole set in float64.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Output, Rows, markdown
from benchmarks.estimators import entries
from lit_knn.common.errors import InputError, told_in_one_line
from lit_knn.common.memory import process_bytes
from lit_knn.common.rng import keyed_generator
from lit_knn.data.reading import reference_from
from lit_knn.estimators import Exact
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.reference import ReferenceSet
from lit_knn.reference.sharded import ShardedReferenceSet, shard_rows

NAMES = ("KNN, FAISS Flat", "KNN, TorchIndex", "SubspaceKNN, r=512", "Exact")


class Peak(threading.Thread):
    """Records the peak of this process's memory, without the memory that belongs to files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = process_bytes("RssAnon")

    def run(self) -> None:
        """Read the memory a hundred times a second."""
        while True:
            self.bytes = max(self.bytes, process_bytes("RssAnon"))
            time.sleep(0.01)


def measure(rank: int, size: int, name: str, args: argparse.Namespace, folder: str) -> None:
    """Run one rank, and write its measurements to its own file."""
    torch.set_num_threads(max(args.threads // size, 1))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    images = reference_from(args.data).images
    before = process_bytes("RssAnon")
    peak = Peak()
    peak.start()
    entry = entries(args.k, args.n)[name]
    reference = ShardedReferenceSet(images[shard_rows(len(images), rank, size)].clone(), entry.make_index())
    estimator = entry.estimator().bind(reference)
    calls = []
    for t in args.t:
        for repeat in range(args.repeats + 1):
            # All ranks draw the whole batch, then take their share.
            z, _ = NoisyLatents(ReferenceSet(images), args.batch, repeat).batch(range(args.batch), t)
            dist.barrier()
            start, sent = time.perf_counter(), reference.exchange.bytes_sent
            mu = estimator.posterior_mean(z[rank::size], t, generator=keyed_generator("cpu", repeat, rank))
            dist.barrier()
            seconds, sent = time.perf_counter() - start, reference.exchange.bytes_sent - sent
            if repeat > 0:  # The first call of an estimator is slower, so it is not timed.
                calls.append((z[rank::size], t, mu, seconds, sent))
    report: dict[str, float] = {"held": process_bytes("RssAnon") - before, "peak": peak.bytes - before}
    exact = Exact().bind(reference)
    errors = [(mu - exact.posterior_mean(z.double(), t)).square().flatten(1).mean(1) for z, t, mu, _, _ in calls]
    report["mse"] = torch.cat(errors).mean().item()
    report["seconds"] = sum(seconds for *_, seconds, _ in calls) / len(calls)
    report["sent"] = sum(sent for *_, sent in calls) / sum(len(z) for z, *_ in calls)
    torch.save(report, f"{folder}/rank_{rank}.pt")
    dist.destroy_process_group()


def run(size: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure an estimator on `size` ranks; return the largest values over the ranks, and the mean error."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (size, name, args, folder), nprocs=size)
        reports: list[dict[str, Any]] = [torch.load(f"{folder}/rank_{rank}.pt") for rank in range(size)]
    worst = {key: max(report[key] for report in reports) for key in ("seconds", "held", "peak")}
    mean = {key: sum(report[key] for report in reports) / size for key in ("mse", "sent")}
    return {"estimator": name, "ranks": size, **worst, **mean}


def table(rows: Rows, batch: int) -> str:
    """Make a Markdown table with ratios to one rank."""
    lines = [["estimator", "ranks", "ms per z", "of 1 rank", "held", "of 1 rank", "peak", "sent per z", "MSE"]]
    for row in rows:
        one = next(other for other in rows if other["estimator"] == row["estimator"])
        time = (f"{1e3 * row['seconds'] / batch:.2f}", f"{row['seconds'] / one['seconds']:.2f}")
        held = (f"{row['held'] / 2**20:.0f} MiB", f"{row['held'] / one['held']:.2f}", f"{row['peak'] / 2**20:.0f} MiB")
        lines.append(
            [row["estimator"], str(row["ranks"]), *time, *held, f"{row['sent'] / 1e3:.1f} kB", f"{row['mse']:.2e}"]
        )
    return markdown(lines)


@told_in_one_line()
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="file of lit-knn prepare")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes, the first is 1")
    parser.add_argument("--estimators", nargs="+", choices=NAMES, default=NAMES, help="which of them")
    parser.add_argument("--t", type=float, nargs="+", default=[2, 10, 80], help="noise levels")
    parser.add_argument("--batch", type=int, default=128, help="latents of all ranks together")
    parser.add_argument("--repeats", type=int, default=2, help="calls averaged, each with new latents")
    parser.add_argument("--k", type=int, default=2048, help="neighbours")
    parser.add_argument("--n", type=int, default=256, help="images gathered")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of all ranks together")
    parser.add_argument("--output", type=Path, help="stem of the files to write")
    args = parser.parse_args(argv)
    if args.ranks[0] != 1:
        raise InputError(f"--ranks: the first must be 1, to which the others are compared, got {args.ranks[0]}")
    if args.batch < max(args.ranks):
        raise InputError(f"--batch {args.batch} is less than one latent on each of {max(args.ranks)} ranks")
    output = Output(args.output, "csv", "md")
    rows: Rows = []
    for name in args.estimators:
        for size in args.ranks:
            rows.append(run(size, name, args))
            print(f"{name}, {size} ranks measured", file=sys.stderr, flush=True)
    images = reference_from(args.data).images
    text = (
        f"N = {len(images)}, d = {images[0].numel()}, {args.batch} latents over all ranks, k = {args.k}, n = {args.n}"
    )
    text += f", t = {args.t}, {args.threads} threads over all ranks, gloo, torch {torch.__version__}"
    output.tell(f"{text}\n\n{table(rows, args.batch)}")
    output.write_rows(rows)


if __name__ == "__main__":
    main()
