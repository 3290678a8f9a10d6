"""Measures errors of estimators over noise levels and returns rows of numbers for Figure 3 (fig:estimator_perf)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lit_knn.common.distributed import own_batches
from lit_knn.common.errors import InputError, check_at_least
from lit_knn.common.progress import progress_bar
from lit_knn.common.tables import Row
from lit_knn.estimators import Estimator, Exact
from lit_knn.estimators.composite import copied_apart
from lit_knn.metrics.curve import Curve
from lit_knn.metrics.estimator_error import LatentMeans
from lit_knn.metrics.latents import NoisyLatents, bind_all, check_not_empty, checked_levels
from lit_knn.metrics.measure import (
    fixed_source,
    measure_estimator,
    posterior_source,
    quantities,
)
from lit_knn.reference import ReferenceSet


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
    """Measure estimators over noise levels; `figure3` draws the rows.

    Args:
        estimators: estimators by name. They stay bound as they are.
        reference: the images that they are bound to for the measurement.
        noise_levels: levels t.
        num_z: number of latents at each level.
        repeats: estimates of a sampling estimator at each latent.
        batch_size: latents at a time.
        seed: the first part of the key of every draw.
        resample_source: draw the source of z from the posterior in every repeat.

    Returns:
        The rows of `ErrorCurve.levels`, of all levels.
    """
    copies = {name: copied_apart(estimator) for name, estimator in estimators.items()}
    curve = ErrorCurve(
        copies,
        noise_levels,
        num_z=num_z,
        repeats=repeats,
        batch_size=batch_size,
        resample_source=resample_source,
    )

    all_rows: list[Row] = []
    with progress_bar(curve.estimates, "Estimator error", " estimates") as bar:
        for rows in curve.levels(reference, seed, bar.update):
            all_rows += rows
    return all_rows


@dataclass
class ErrorCurve(Curve):
    """A measurement of estimators at noisy latents over noise levels. `EstimatorError` explains the arguments.

    Every draw is a function of (seed, batch, level, estimator, repeat), and each batch is measured by one rank, so the
    numbers depend on `batch_size`, but not on the number of ranks.
    """

    resample_source: bool = False

    def __post_init__(self) -> None:
        check_not_empty(estimators=self.estimators)
        # A bad level is refused before the first is measured.
        self.noise_levels = checked_levels(self.noise_levels)
        check_at_least(1, num_z=self.num_z, repeats=self.repeats, batch_size=self.batch_size)

        for name, estimator in self.estimators.items():
            if self.repeats < 2 and not self.is_deterministic(estimator):
                reason = f"to tell the variance of {name}"
                raise InputError(f"repeats must be at least 2 {reason}, got 1")

    def check(self, reference: ReferenceSet) -> None:
        """Refuse a set with fewer images than latents."""
        if self.num_z > reference.N:
            images = f"the {reference.N} images of the reference set"
            if reference.hflip:
                images += ", mirror images counted"
            raise InputError(f"num_z={self.num_z} is more than {images}")

    def levels(
        self,
        reference: ReferenceSet,
        seed: int = 0,
        advance: Callable[[int], object] = lambda estimates: None,
    ) -> Iterator[list[Row]]:
        """Measure level by level. All ranks must call it; they split the latents and get the same rows.

        Args:
            reference: the images that the estimators are bound to.
            seed: the first part of the key of every draw.
            advance: called with the number of estimates after each batch.

        Yields:
            The rows of a noise level, one for each estimator. Columns are means over the latents: MSE, squared bias
            (plain, and corrected for the finite number of repeats) and variance per dimension, for the posterior mean
            (`mu_`) and the score (`score_`), with standard errors over the latents (`_se`); `bias_share`, the corrected
            squared bias as a share of the MSE; for sampling estimators the effective sample size, the largest weight
            and their own estimate of their MSE (`certified_mse`); for KNN the search recall, the posterior mass found,
            Z_q / p_t, and both sides of Theorems 4.1 and 4.2, divided by d. Quantities that an estimator lacks are "".
        """
        self.check(reference)
        by_option = {f"estimators.{name}": self.estimators[name] for name in self.estimators}
        bind_all(by_option, reference, max(self.noise_levels), source=True)

        latents = NoisyLatents(reference, self.num_z, seed)
        for level, t in enumerate(self.noise_levels):
            sums = self._measure_level(latents, level, advance)
            rows = []
            for name, of_estimator in zip(self.estimators, sums, strict=True):
                rows.append(self.row(name, t, of_estimator))
            yield rows

    def _measure_level(
        self, latents: NoisyLatents, level: int, advance: Callable[[int], object]
    ) -> list[LatentMeans]:
        """Measure all estimators at this rank's latents of one level; return their sums."""
        t = self.noise_levels[level]
        reference = latents.reference
        exact = Exact().bind(reference)

        cases = [(estimator, self.repeats_of(estimator)) for estimator in self.estimators.values()]
        most_repeats = max(repeats for _, repeats in cases)
        sums = [
            LatentMeans(quantities(estimator, repeats)).to(reference.device)
            for estimator, repeats in cases
        ]

        for batch, numbers in own_batches(self.num_z, self.batch_size):
            z, x = latents.batch(numbers, t)
            mu = exact.posterior_mean(z.double(), t)
            key = latents.seed, batch, level
            if self.resample_source:
                source = posterior_source(reference, z, t, repeats=most_repeats, key=key)
            else:
                source = fixed_source(x)

            for index, (estimator, repeats) in enumerate(cases):
                values = measure_estimator(
                    estimator, repeats, z, t, mu=mu, source=source, key=(*key, index)
                )
                sums[index].update(**values)
                advance(len(z) * repeats)
        return sums

    def is_deterministic(self, estimator: Estimator) -> bool:
        """Return whether all estimates at a latent are the same, also in view of the sources of z."""
        return estimator.deterministic and not (estimator.uses_source and self.resample_source)
