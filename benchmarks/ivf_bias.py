"""The paper's figure of approximate search (fig:approximate_compare): bias of KNN on an IVF index over noise levels.

    python -m benchmarks.ivf_bias --data FILE.npy --output STEM [--shares 70 40 20 10 5 2] [--num-z 64]

It trains one index `IVF<c>,SQ8`, lossless, with c ≈ 4·√N lists. KNN then searches p = c/70, c/40, … of them
(`--shares`), and is compared with KNN with exact search, STF and SubspaceKNN. The squared bias per dimension of the
posterior mean (Eq. 15, eq:mse) is measured over repeated estimates at fixed z, with the x that made z fixed, too, as in
the paper, and is corrected for the number of repeats. The report names the smallest p whose bias is below STF's at
every noise level. A bias counts as zero if the repeats cannot resolve it: below a tenth of variance / repeats, or below
1e-9 (a root mean square of 1/250 of a grey level).

`STEM.csv` has a row for each method and noise level, `STEM.md` the table, `STEM.png` and `STEM.pdf` the picture.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import Entry, Output, Rows, markdown, prepared_set
from benchmarks.scale_entries import Truth, lists_for, measure_truth, recall
from lit_knn.common.errors import InputError, told_in_one_line
from lit_knn.estimators import KNN, STF, Estimator, SubspaceKNN
from lit_knn.figures import save_figure
from lit_knn.figures.style import COLOURS, dress
from lit_knn.index import FaissIndex, Index, TorchIndex
from lit_knn.index.base import Vectors
from lit_knn.metrics.estimator_error import mean_and_error
from lit_knn.metrics.measure import fixed_source, repeated_errors

EXACT, REFERENCE = "KNN, exact search", "STF"
# The mean over some dozens of latents can resolve this share of variance / repeats.
RESOLUTION = 0.1
NEGLIGIBLE = 1e-9

Row = dict[str, Any]


class RememberedSearch(Index):
    """Wraps a deterministic index, and answers the same search again from memory."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._last: tuple[Tensor, int, tuple[Tensor, Tensor]] | None = None

    def check(self, *args: Any, **options: Any) -> None:
        """See `Index.check`."""
        self.index.check(*args, **options)

    def build(self, vectors: Vectors) -> None:
        """See `Index.build`."""
        self.index.build(vectors)

    def to(self, device: torch.device) -> None:
        """See `Index.to`."""
        self.index.to(device)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Index.search`."""
        if self._last is None or self._last[1] != k or not torch.equal(self._last[0], queries):
            self._last = queries, k, self.index.search(queries, k)
        return self._last[2]

    def locate(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """See `Index.locate`."""
        return self.index.locate(queries)


def methods(N: int, k: int, n: int, r: int, shares: Sequence[int], cache_dir: str) -> dict[str, Entry]:
    """Return the methods by name; those with approximate search come last, few lists first."""
    c = lists_for(N)

    def ivf(p: int | None) -> Index:
        return RememberedSearch(FaissIndex(f"IVF{c},SQ8", p, lossless=True, cache_dir=cache_dir))

    found = {
        EXACT: Entry(lambda: KNN(k, n), lambda _: RememberedSearch(TorchIndex("float32"))),
        REFERENCE: Entry(lambda: STF(n)),
        f"SubspaceKNN, r={r}": Entry(lambda: SubspaceKNN(r, n)),
    }
    probes = sorted({max(round(c / share), 1) for share in shares})
    found |= {f"KNN, IVF{c}, p={p}": Entry(lambda: KNN(k, n), ivf, [p]) for p in probes}
    few = [p for p in probes if p <= c / 20]
    return found | {f"KNN with source, IVF{c}, p={p}": Entry(lambda: KNN(k, n, True), ivf, [p]) for p in few}


def measure(path: Path, chosen: dict[str, Entry], truth: dict[float, Truth], repeats: int) -> Iterator[Row]:
    """Yield a row for each method and noise level."""
    bar = tqdm(total=len(chosen) * len(truth), desc="measuring", unit=" level", disable=None)
    for name, entry in chosen.items():
        probe = entry.probes[0]
        estimator = entry.estimator().bind(prepared_set(path, entry.make_index(probe)))
        for t, known in truth.items():
            row = {"method": name, "nprobe": "" if probe is None else probe, "t": t}
            yield {**row, **errors(estimator, known, t, repeats), "recall": recall_of(estimator, known)}
            bar.update()


def errors(estimator: Estimator, known: Truth, t: float, repeats: int) -> Row:
    """Measure squared bias, variance and MSE per dimension as means over the latents, with standard errors."""
    values = repeated_errors(estimator, repeats, known.z, t, known.mu, fixed_source(known.x), (0,))
    row: Row = {"num_z": len(known.z), "repeats": repeats}
    for name in ("bias_sq_corrected", "variance", "mse"):
        row[name], row[f"{name}_se"] = mean_and_error(values[name])
    return row


def recall_of(estimator: Estimator, known: Truth) -> float | str:
    """Return the recall of the remembered search, or "" for estimators that do not search."""
    if not hasattr(estimator, "proposal"):
        return ""
    return recall(estimator.reference.search(known.z, known.ids.shape[1])[1], known.ids)


def resolution(row: Row) -> float:
    """Return the smallest bias that the repeats can resolve."""
    return max(RESOLUTION * row["variance"] / row["repeats"], NEGLIGIBLE)


def resolved(row: Row) -> bool:
    """Tell whether the repeats can resolve the bias of a row."""
    return bool(row["bias_sq_corrected"] > resolution(row))


def above(rows: Sequence[Row]) -> dict[str, dict[int, list[float]]]:
    """Return {method: {lists: noise levels}} with the noise levels at which the bias is above STF's bias."""
    limits = {row["t"]: row["bias_sq_corrected"] for row in rows if row["method"] == REFERENCE}
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["nprobe"] != "":
            levels = found.setdefault(row["method"].partition(",")[0], {}).setdefault(row["nprobe"], [])
            if resolved(row) and row["bias_sq_corrected"] > limits[row["t"]]:
                levels.append(row["t"])
    return found


def report(rows: Sequence[Row]) -> str:
    """Make Markdown tables of the bias and recall at each noise level, and say how many lists are sufficient."""
    levels = list(dict.fromkeys(row["t"] for row in rows))
    head = [*(f"t = {t:g}" for t in levels)]
    bias, found = [["squared bias per dimension", *head]], [["recall", *head]]
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        bias.append([name, *(f"{r['bias_sq_corrected']:.1e}" if resolved(r) else "none" for r in own)])
        if own[0]["recall"] != "":
            found.append([name, *(f"{row['recall']:.3f}" for row in own)])
    lines = []
    for method, over in above(rows).items():
        lines += [
            f"{method}, p = {p}: above STF's at t = {', '.join(f'{t:g}' for t in ts)}" for p, ts in over.items() if ts
        ]
        enough = next((p for p, ts in sorted(over.items()) if not ts and not any(over[q] for q in over if q > p)), None)
        lines.append(f"{method}: smallest p whose bias is under STF's at all these t: {enough or 'none of them'}")
    return "\n\n".join([markdown(bias), markdown(found), *lines])


def bias_figure(rows: Sequence[Row], title: str) -> Figure:
    """Draw squared bias over the noise level; a hollow mark at the resolution means that no bias was found."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    approximate = list(dict.fromkeys(row["method"] for row in rows if row["nprobe"] != ""))
    shades = {name: colormaps["viridis"](0.9 * i / max(len(approximate) - 1, 1)) for i, name in enumerate(approximate)}
    plain = {EXACT: ("black", "s"), REFERENCE: (COLOURS[1], "D")}
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        t = [row["t"] for row in own]
        values = [max(row["bias_sq_corrected"], resolution(row)) for row in own]
        colour, marker = (shades[name], "o") if name in shades else plain.get(name, (COLOURS[3], "^"))
        axes.plot(t, values, "-" if name in shades else "--", color=colour, linewidth=1.3, zorder=1)
        faces = [colour if resolved(row) else "white" for row in own]
        axes.scatter(t, values, 18, c=faces, edgecolors=[colour], marker=marker, zorder=2)
        axes.plot([], [], marker, color=colour, markersize=4, label=name)
    dress(axes, "xy", xlabel="noise level $t$", ylabel="squared bias per dimension", title=title)
    axes.set_xticks(sorted({row["t"] for row in rows}), labels=[f"{t:g}" for t in sorted({row["t"] for row in rows})])
    axes.plot([], [], "o", color="0.5", markerfacecolor="white", markersize=4, label="none, or less than this")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def run(options: argparse.Namespace) -> None:
    """Measure every method, print the report, and write the requested files."""
    output, images = Output(options.output, "csv", "md", "png", "pdf"), prepared_set(options.data)
    N, d, k = images.N, images.d, min(options.k, images.N)
    values = {"repeats": options.repeats, "num-z": options.num_z, "shares": min(options.shares)}
    for option, least in {"repeats": 2, "num-z": 2, "shares": 1}.items():
        if values[option] < least:
            raise InputError(f"--{option} must be at least {least}, got {values[option]}")
    if options.r > min(N, d):
        raise InputError(f"--r {options.r} is more than min(N, d) = {min(N, d)}")
    rows: Rows = []
    with tempfile.TemporaryDirectory(dir=options.output.parent, prefix="ivf-bias-") as folder:
        cache_dir = str(options.cache_dir or folder)
        chosen = methods(N, k, options.n, options.r, options.shares, cache_dir)
        truth = dict(measure_truth(options.data, options.t, options.num_z, k))
        for row in measure(options.data, chosen, truth, options.repeats):
            rows.append(row)
            output.write_rows(rows)
    title = f"N = {N:,}, c = {lists_for(N)} lists, k = {k}, n = {options.n}"
    output.tell(f"{title}, {options.num_z} z, {options.repeats} repeats\n\n{report(rows)}")
    save_figure(bias_figure(rows, title), options.output)


@told_in_one_line()
def main(args: Sequence[str] | None = None) -> None:
    """Run one command line; bad input ends it with one line and exit status 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepared file")
    parser.add_argument("--output", type=Path, required=True, help="stem of the files to write")
    parser.add_argument("--shares", type=float, nargs="+", default=[70, 40, 20, 10, 5, 2], help="c/p")
    parser.add_argument("--t", type=float, nargs="+", default=[1, 1.5, 2, 3, 5, 7, 10, 14, 20, 40, 80])
    parser.add_argument("--num-z", type=int, default=64, help="latents")
    parser.add_argument("--repeats", type=int, default=10, help="estimates at each")
    parser.add_argument("--k", type=int, default=2048, help="neighbours")
    parser.add_argument("--n", type=int, default=256, help="images gathered")
    parser.add_argument("--r", type=int, default=512, help="principal components of SubspaceKNN")
    parser.add_argument("--cache-dir", type=Path, help="keeps the index, and has perhaps kept it; default: removed")
    run(parser.parse_args(args))


if __name__ == "__main__":
    main()
