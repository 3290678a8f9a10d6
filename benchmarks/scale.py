"""Measures searches and estimators on a million images: start time, size, recall, error, call time and memory.

    lit-knn prepare cifar10.zip cifar10.npy
    python -m benchmarks.generate_images cifar10.zip million.npy --images 1000000
    python -m benchmarks.scale --data million.npy --output STEM [--t 1 2 5 10] [--calls 100] [--only NAME ...]

Each entry runs in its own process and is measured against the exact posterior mean (int8, 3 digits) and the exact
nearest images. The plain method is KNN with exact search by float32 products with the stored 8-bit images. That is the
arithmetic of FAISS Flat, whose float32 copy of a million images would take 12 GB. IVF indexes have c ≈ 4·√N lists, and
c/70, c/40, c/20 and c/10 of them are searched. Each is trained once and kept in `--cache-dir`, where the second start
finds it.

`STEM.csv` has a row for each entry, number of lists and noise level, `STEM.md` the printed tables. Peak memory is that
of an entry's process, including the build. `peak_mib` counts all resident pages, also of mapped files (images, cached
index), which the system frees when it needs memory. `private_mib` counts the other pages, sampled 20 times a second
(Linux).
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import Entry, Output, Rows, markdown
from benchmarks.scale_entries import PLAIN, Truth, entries, measure, measure_truth
from lit_knn.common.errors import InputError, told_in_one_line
from lit_knn.data.reading import reference_from
from lit_knn.referee.child_process import in_own_process


@told_in_one_line()
def main(args: Sequence[str] | None = None) -> None:
    """Measure every entry, print the tables, and write the requested files; bad input ends it with one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepared file")
    parser.add_argument("--output", type=Path, required=True, help="stem of the files to write")
    parser.add_argument("--t", type=float, nargs="+", default=[1, 2, 3, 5, 10, 20, 80], help="noise levels")
    parser.add_argument("--batch", type=int, default=128, help="latents, all in one call")
    parser.add_argument("--k", type=int, default=2048, help="neighbours")
    parser.add_argument("--n", type=int, default=256, help="images gathered")
    parser.add_argument("--calls", type=int, default=100, help="further calls, with 16 latents")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries; default: all")
    parser.add_argument("--cache-dir", type=Path, help="keeps the indexes, and has perhaps kept them; default: removed")
    options = parser.parse_args(args)
    output, images = Output(options.output, "csv", "md"), reference_from(options.data)
    options.k = min(options.k, images.N)
    rows: Rows = []
    with tempfile.TemporaryDirectory(dir=options.output.parent, prefix="scale-") as folder:
        options.cache_dir = options.cache_dir or Path(folder) / "cache"
        options.truth = Path(folder) / "truth.pt"
        names = list(chosen(options))
        made = measure_truth(options.data, options.t, options.batch, options.k)
        torch.save({t: known._asdict() for t, known in made}, options.truth)
        for number, name in enumerate(names, start=1):
            print(f"{name} ({number} of {len(names)})", file=sys.stderr, flush=True)
            found, memory = in_own_process(measure_entry, name, options)
            rows += [{"N": images.N, "entry": name, **row, **memory} for row in found]
            output.write_rows(rows)
    shape = f"N = {images.N}, d = {images.d}, B = {options.batch}, k = {options.k}, n = {options.n}"
    output.tell(f"{shape}, {torch.get_num_threads()} threads, torch {torch.__version__}\n\n{tables(rows)}")


def measure_entry(name: str, options: argparse.Namespace) -> Rows:
    """Return the rows of one entry."""
    saved = torch.load(options.truth, weights_only=True)
    truth = {t: Truth(**known) for t, known in saved.items()}
    measured = measure(options.data, chosen(options)[name], truth, options.k, options.calls)
    return [row for rows in measured for row in rows]


def chosen(options: argparse.Namespace) -> dict[str, Entry]:
    """Return the entries to measure, by name."""
    images = reference_from(options.data)
    known = entries(images.N, images.d, options.k, options.n, str(options.cache_dir))
    unknown = [name for name in options.only or [] if name not in known]
    if unknown:
        raise InputError(f"--only: {unknown[0]!r} is none of {', '.join(known)}")
    return {name: entry for name, entry in known.items() if not options.only or name in options.only}


def tables(rows: Rows) -> str:
    """Return Markdown tables of cost, error and recall, one row for each entry and number of lists."""
    levels = list(dict.fromkeys(row["t"] for row in rows))
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        probe = "" if row["nprobe"] is None else str(row["nprobe"])
        groups.setdefault((row["entry"], probe), []).append(row)
    plain = next((mean(group, "ms") for (name, _), group in groups.items() if name == PLAIN), math.nan)
    at = [f"t = {t:g}" for t in levels]
    cost, error, found = ([[head, "lists searched"]] for head in ("entry", "MSE per dimension", "recall"))
    cost[0] += ["first start", "second start", "holds", "ms a search", "ms a call", "of plain", "ms in calls of 16"]
    cost[0] += ["peak memory", "private"]
    error[0] += at
    found[0] += at
    for label, group in groups.items():
        cost.append([*label, *cost_cells(group, plain)])
        error.append([*label, *(f"{row['mse']:.1e}" for row in group)])
        if "recall" in group[0]:
            found.append([*label, *(f"{row['recall']:.3f}" for row in group)])
    return "Times are of one z.\n\n" + "\n\n".join(markdown(table) for table in (cost, error, found))


def cost_cells(group: Rows, plain: float) -> list[str]:
    """Format one line. Times are means over the noise levels; `plain` is the call time of the plain method."""
    first, call = group[0], mean(group, "ms")
    held = math.nan if first["held"] is None else first["held"] / 2**20
    starts = (f"{first[name]:.1f} s" if name in first else "" for name in ("first_start", "second_start"))
    numbers = (f"{held:.0f} MiB", *(f"{v:.2f}" for v in (mean(group, "search_ms"), call, call / plain)))
    each = "" if first["call_ms"] is None else f"{first['call_ms']:.2f}"
    cells = [*starts, *numbers, each, f"{first['peak_mib']} MiB", f"{first['private_mib']} MiB"]
    return ["" if "nan" in cell else cell for cell in cells]


def mean(rows: Rows, column: str) -> float:
    """Return the mean of a column over the noise levels, or NaN if the entry has no such column."""
    values = [row[column] for row in rows if column in row]
    return sum(values) / len(values) if values else math.nan


if __name__ == "__main__":
    main()
