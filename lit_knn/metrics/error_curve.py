"""Measures errors of estimators over noise levels and returns rows of numbers for Figure 3 (fig:estimator_perf)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_knn.common.distributed import own_batches
from lit_knn.common.errors import InputError, check_at_least
from lit_knn.common.progress import progress_bar
from lit_knn.estimators import Estimator, Exact
from lit_knn.estimators.by_class import copied_apart
from lit_knn.metrics.estimator_error import LatentMeans, MeanAndError, bias_share
from lit_knn.metrics.latents import NoisyLatents, bind_all, check_not_empty, noise_grid
from lit_knn.metrics.measure import (
    CERTIFIED,
    TIME,
    fixed_source,
    measure,
    posterior_source,
    quantities,
)
from lit_knn.reference import ReferenceSet

Row = dict[str, Any]
ERRORS = ("mse", "bias_sq", "bias_sq_corrected", "variance")
# Columns of the quantities that `measure` returns besides the errors.
COLUMNS = {
    **{name: name for name in CERTIFIED},
    "recall": "search_recall",
    "found_mass": "posterior_mass_found",
    "normaliser_ratio": "Zq_over_pt",
    "eq12_variance": "eq12_variance",
    "bound_4_1": "theorem_4_1_bound",
    "bound_4_2": "theorem_4_2_bound",
    TIME: TIME,
}


def error_curve(
    estimators: Mapping[str, Estimator],
    reference: ReferenceSet,
    noise_levels: Sequence[float],
    *,
    num_z: int = 10_000,
    repeats: int = 100,
    batch_size: int = 128,
    seed: int = 0,
    resample_source: bool = False,
) -> list[Row]:
    """Measure estimators over noise levels as `ErrorCurve` says; return the rows, which `figure3` draws."""
    # The caller's stay bound.
    own = {name: copied_apart(estimator) for name, estimator in estimators.items()}
    curve = ErrorCurve(own, noise_levels, num_z, repeats, batch_size, resample_source)
    with progress_bar(curve.estimates, "Estimator error", " estimates") as bar:
        return [row for rows in curve.levels(reference, seed, bar.update) for row in rows]


@dataclass
class ErrorCurve:
    """A measurement of estimators at noisy latents over noise levels. `EstimatorError` explains the arguments.

    Every draw is a function of (seed, batch, level, estimator, repeat), and ranks share whole batches: the numbers
    depend on `batch_size`, but not on the number of ranks.
    """

    estimators: Mapping[str, Estimator]
    noise_levels: Sequence[float]
    num_z: int
    repeats: int
    batch_size: int
    resample_source: bool = False

    def __post_init__(self) -> None:
        check_not_empty(estimators=self.estimators)
        # A bad one is found before the first.
        self.noise_levels = noise_grid(list(self.noise_levels), 0.0, 0.0)
        check_at_least(1, num_z=self.num_z, repeats=self.repeats, batch_size=self.batch_size)
        drawn = [
            name
            for name, estimator in self.estimators.items()
            if not self._is_deterministic(estimator)
        ]
        if drawn and self.repeats < 2:
            raise InputError(
                f"repeats must be at least 2 to tell the variance of {drawn[0]}, got 1"
            )

    @property
    def estimates(self) -> int:
        """Number of estimates on this rank."""
        latents = sum(len(numbers) for _, numbers in own_batches(self.num_z, self.batch_size))
        return latents * len(self.noise_levels) * sum(map(self._repeats, self.estimators.values()))

    def check(self, reference: ReferenceSet) -> None:
        """Refuse a set with fewer images than latents."""
        if self.num_z > reference.N:
            raise InputError(
                f"num_z={self.num_z} is more than the {reference.N} images of the reference set"
            )

    def levels(
        self,
        reference: ReferenceSet,
        seed: int = 0,
        advance: Callable[[int], Any] = lambda estimates: None,
    ) -> Iterator[list[Row]]:
        """Measure level by level. All ranks must call it; they split the latents and get the same rows.

        The estimators are bound to `reference`; `seed` is the first part of the key of every draw; `advance` is called
        with the number of estimates after each batch.

        Yields:
            The rows of a noise level, one for each estimator. Columns are means over the latents: MSE, squared bias
            (plain, and corrected for the finite number of repeats) and variance per dimension, for the posterior mean
            (`mu_`) and the score (`score_`), with standard errors over the latents (`_se`); `bias_share`, the corrected
            squared bias as a share of the MSE; for sampling estimators the effective sample size, the largest weight
            and their own estimate of their MSE (`certified_mse`); for KNN the search recall, the posterior mass found,
            Z_q / p_t, and both sides of Theorems 4.1 and 4.2, divided by d. Quantities that an estimator lacks are "".
        """
        self.check(reference)
        named = {f"estimators.{name}": own for name, own in self.estimators.items()}
        bind_all(named, reference, max(self.noise_levels), source=True)
        latents = NoisyLatents(reference, self.num_z, seed)
        for level, t in enumerate(self.noise_levels):
            means = self._measure_level(latents, level, advance)
            # Every rank must call `compute`, because it adds up the sums of all ranks.
            yield [
                self._row(name, t, mean.compute())
                for name, mean in zip(self.estimators, means, strict=True)
            ]

    def _measure_level(
        self, latents: NoisyLatents, level: int, advance: Callable[[int], Any]
    ) -> list[LatentMeans]:
        t, reference = self.noise_levels[level], latents.reference
        exact = Exact().bind(reference)
        cases = [(estimator, self._repeats(estimator)) for estimator in self.estimators.values()]
        means = [LatentMeans(quantities(*case)).to(reference.device) for case in cases]
        for batch, numbers in own_batches(self.num_z, self.batch_size):
            z, x = latents.batch(numbers, t)
            mu = exact.posterior_mean(z.double(), t)
            source, key = fixed_source(x), (latents.seed, batch, level)
            if self.resample_source:
                source = posterior_source(
                    reference, z, t, max(repeats for _, repeats in cases), key
                )
            for index, (estimator, repeats) in enumerate(cases):
                means[index].update(**measure(estimator, repeats, z, t, mu, source, (*key, index)))
                advance(len(z) * repeats)
        return means

    def _repeats(self, estimator: Estimator) -> int:
        return 1 if self._is_deterministic(estimator) else self.repeats

    def _is_deterministic(self, estimator: Estimator) -> bool:
        return estimator.deterministic and not (estimator.uses_source and self.resample_source)

    def _row(self, name: str, t: float, means: dict[str, MeanAndError]) -> Row:
        row: Row = {
            "estimator": name,
            "t": t,
            "num_z": self.num_z,
            "repeats": self._repeats(self.estimators[name]),
        }
        for prefix, scale in (("mu", 1.0), ("score", t**-4)):
            for error in ERRORS:
                known = means.get(error)
                row[f"{prefix}_{error}"] = "" if known is None else known.mean * scale
                row[f"{prefix}_{error}_se"] = "" if known is None else known.standard_error * scale
        row["bias_share"], row["bias_share_se"] = "", ""
        if "variance" in means and means["mse"].mean > 0:
            share = bias_share(means["mse"], means["bias_sq_corrected"], means["variance"])
            row["bias_share"], row["bias_share_se"] = share
        return {
            **row,
            **{
                column: means[name].mean if name in means else ""
                for name, column in COLUMNS.items()
            },
        }
