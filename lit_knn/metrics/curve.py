"""The base of the measurements of estimators over noise levels: the number of estimates, and the rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lit_knn.common.distributed import own_batches
from lit_knn.common.tables import Row
from lit_knn.estimators import Estimator
from lit_knn.metrics.error_columns import columns_of
from lit_knn.metrics.estimator_error import LatentMeans


@dataclass
class Curve:
    """Estimators that are measured at latents of some noise levels; `EstimatorError` explains the fields."""

    estimators: Mapping[str, Estimator]
    noise_levels: Sequence[float]
    num_z: int
    repeats: int
    batch_size: int

    @property
    def estimates(self) -> int:
        """Number of measured estimates of this rank over all noise levels."""
        latents = 0
        for _, numbers in own_batches(self.num_z, self.batch_size):
            latents += len(numbers)

        repeats = 0
        for estimator in self.estimators.values():
            repeats += self.repeats_of(estimator)
        return latents * len(self.noise_levels) * repeats

    def repeats_of(self, estimator: Estimator) -> int:
        """Return the number of estimates at each latent: one is enough if all would be the same."""
        return 1 if self.is_deterministic(estimator) else self.repeats

    def is_deterministic(self, estimator: Estimator) -> bool:
        """Return whether all estimates at a latent are the same."""
        return estimator.deterministic

    def row(self, name: str, t: float, sums: LatentMeans) -> Row:
        """Return the row of an estimator at a noise level. All ranks must call it, which adds up their sums.

        Args:
            name: name of the estimator.
            t: the noise level.
            sums: of this rank's latents.
        """
        repeats = self.repeats_of(self.estimators[name])
        first: Row = {"estimator": name, "t": t, "num_z": self.num_z, "repeats": repeats}
        return first | columns_of(sums.compute(), t)
