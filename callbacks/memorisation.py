"""Find samples that are copies of training images."""

from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import check_at_least, prefixed
from lit_knn.common.pixels import are_pictures
from lit_knn.figures.image_grid import pair_grid
from lit_knn.metrics import nearest_images
from lit_knn.metrics.latents import draw_samples
from lit_knn.metrics.memorisation import LikestPairs, MemorisationMetric, check_search


class Memorisation(Measurement):
    """At each validation, log `copied_fraction` and `mean_nearest_distance` of samples, and draw the likest pairs.

    A sample counts as a copy by the ratio test: it is nearer to one training image than `threshold`
    times its distance to any other. With `hflip` mirror images are training images, too. The picture in
    the run's folder has rows of samples, each above a row of their nearest training images; the pairs
    with the smallest ratios come first. The model must have `sample(seeds)` and `step`, and the data
    module must have a `reference`.

    Args:
        num_samples: number of samples, with the seeds 0 to num_samples − 1, split over the ranks by
            batches.
        batch_size: samples drawn at a time, on each rank.
        threshold: largest ratio of nearest to second nearest distance at which a sample is a copy.
        num_pairs: pairs in the picture; 0 for none.
    """

    in_fit = True

    @prefixed("Memorisation")
    def __init__(
        self,
        num_samples: int = 1000,
        batch_size: int = 500,
        threshold: float = 1 / 3,
        num_pairs: int = 32,
    ) -> None:
        check_at_least(1, num_samples=num_samples, batch_size=batch_size)
        check_at_least(0, num_pairs=num_pairs)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.num_pairs = num_pairs
        self.metric = MemorisationMetric(threshold)
        self.logged = self.metric.names

    def check(self) -> None:
        """Check that the nearest images of the data can be searched."""
        check_search(self.reference.to(self.device))

    def evaluate(self) -> None:
        """Measure the samples, log the values, and draw the likest pairs."""
        reference = self.reference
        self.metric.to(reference.device).reset()
        likest = LikestPairs(self.num_pairs, reference)

        share = self.num_samples // self.trainer.world_size
        batches = draw_samples(self.module.sample, self.num_samples, self.batch_size)
        with self.bar(share, "Memorisation", " samples") as bar:
            for seeds, samples in batches:
                nearest = nearest_images(samples, reference)
                self.metric.update(nearest)
                likest.update(samples, nearest)
                bar.update(len(seeds))
        self.log_values(self.metric.compute())

        samples, ids = likest.compute()  # Every rank calls this, because the ranks exchange pairs.
        if len(ids) and are_pictures(reference.shape):
            self._draw(samples, reference.gather(ids))

    @rank_zero_only
    def _draw(self, samples: Tensor, images: Tensor) -> None:
        """Write a picture of samples, (P, C, H, W), and the images nearest to them, of the same shape."""
        step = int(self.module.step)
        path = self.run_folder / "memorisation" / f"step_{step:07d}.png"
        self.save_picture(pair_grid(samples, images), path, "samples/memorisation", step)
