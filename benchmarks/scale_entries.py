"""Entries of `benchmarks/scale.py`: searches and estimators on a prepared file, each measured in its own process."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import Entry, Rows
from lit_knn.common.rng import keyed_generator
from lit_knn.data.reading import reference_from
from lit_knn.estimators import KNN, STF, Estimator, Exact, SubspaceKNN
from lit_knn.index import FaissIndex, SubspaceIndex, TorchIndex
from lit_knn.metrics.estimator_error import mean_and_error
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.measure import TIME, fixed_source, repeated_errors

PLAIN = "KNN, exact search"
# FAISS's own float32 index is measured only up to this size.
FLAT_BYTES = 2 * 2**30
# FAISS computes principal components from a full covariance matrix; at d = 12,288 its eigenvectors take an hour.
FAISS_PCA_MAX_D = 4096
CALL_BATCH = 16


class Truth(NamedTuple):
    """The latents at one noise level, with their exact means and neighbours.

    Attributes:
        x: (B, *shape), float32, images without repetition.
        z: (B, *shape), float32, latents made from x.
        mu: (B, *shape), float64, the exact posterior mean.
        ids: (B, k), the k nearest images.
    """

    x: Tensor
    z: Tensor
    mu: Tensor
    ids: Tensor


def lists_for(N: int) -> int:
    """Return the number of lists, c ≈ 4·√N."""
    return round(4 * math.sqrt(N))


def entries(N: int, d: int, k: int, n: int, cache_dir: str) -> dict[str, Entry]:
    """Return the entries by name, the plain method first."""
    c = lists_for(N)
    probes = sorted({max(c // share, 1) for share in (70, 40, 20, 10)})

    def ivf(factory: str, lossless: bool) -> Entry:
        return Entry(
            lambda: KNN(k, n), lambda p: FaissIndex(factory, p, lossless=lossless, cache_dir=cache_dir), probes
        )

    found = {PLAIN: Entry(lambda: KNN(k, n), lambda _: TorchIndex("float32"))}
    if 4 * N * d <= FLAT_BYTES:
        found["KNN, FAISS Flat"] = Entry(lambda: KNN(k, n), lambda _: FaissIndex())
    found["KNN, TorchIndex"] = Entry(lambda: KNN(k, n), lambda _: TorchIndex())
    found["KNN, TorchIndex r=256"] = Entry(lambda: KNN(k, n), lambda _: SubspaceIndex(256))
    found["KNN, TorchIndex r=512"] = Entry(lambda: KNN(k, n), lambda _: SubspaceIndex(512))
    found[f"KNN, IVF{c},SQ8 lossless"] = ivf(f"IVF{c},SQ8", lossless=True)
    if d <= FAISS_PCA_MAX_D:
        found[f"KNN, PCA256,IVF{c},SQ8"] = ivf(f"PCA256,IVF{c},SQ8", lossless=False)
    found["SubspaceKNN, r=256"] = Entry(lambda: SubspaceKNN(256, n))
    found["SubspaceKNN, r=512"] = Entry(lambda: SubspaceKNN(512, n))
    found["STF"] = Entry(lambda: STF(n))
    found["Exact"] = Entry(Exact)
    return found


def measure_truth(path: Path, levels: Sequence[float], batch: int, k: int) -> Iterator[tuple[float, Truth]]:
    """Compute the truth at each noise level, with the same images and noise at all of them."""
    reference = reference_from(path, TorchIndex("float32"))
    exact, latents = Exact().bind(reference), NoisyLatents(reference, batch, seed=0)
    reference.build_index()
    for t in tqdm(levels, desc="exact means and neighbours", unit=" level", disable=None):
        z, x = latents.batch(range(batch), t)
        yield t, Truth(x, z, exact.posterior_mean(z.double(), t), reference.search(z, k)[1])


def recall(found: Tensor, nearest: Tensor) -> float:
    """Return the share of the `nearest` images (B, k) that are in `found` (B, k), where −1 means no image."""
    return sum(torch.isin(a, b).float().mean().item() for a, b in zip(nearest, found, strict=True)) / len(found)


def measure(path: Path, entry: Entry, truth: dict[float, Truth], k: int, calls: int) -> Iterator[Rows]:
    """Yield the rows of each number of lists, one row for each noise level.

    `first_start` and `second_start`: seconds to build or load the index, or to project, and bind; the second start
    finds the index in the cache. `held`: bytes of index and arrays. `search_ms` and `ms`: milliseconds per z of a
    search and of a whole call, on all latents at once. `recall`; `mse` per dimension with its standard error.
    `call_ms`: milliseconds per z, the mean over `calls` calls with 16 latents each, in turns over the noise levels.
    """
    levels = list(truth.items())
    bar = tqdm(total=len(entry.probes) * (len(levels) + calls), desc="measuring", unit=" call", disable=None)
    for probe in entry.probes:
        first, estimator = start(path, entry, probe)
        times: dict[str, Any] = {"nprobe": probe, "first_start": first}
        if probe is not None:
            del estimator  # This frees its memory before the second start.
            times["second_start"], estimator = start(path, entry, probe)
            if probe != entry.probes[0]:
                del times["first_start"]  # Later starts load the index that the first start built.
        times["held"] = held_bytes(estimator)
        estimator.posterior_mean(levels[0][1].z[:2], levels[0][0])  # This call brings mapped pages into memory.
        rows = []
        for t, known in levels:
            rows.append({**times, "t": t, **at_level(estimator, known, t, k)})
            bar.update()
        begin = time.perf_counter()
        for call in range(calls):
            t, known = levels[call % len(levels)]
            estimator.posterior_mean(known.z[:CALL_BATCH], t, known.x[:CALL_BATCH], keyed_generator("cpu", call))
            bar.update()
        each = 1000 * (time.perf_counter() - begin) / (calls * len(levels[0][1].z[:CALL_BATCH])) if calls else None
        yield [{**row, "calls": calls, "call_ms": each} for row in rows]


def start(path: Path, entry: Entry, probe: int | None) -> tuple[float, Estimator]:
    """Open the file and bind the estimator; return the seconds and the estimator."""
    begin = time.perf_counter()
    estimator = entry.estimator().bind(reference_from(path, entry.make_index(probe)))
    return time.perf_counter() - begin, estimator


def at_level(estimator: Estimator, known: Truth, t: float, k: int) -> dict[str, Any]:
    """Measure time, recall and error at one noise level."""
    row: dict[str, Any] = {}
    if hasattr(estimator, "proposal"):
        begin = time.perf_counter()
        ids = estimator.reference.search(known.z, k)[1]
        row["search_ms"] = 1000 * (time.perf_counter() - begin) / len(ids)
        row["recall"] = recall(ids, known.ids)
    values = repeated_errors(estimator, 1, known.z, t, known.mu, fixed_source(known.x), (0,))
    mse, error = mean_and_error(values["mse"])
    return {**row, "ms": values[TIME][0].item(), "mse": mse, "mse_se": error}


def held_bytes(estimator: Estimator) -> int | None:
    """Return the bytes of the estimator's index and arrays, without the images, or None if they are unknown."""
    reference = estimator.reference
    told = estimator.holds(reference.N, reference.d, True, reference.device)
    index = reference.index.nbytes(reference.N, reference.d, reference.device) if told and told.neighbours else 0
    return None if told is None or index is None else index + sum(told.arrays.values())
