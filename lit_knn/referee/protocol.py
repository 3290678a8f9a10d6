"""The protocol: one estimator is measured on one case, in turns with the reference estimator, in one process."""

import contextlib
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lit_knn.common.errors import InputError, first_line
from lit_knn.common.memory import process_bytes
from lit_knn.common.progress import progress_bar
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import KNN, DrawingEstimator, Estimator
from lit_knn.index import Index, exact_index
from lit_knn.index.faiss_index import use_threads
from lit_knn.metrics.estimator_error import error_terms, mean_and_error, share_and_error
from lit_knn.metrics.measure import fixed_source, posterior_source
from lit_knn.referee.behaviour import behaviour, check_conduct, estimate_of
from lit_knn.referee.cases import LoadedCase, case_named
from lit_knn.referee.child_process import in_own_process
from lit_knn.referee.entry import Entry
from lit_knn.referee.table import PROTOCOL, Rows, surroundings
from lit_knn.reference import ReferenceSet

# One-image batches that are timed at each noise level.
SINGLE = 16
MIB = 2**20


@dataclass
class Turns:
    """Holds errors and times of the calls of one estimator at one noise level.

    Attributes:
        error_sum: (latents, *shape), float64, Σ_r (μ̂_r − μ).
        sq_error_sum: (latents,), float64, Σ_r ‖μ̂_r − μ‖².
        counted: R, the repeats in these sums.
        seconds: of all latents, one number for each repeat.
    """

    error_sum: Tensor
    sq_error_sum: Tensor
    counted: int
    seconds: list[float]

    @property
    def terms(self) -> Any:
        """The error terms of each latent."""
        return error_terms(self.error_sum, self.sq_error_sum, self.counted)


class Contest:
    """Measures a bound estimator beside the bound reference estimator.

    Args:
        estimator: bound.
        loaded: the case.
        batch: latents in a call.
        repeats: R.
        name: the estimator's name, for messages.
    """

    def __init__(self, estimator: Estimator, loaded: LoadedCase, batch: int, repeats: int, name: str) -> None:
        self.loaded, self.batch, self.repeats, self.name = loaded, batch, repeats, name
        # An index of its own, so that the contestant's search does not change the reference estimator's.
        images = copy_of_set(loaded.reference, exact_index())
        self.reference = KNN(loaded.case.k, loaded.case.n).bind(images)
        self.estimator = estimator

    def row(self, t: float, bar: tqdm) -> dict[str, Any]:
        """Measure one noise level."""
        z, mu = self.loaded.z(t), self.loaded.exact.means[t]
        own, plain = self._turns(z, t, mu, bar)
        mse, bias_sq, variance = (
            mean_and_error(part) for part in (own.terms.mse, own.terms.bias_sq_corrected, own.terms.variance)
        )
        ratio = share_and_error(own.terms.mse, plain.terms.mse)
        row: dict[str, Any] = {"t": f"{t:g}", "exact_error": self.loaded.exact.errors[t]}
        for key, value in {"mse": mse, "bias_sq": bias_sq, "variance": variance, "mse_ratio": ratio}.items():
            row |= {key: value.mean, f"{key}_se": value.standard_error}
        # The score is (μ − z) / t², Eq. 5.
        row |= {"score_mse": mse.mean / t**4, "score_mse_se": mse.standard_error / t**4}
        row |= _times(own.seconds, plain.seconds, len(z)) | {"ms_one": self._single(z, t)}
        return {key: _known(value) for key, value in (row | self._certificate(z, t, mse.mean)).items()}

    def _turns(self, z: Tensor, t: float, mu: Tensor, bar: tqdm) -> tuple[Turns, Turns]:
        """Call both estimators in turns on each batch. The first call of each is not counted."""
        found = [Turns(torch.zeros_like(mu), torch.zeros(len(z), dtype=torch.float64), 0, []) for _ in range(2)]
        sources = self._source(z, t)
        both = (self.estimator, self.reference)
        for estimator in both:
            self._call(estimator, z[: self.batch], t, sources(0)[: self.batch], (0,))
        for repeat in range(self.repeats):
            x = sources(repeat)
            for turns in found:
                turns.seconds.append(0.0)
            order = self._order(repeat, len(z))
            for number, rows in enumerate(order[part] for part in self._batches(len(z))):
                batch_z, batch_x = z[rows], x[rows]
                # Who goes first changes from turn to turn.
                for who in (0, 1) if (repeat + number) % 2 == 0 else (1, 0):
                    began = time.perf_counter()
                    mean = self._call(both[who], batch_z, t, batch_x, (repeat, number))
                    found[who].seconds[-1] += time.perf_counter() - began
                    self._add(found[who], both[who], rows, mean, mu)
                bar.update()
        for turns, estimator in zip(found, both, strict=True):
            turns.counted = 1 if self._same_each_time(estimator) else self.repeats
        return found[0], found[1]

    def _order(self, repeat: int, latents: int) -> Tensor:
        """Return other batches for each repeat, so that an estimator that keeps its answers gains no time."""
        if repeat == 0:
            return torch.arange(latents)
        return torch.randperm(latents, generator=keyed_generator("cpu", self.loaded.case.seed, repeat, Stream.ORDER))

    def _add(self, turns: Turns, estimator: Estimator, rows: Tensor, mean: Tensor, mu: Tensor) -> None:
        # A deterministic estimator is repeated only for its time.
        if self._same_each_time(estimator) and len(turns.seconds) > 1:
            return
        error = mean.double() - mu[rows]
        turns.error_sum[rows] += error
        turns.sq_error_sum[rows] += error.flatten(1).square().sum(1)

    @staticmethod
    def _same_each_time(estimator: Estimator) -> bool:
        return estimator.deterministic and not estimator.uses_source

    def _source(self, z: Tensor, t: float) -> Callable[[int], Tensor]:
        """Return the sources of each repeat: draws from the posterior given z, if the estimator uses them."""
        if not self.estimator.uses_source:
            return fixed_source(self.loaded.x.float())
        return posterior_source(self.loaded.reference, z, t, self.repeats, (self.loaded.case.seed,))

    def _call(self, estimator: Estimator, z: Tensor, t: float, x: Tensor, key: tuple[int, ...]) -> Tensor:
        generator = keyed_generator("cpu", self.loaded.case.seed, *key, Stream.ESTIMATOR)
        return estimate_of(estimator, z, t, x, generator, self.name)

    def _batches(self, number: int) -> Iterator[slice]:
        for start in range(0, number, self.batch):
            yield slice(start, min(start + self.batch, number))

    def _single(self, z: Tensor, t: float) -> float:
        """Return the median of the milliseconds of a batch of one image."""
        seconds = []
        for i in range(-1, min(SINGLE, len(z))):
            rows = slice(max(i, 0), max(i, 0) + 1)
            began = time.perf_counter()
            self._call(self.estimator, z[rows], t, self.loaded.x[rows].float(), (0,))
            seconds.append(time.perf_counter() - began)
        return 1000 * _median(seconds[1:])

    def _certificate(self, z: Tensor, t: float, mse: float) -> dict[str, Any]:
        """Compare the estimator's own estimate of its error with the true one."""
        if not isinstance(self.estimator, DrawingEstimator):
            return {}
        parts, source = [], self._source(z, t)(0)
        for number, rows in enumerate(self._batches(len(z))):
            generator = keyed_generator("cpu", self.loaded.case.seed, 0, number, Stream.ESTIMATOR)
            x = source[rows] if self.estimator.uses_source else None
            parts.append(self.estimator.certified_mean(z[rows], t, x, generator).sq_error)
        certified = torch.cat(parts)
        mean, spread = certified.mean().item(), certified.std().item()
        return {
            "certified_mse": mean,
            "certified_share": mean / mse if mse > 0 else float("nan"),
            "certified_spread": spread / mean if mean > 0 else float("nan"),
        }


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        batch: latents in a call; None for 128, or all latents if they are fewer.
        repeats: R; None for the case's number.
        threads: of the processor; None for all.
        memory: whether to measure memory, in another process.
    """

    batch: int | None = None
    repeats: int | None = None
    threads: int | None = None
    memory: bool = True


def run(
    entry: Entry,
    loaded: LoadedCase,
    data: Path | None,
    options: Options,
    keep: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Rows:
    """Measure an entry on a case: one row for each noise level.

    `keep` gets each row as soon as it is known, so that a failure at a later level does not lose it.

    Raises:
        InputError: the estimator refuses the images, or breaks a rule of `check_conduct`; options out of range.
    """
    case, latents = loaded.case, len(loaded.x)
    batch = min(options.batch or 128, latents)
    repeats = options.repeats or case.repeats
    for option, value, least in (("batch", batch, 1), ("repeats", repeats, 2)):
        if value < least:
            raise InputError(f"--{option} must be at least {least}, got {value}")
    if options.threads is not None:
        if options.threads > (cores := os.cpu_count() or 1):
            raise InputError(f"--threads {options.threads}: this machine has {cores}")
        torch.set_num_threads(options.threads)
        use_threads(options.threads)
    estimator, index = entry.make()
    images, began = copy_of_set(loaded.reference, index), time.perf_counter()
    bound = bind(estimator, images, entry.name)
    # The first search builds the index.
    first = loaded.x[:1].float()
    estimate_of(bound, first.clone(), case.levels[0], first.clone(), keyed_generator("cpu", case.seed), entry.name)
    common: dict[str, Any] = {"setup_seconds": _known(time.perf_counter() - began)}
    check_conduct(bound, loaded, entry.name)
    common |= {"protocol": PROTOCOL, "case": case.name, "data": loaded.reference.fingerprint()[:12], "N": case.N}
    common |= {"d": images.d, "name": entry.name, "settings": entry.settings, "origin": entry.origin}
    common |= {"note": entry.note, "latents": latents, "repeats": repeats, "batch": batch}
    common |= {"threads": torch.get_num_threads(), **surroundings()}
    common |= behaviour(bound, loaded, batch, entry.name)
    common["peak_mib"] = memory_of(entry, case.name, data, batch) if options.memory else ""
    common |= dict.fromkeys(("certified_mse", "certified_share", "certified_spread"), "")
    contest, rows = Contest(bound, loaded, batch, repeats, entry.name), []
    with progress_bar(len(case.levels) * repeats * -(-latents // batch), entry.name, " batches") as bar:
        for t in case.levels:
            rows.append(common | contest.row(t, bar))
            keep(rows[-1])
    return rows


def bind(estimator: Estimator, images: ReferenceSet, name: str) -> Estimator:
    """Bind an estimator if it needs images; raise InputError if its code fails."""
    try:
        return estimator.bind(images) if estimator.needs_reference else estimator
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        told = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{name} cannot be made from the images: {told}") from error


def copy_of_set(reference: ReferenceSet, index: Index) -> ReferenceSet:
    """Return a set of the same images with its own index, and without what other estimators have kept in it."""
    # The set has expanded the labels to mirrored images.
    labels = None if reference.labels is None else reference.labels[: len(reference.images)]
    return ReferenceSet(reference.images, index, reference.hflip, labels, reference.given_sha256)


def memory_of(entry: Entry, case_name: str, data: Path | None, batch: int) -> int | str:
    """Measure the peak memory in MiB in another process; empty if the entry cannot be sent there."""
    try:
        pickle.dumps(entry.make)
    except Exception as error:
        warnings.warn(f"the memory of {entry.name} is not measured: {first_line(error)}", stacklevel=2)
        return ""
    return in_own_process(peak_mib, entry.name, entry.make, case_name, data, batch)[0]


def peak_mib(
    name: str, make: Callable[[], tuple[Estimator, Index]], case_name: str, data: Path | None, batch: int
) -> int:
    """Bind and call an estimator in this process; return the MiB that it took beyond the images (Linux)."""
    case = case_named(case_name)
    reference = case.reference_set(data)
    x, noise = case.draw(reference, min(batch, case.latents))
    t = case.levels[len(case.levels) // 2]
    z = (x + t * noise).float()
    estimator, index = make()
    images = copy_of_set(reference, index)
    reset_peak()
    before = process_bytes("VmRSS")
    bound = bind(estimator, images, name)
    estimate_of(bound, z, t, x.float(), keyed_generator("cpu", 0), name)
    return max(process_bytes("VmHWM") - before, 0) // MIB


def reset_peak() -> None:
    """Forget the peak of this process's memory, which reading the images may have set."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _times(own: list[float], plain: list[float], latents: int) -> dict[str, float]:
    """Return milliseconds per latent, and the ratios of each repeat, in which both estimators took turns."""
    ms = [1000 * seconds / latents for seconds in own]
    ratios = [a / b for a, b in zip(own, plain, strict=True)]
    return {
        "ms": _median(ms),
        "ms_low": min(ms),
        "ms_high": max(ms),
        "reference_ms": 1000 * _median(plain) / latents,
        "time_ratio": _median(ratios),
        "time_ratio_low": min(ratios),
        "time_ratio_high": max(ratios),
    }


def _median(values: list[float]) -> float:
    return torch.tensor(values, dtype=torch.float64).quantile(0.5).item()


def _known(value: Any) -> Any:
    """Write six digits; a number that is not known is empty."""
    if not isinstance(value, float):
        return value
    return "" if value != value else f"{value:.6g}"
