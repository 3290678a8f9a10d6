"""Searches and estimators on data sets of a million images: time to start, size, recall, error, time and memory.

    python -m lit_knn.prepare cifar10.zip cifar10.npy
    python -m benchmarks.generate_images cifar10.zip million.npy --images 1000000
    python -m benchmarks.scale --data million.npy --output STEM [--t 1 2 5 10] [--calls 100] [--only NAME ...]

Each entry runs in a process of its own and is measured against the exact posterior mean (int8, 3 digits) and the exact
nearest images. The plain method is KNN with exact search by float32 products with the stored 8-bit images: the
arithmetic of FAISS Flat, whose float32 copy of a million images would take 12 GB. IVF indexes have c ≈ 4·√N lists, of
which c/70, c/40, c/20 and c/10 are searched; each is trained once and kept in `--cache-dir`, where the second start
finds it.

`STEM.csv` has a row for each entry, number of lists and noise level, `STEM.md` the tables that are printed. Peak memory
is that of an entry's process, building included. `peak_mib` counts all pages resident, those of mapped files (images,
cached index) too, which the system takes back when it needs them; `private_mib` counts what it cannot, sampled 20 times
a second (Linux).
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.scale_entries import PLAIN, Entry, Rows, Truth, entries, measure, measure_truth
from lit_knn.atomic_files import written_whole
from lit_knn.errors import InputError
from lit_knn.images.mapped import read_description
from lit_knn.memory import process_bytes

SECONDS_BETWEEN_SAMPLES = 0.05
TRUTH = "truth"


def main(args: Sequence[str] | None = None) -> None:
    """Measure every entry, print the tables, and write what is asked for; bad input ends it with one line."""
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
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--truth", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    try:
        if options.child is not None:
            run_child(options)
        else:
            run_all(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def run_child(options: argparse.Namespace) -> None:
    """Work out the truth and save it, or measure one entry and write its rows, one a line."""
    if options.child == TRUTH:
        made = measure_truth(options.data, options.t, options.batch, options.k)
        torch.save({t: known._asdict() for t, known in made}, options.truth)
        return
    saved = torch.load(options.truth, weights_only=True)
    truth = {t: Truth(**known) for t, known in saved.items()}
    entry = chosen(options)[options.child]
    with options.output.open("w") as file:
        for rows in measure(options.data, entry, truth, options.k, options.calls):
            file.writelines(json.dumps(row) + "\n" for row in rows)


def run_all(options: argparse.Namespace) -> None:
    """Measure every entry; the CSV is whole after each."""
    from lit_knn.results import write_rows

    csv_path, table_path = (options.output.with_name(f"{options.output.name}.{end}") for end in ("csv", "md"))
    for path in (csv_path, table_path):
        if path.exists():
            raise InputError(f"--output: {path} exists; nothing is overwritten")
    shape = read_description(options.data).shape
    options.k = min(options.k, shape[0])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows: Rows = []
    with tempfile.TemporaryDirectory(dir=options.output.parent, prefix="scale-") as folder:
        options.truth = Path(folder) / "truth.pt"
        options.cache_dir = options.cache_dir or Path(folder) / "cache"
        names = list(chosen(options))
        child(options, TRUTH, Path(folder) / "none")
        for number, name in enumerate(names, start=1):
            print(f"{name} ({number} of {len(names)})", file=sys.stderr, flush=True)
            memory = child(options, name, Path(folder) / "rows")
            found = map(json.loads, (Path(folder) / "rows").read_text().splitlines())
            rows += [{"N": shape[0], "entry": name, **row, **memory} for row in found]
            write_rows(csv_path, rows)
    N, d = shape[0], torch.Size(shape[1:]).numel()
    sizes = f"N = {N}, d = {d}, B = {options.batch}, k = {options.k}, n = {options.n}"
    text = f"{sizes}, {torch.get_num_threads()} threads, torch {torch.__version__}\n\n{tables(rows)}\n"
    print(text)
    with written_whole(table_path) as partial:
        partial.write_text(text)


def chosen(options: argparse.Namespace) -> dict[str, Entry]:
    """The entries to measure, by name."""
    N, *shape = read_description(options.data).shape
    known = entries(N, torch.Size(shape).numel(), options.k, options.n, str(options.cache_dir))
    unknown = [name for name in options.only or [] if name not in known]
    if unknown:
        raise InputError(f"--only: {unknown[0]!r} is none of {', '.join(known)}")
    return {name: entry for name, entry in known.items() if not options.only or name in options.only}


def child(options: argparse.Namespace, name: str, output: Path) -> dict[str, int]:
    """Run this script for one entry: the peaks of its memory, MiB."""
    command = [sys.executable, "-m", "benchmarks.scale", "--child", name, "--data", options.data, "--output", output]
    command += ["--truth", options.truth, "--cache-dir", options.cache_dir, "--t", *options.t]
    for option in ("batch", "k", "n", "calls"):
        command += [f"--{option}", getattr(options, option)]
    process = subprocess.Popen([str(part) for part in command])
    peak = private = 0
    while process.poll() is None:
        peak = max(peak, process_bytes("VmHWM", process.pid))
        private = max(private, process_bytes("RssAnon", process.pid))
        time.sleep(SECONDS_BETWEEN_SAMPLES)
    if process.returncode != 0:
        raise InputError(f"{name} failed with status {process.returncode}, see above")
    return {"peak_mib": peak // 2**20, "private_mib": private // 2**20}


def tables(rows: Rows) -> str:
    """Markdown: cost, error and recall of each entry and number of lists."""
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
    """The cells of one line: times are means over the noise levels, `plain` is that of the plain method's call."""
    first, call = group[0], mean(group, "ms")
    held = math.nan if first["held"] is None else first["held"] / 2**20
    starts = (f"{first[name]:.1f} s" if name in first else "" for name in ("first_start", "second_start"))
    numbers = (f"{held:.0f} MiB", *(f"{v:.2f}" for v in (mean(group, "search_ms"), call, call / plain)))
    each = "" if first["call_ms"] is None else f"{first['call_ms']:.2f}"
    cells = [*starts, *numbers, each, f"{first['peak_mib']} MiB", f"{first['private_mib']} MiB"]
    return ["" if "nan" in cell else cell for cell in cells]


def mean(rows: Rows, column: str) -> float:
    """Mean over the noise levels; NaN where the entry has no such column."""
    values = [row[column] for row in rows if column in row]
    return sum(values) / len(values) if values else math.nan


def markdown(table: list[list[str]]) -> str:
    """A table, its head first."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|---" * len(table[0]) + "|", *lines[1:]])


if __name__ == "__main__":
    main()
