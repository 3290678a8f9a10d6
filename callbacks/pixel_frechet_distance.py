"""Measure the Fréchet distance on pixels at each validation."""

from lit_knn.callbacks.fidelity import Fidelity
from lit_knn.metrics import Pixels


class PixelFrechetDistance(Fidelity):
    """`Fidelity` on the pixels themselves: at each validation, log `fd_pixels`, which is not FID.

    It suits small images such as the digits, and latents; it needs no weights and keeps nothing on disk.

    Args:
        num_samples: number of samples, with the seeds 0 to num_samples − 1.
        batch_size: samples drawn at a time, on each rank.
        held_out: compare with the held-out images of the data, and log `fd_pixels_held_out`.
    """

    def __init__(self, num_samples: int = 5000, batch_size: int = 500, held_out: bool = False) -> None:
        super().__init__(num_samples, batch_size, Pixels(), cache_dir=None, held_out=held_out)
