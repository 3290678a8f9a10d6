"""Figure 1 (fig:posterior_illustration): posterior and proposal of points on a line."""

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import prefixed
from lit_knn.estimators import KNN
from lit_knn.figures import figure1
from lit_knn.metrics.latents import noise_grid


class PosteriorPicture(Measurement):
    """At validation, draw the posterior p_t(x|z) and the proposal q_t(x|z).

    The data set has one dimension. Each noise level has a panel; the files are `figure1.png` and
    `.pdf` in the run's folder, and TensorBoard.

    Args:
        k: number of neighbours of the proposal.
        z: the latent, one number.
        noise_levels: noise levels of the panels.
    """

    outputs = ("figure1.png",)

    @prefixed("PosteriorPicture")
    def __init__(
        self, k: int = 8, z: float = 0.12, noise_levels: tuple[float, ...] = (0.02, 0.2, 3.0)
    ) -> None:
        self.knn = KNN(k=k, n=1)
        self.z = float(z)
        self.levels = noise_grid(noise_levels, 0, 0)

    def check(self) -> None:
        """Bind the proposal to the data, which must have one dimension."""
        self.knn.bind(self.reference)

    @rank_zero_only
    def evaluate(self) -> None:
        """Draw the picture on the first rank."""
        figure = figure1(self.knn, self.reference, self.z, self.levels)
        picture = self.save_figure(figure, "figure1")
        rank_zero_info(f"Posterior and proposal are in {picture}")
