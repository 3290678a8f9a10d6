"""Figure 1 (fig:posterior_illustration): the posterior and the nearest-neighbour proposal of points on a line."""

from pytorch_lightning.utilities import rank_zero_info

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import InputError, prefixed
from lit_knn.estimators import KNN
from lit_knn.figures import figure1
from lit_knn.metrics.latents import noise_grid


class PosteriorPicture(Measurement):
    """At validation, draw the posterior p_t(x|z) and the proposal q_t(x|z) of a one-dimensional data set.

    Each noise level has a panel; the files are `figure1.png` and `.pdf` in the run's folder, and TensorBoard.

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
        if self.reference.d != 1:
            raise InputError(f"the data must have one dimension, it has {self.reference.d}")
        self.knn.bind(self.reference)

    def evaluate(self) -> None:
        if self.is_first:
            picture = self.save_figure(
                figure1(self.knn, self.reference, self.z, self.levels), "figure1"
            )
            rank_zero_info(f"Posterior and proposal are in {picture}")
