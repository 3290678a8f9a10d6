"""Figure 1 (fig:posterior_illustration): posterior and proposal of points on a line."""

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import prefixed
from lit_knn.estimators import KNN
from lit_knn.figures import figure1
from lit_knn.metrics.latents import checked_levels


class PosteriorPicture(Measurement):
    """At validation, draw the posterior p_t(x|z) and the proposal q_t(x|z) of data with one dimension.

    The picture has a panel for each noise level. It is written to `figure1.png` and `figure1.pdf` in the
    run's folder, and the loggers get it, too.

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
        self.levels = checked_levels(noise_levels)

    def check(self) -> None:
        """Bind the proposal to the data: it searches among their images."""
        self.knn.bind(self.reference)

    @rank_zero_only
    def evaluate(self) -> None:
        """Draw the picture on the first rank."""
        figure = figure1(self.knn, self.reference, self.z, self.levels)
        picture = self.save_figure(figure, "figure1")
        rank_zero_info(f"Posterior and proposal are in {picture}")
