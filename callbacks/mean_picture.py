"""Figure 2 (fig:denoiser_viz): the posterior mean and its estimates over noise levels."""

from collections.abc import Mapping

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import InputError, check_at_least, prefixed
from lit_knn.common.pixels import are_pictures
from lit_knn.estimators import Estimator
from lit_knn.figures import figure2
from lit_knn.metrics.latents import check_not_empty, levels_of
from lit_knn.metrics.mean_pictures import mean_pictures


class MeanPicture(Measurement):
    """At validation, draw pictures of the noisy z, of the exact posterior mean, and of its estimates.

    A picture shows one image of the data, which must have 1 or 3 channels. Its rows are z, the exact
    mean and each estimator's mean, and its columns are the noise levels. The pictures of the
    `num_images` images are `figure2_0.png`, `figure2_0.pdf` and so on in the run's folder; the loggers
    get them, too. The z of all columns have the same noise, and are shown divided by sqrt(1 + t²).

    Args:
        estimators: the estimators by name, in the order of the rows.
        noise_levels: the levels of the columns; or their number, for levels evenly spaced in ln t
            from `t_min` to `t_max`.
        t_min: smallest level, if `noise_levels` is a number.
        t_max: largest level, if `noise_levels` is a number.
        num_images: number of pictures.
    """

    @prefixed("MeanPicture")
    def __init__(
        self,
        estimators: dict[str, Estimator],
        noise_levels: list[float] | int = 10,
        t_min: float = 0.2,
        t_max: float = 80.0,
        num_images: int = 2,
    ) -> None:
        check_not_empty(estimators=estimators)
        check_at_least(1, num_images=num_images)
        self.levels = levels_of(noise_levels, t_min, t_max)
        self.estimators = estimators
        self.num_images = num_images
        self.outputs = [f"figure2_{i}.png" for i in range(num_images)]

    def check(self) -> None:
        """Check that the data are pictures."""
        shape = self.reference.shape
        if not are_pictures(shape):
            raise InputError(f"the data must be images of 1 or 3 channels, not {shape}")

    def evaluate(self) -> None:
        """Compute the rows of all pictures, and draw them on the first rank."""
        # Every rank computes them, because one rank builds a cached index for all ranks.
        rows = mean_pictures(
            self.estimators, self.reference, self.levels, self.num_images, self.seed
        )
        self._draw(rows)

    @rank_zero_only
    def _draw(self, rows: Mapping[str, Tensor]) -> None:
        """Draw a picture for each image of the data.

        Args:
            rows: by the name of each row, the images (levels, num_images, *shape).
        """
        for i in range(self.num_images):
            rows_of_image = {name: images[:, i] for name, images in rows.items()}
            figure = figure2(rows_of_image, self.levels)
            path = self.save_figure(figure, f"figure2_{i}", f"figure2/{i}")
            rank_zero_info(f"Posterior means are in {path}")
