"""The protocol: one estimator is measured on one case, in turns with the reference estimator, in one process."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lit_knn.common.errors import InputError
from lit_knn.common.extras import is_installed
from lit_knn.common.files import locked, make_folder
from lit_knn.common.progress import progress_bar
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import KNN, DrawingEstimator, Estimator
from lit_knn.index import Index, exact_index
from lit_knn.index.faiss_index import use_threads
from lit_knn.metrics.estimator_error import ErrorTerms, error_terms, mean_and_error, share_and_error
from lit_knn.metrics.measure import fixed_source, posterior_source
from lit_knn.referee.behaviour import Contestant, behaviour, check_conduct
from lit_knn.referee.cases import CASES, Case
from lit_knn.referee.cases.loading import LoadedCase, load_case
from lit_knn.referee.entry import Make, Mean, OwnCallable, about
from lit_knn.referee.memory import copy_of_set, in_own_process, peak_mib
from lit_knn.referee.table import COLUMNS, PROTOCOL, Rows, add_row, check_fits, surroundings

BATCH = 128


@dataclass(frozen=True)
class Options:
    """Options of a run; raises InputError for a number out of range."""

    batch: int | None = None  # latents in a call; None for 128, or all latents if they are fewer
    repeats: int | None = None  # R; None for the case's number
    threads: int | None = None  # of the processor; None for all
    memory: bool = True  # whether to measure memory, in another process, which an estimator of a notebook cannot reach
    cache: Path | None = None  # folder where exact means are kept; None for ~/.cache/lit_knn/referee
    latents: int | None = None  # use only the first so many latents, for a quick look; None for all

    def __post_init__(self) -> None:
        for option, least in (("batch", 1), ("repeats", 2), ("threads", 1)):
            if (value := getattr(self, option)) is not None and value < least:
                raise InputError(f"--{option} must be at least {least}, got {value}")


DEFAULTS = Options()


def referee(
    estimator: Estimator | Mean | type,
    case: Case | str,
    name: str | None = None,
    index: Index | None = None,
    data: Path | None = None,
    output: Path | None = None,
    options: Options = DEFAULTS,
    make: Make | None = None,
) -> Rows:
    """Measure an estimator on a case.

    Args:
        estimator: an estimator that is not bound, a callable `(z, t, generator) -> mean`, or a class that is made from
            the `ReferenceSet` and then called so.
        case: the case or its name, such as "digits".
        name: name in the table; by default class and arguments.
        index: the index for the estimator's search; by default FAISS Flat.
        data: a copy of the images, for cases that need one.
        output: a CSV file. Each row is added to it as soon as it is known, so a failure at a later level loses none.
        options: how to measure.
        make: makes the estimator and its index again, also in another process; by default they are copied.

    Returns:
        One row for each noise level, with the columns of `table.COLUMNS`.
    """
    given = estimator if isinstance(estimator, Estimator) else OwnCallable(estimator)
    make = make or partial(copy.deepcopy, (given, exact_index() if index is None else index))
    entry = about(given, index, name)
    if isinstance(case, str):
        if case not in CASES:
            raise InputError(f"--case {case}: no such case; there are {', '.join(CASES)}")
        case = CASES[case]
    if output is not None:
        make_folder(output.parent)
    loaded = load_case(case, data, options.latents, options.cache)
    if output is not None:
        with locked(output):
            check_fits(output, case.name, loaded.reference.fingerprint()[:12])
    if options.threads is not None:
        torch.set_num_threads(options.threads)
        if is_installed("faiss"):
            use_threads(options.threads)
    batch = min(options.batch or BATCH, len(loaded.x))
    own, common = _made(entry["name"], make, loaded)
    common |= entry | behaviour(own, loaded, batch) | {"batch": batch, "threads": torch.get_num_threads()}
    common["peak_mib"] = in_own_process(peak_mib, own.name, make, case, data, batch) if options.memory else ""
    common["repeats"] = repeats = options.repeats or case.repeats
    contest, rows = Contest(own, loaded, batch, repeats), []
    with progress_bar(len(case.levels) * repeats * -(-len(loaded.x) // batch), own.name, " batches") as bar:
        for t in case.levels:
            rows.append(dict.fromkeys(COLUMNS, "") | common | contest.row(t, bar))
            if output is not None:
                add_row(output, rows[-1])
    return rows


def _made(name: str, make: Make, loaded: LoadedCase) -> tuple[Contestant, dict[str, Any]]:
    """Make a contestant that obeys the rules, and the columns about it, its case and this machine."""
    estimator, index = make()
    images, began = copy_of_set(loaded.reference, index), time.perf_counter()
    own = Contestant.bound(name, estimator, images)
    # The first search builds the index.
    first = loaded.x[:1].float()
    own.mean(first.clone(), loaded.case.levels[0], first.clone(), keyed_generator("cpu", loaded.case.seed))
    seconds = time.perf_counter() - began
    check_conduct(own, loaded)
    facts = {"protocol": PROTOCOL, "case": loaded.case.name, "data": loaded.reference.fingerprint()[:12]}
    facts |= {"N": images.N, "d": images.d, "latents": len(loaded.x), "setup_seconds": _known(seconds)}
    return own, facts | surroundings()


class Turns:
    """Errors and times of one contestant's calls at one noise level; `mu` (latents, *shape) are the exact means."""

    def __init__(self, contestant: Contestant, mu: Tensor) -> None:
        self.contestant, self.mu = contestant, mu
        self.error_sum, self.sq_error_sum = torch.zeros_like(mu), torch.zeros(len(mu), dtype=torch.float64)
        self.seconds: list[float] = []  # for all latents, one number for each repeat
        # A deterministic estimator is repeated only for its time.
        self.errs_once = contestant.estimator.deterministic and not contestant.estimator.uses_source

    def add(self, rows: Tensor, mean: Tensor, seconds: float) -> None:
        """Add the estimates of some latents in the current repeat."""
        self.seconds[-1] += seconds
        if len(self.seconds) == 1 or not self.errs_once:
            error = mean.double() - self.mu[rows]
            self.error_sum[rows] += error
            self.sq_error_sum[rows] += error.flatten(1).square().sum(1)

    @property
    def terms(self) -> ErrorTerms:
        """The error terms of each latent."""
        return error_terms(self.error_sum, self.sq_error_sum, 1 if self.errs_once else len(self.seconds))


class Contest:
    """Measures a contestant beside the reference estimator, in `repeats` calls of `batch` latents."""

    def __init__(self, own: Contestant, loaded: LoadedCase, batch: int, repeats: int) -> None:
        self.own, self.loaded, self.batch, self.repeats = own, loaded, batch, repeats
        # An index of its own, so that the contestant's search does not change the reference estimator's.
        images = copy_of_set(loaded.reference, exact_index())
        self.plain = Contestant.bound("the reference estimator", KNN(loaded.case.k, loaded.case.n), images)

    def row(self, t: float, bar: tqdm) -> dict[str, Any]:
        """Measure one noise level."""
        z = self.loaded.z(t)
        own, plain = self._turns(z, t, bar)
        row: dict[str, Any] = {"t": f"{t:g}"}
        values = {
            "mse": mean_and_error(own.terms.mse),
            "bias_sq": mean_and_error(own.terms.bias_sq_corrected),
            "variance": mean_and_error(own.terms.variance),
            # The score is (μ − z) / t², Eq. 5.
            "score_mse": mean_and_error(own.terms.mse / t**4),
            "mse_ratio": share_and_error(own.terms.mse, plain.terms.mse),
        }
        for key, value in values.items():
            row |= {key: value.mean, f"{key}_se": value.standard_error}
        row |= _times(own.seconds, plain.seconds, len(z)) | self._certificate(z, t, row["mse"])
        return {key: _known(value) for key, value in row.items()}

    def _turns(self, z: Tensor, t: float, bar: tqdm) -> tuple[Turns, Turns]:
        """Call both contestants in turns on each batch. The first call of each is not counted."""
        sources, mu = self._source(z, t), self.loaded.means[t]
        both = Turns(self.own, mu), Turns(self.plain, mu)
        for turns in both:
            turns.contestant.mean(z[: self.batch], t, sources(0)[: self.batch], self._generator(0))
        for repeat in range(self.repeats):
            x = sources(repeat)
            for turns in both:
                turns.seconds.append(0.0)
            # Each repeat has other batches, so that an estimator that keeps its answers gains no time.
            order = torch.arange(len(z))
            if repeat > 0:
                generator = keyed_generator("cpu", self.loaded.case.seed, repeat, Stream.ORDER)
                order = torch.randperm(len(z), generator=generator)
            for number, rows in enumerate(order.split(self.batch)):
                batch_z, batch_x = z[rows], x[rows]
                # Who goes first changes from turn to turn.
                for turns in both if (repeat + number) % 2 == 0 else both[::-1]:
                    began = time.perf_counter()
                    mean = turns.contestant.mean(batch_z, t, batch_x, self._generator(repeat, number))
                    turns.add(rows, mean, time.perf_counter() - began)
                bar.update()
        return both

    def _source(self, z: Tensor, t: float) -> Callable[[int], Tensor]:
        """Return the sources of each repeat: draws from the posterior given z, if the contestant uses them."""
        if not self.own.estimator.uses_source:
            return fixed_source(self.loaded.x.float())
        return posterior_source(self.loaded.reference, z, t, self.repeats, (self.loaded.case.seed,))

    def _generator(self, *key: int) -> torch.Generator:
        return keyed_generator("cpu", self.loaded.case.seed, *key, Stream.ESTIMATOR)

    def _certificate(self, z: Tensor, t: float, mse: float) -> dict[str, Any]:
        """Compare the estimator's own estimate of its error with the true one."""
        estimator = self.own.estimator
        if not isinstance(estimator, DrawingEstimator):
            return {}
        sources, certified = self._source(z, t)(0), []
        for number, rows in enumerate(torch.arange(len(z)).split(self.batch)):
            x = sources[rows] if estimator.uses_source else None
            certified.append(estimator.certified_mean(z[rows], t, x, self._generator(0, number)).sq_error)
        mean, spread = torch.cat(certified).mean().item(), torch.cat(certified).std().item()
        return {
            "certified_mse": mean,
            "certified_share": mean / mse if mse > 0 else float("nan"),
            "certified_spread": spread / mean if mean > 0 else float("nan"),
        }


def _times(own: list[float], plain: list[float], latents: int) -> dict[str, float]:
    """Return milliseconds per latent, and the ratios of each repeat, in which both contestants took turns."""
    ms = [1000 * seconds / latents for seconds in own]
    ratios = [a / b for a, b in zip(own, plain, strict=True)]
    times = {"ms": median(ms), "ms_low": min(ms), "ms_high": max(ms), "reference_ms": 1000 * median(plain) / latents}
    return times | {"time_ratio": median(ratios), "time_ratio_low": min(ratios), "time_ratio_high": max(ratios)}


def _known(value: Any) -> Any:
    """Write six digits; a number that is not known is empty."""
    if not isinstance(value, float):
        return value
    return "" if value != value else f"{value:.6g}"
