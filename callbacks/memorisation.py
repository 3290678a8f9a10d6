"""Find samples that are copies of training images."""

from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.pixels import are_pictures
from lit_knn.figures import pair_grid
from lit_knn.metrics import nearest_images
from lit_knn.metrics.memorisation import LikestPairs, MemorisationMetric, check_search
from lit_knn.metrics.samples import draw_samples
from lit_knn.runs.pictures import save_picture
from lit_knn.runs.run import data_reference, measuring_bar


class Memorisation(pl.Callback):
    """At each validation, log `copied_fraction` and `mean_nearest_distance` of samples, and show the likest pairs.

    In the ratio test, a sample is a copy if it is nearer to one training image than `threshold` times its distance to
    any other. The model must have `sample(seeds)` and `step`, the data module a `reference`. The picture in the run's
    folder has rows of samples, each above a row of their nearest training images; the smallest ratio comes first. With
    `hflip` mirror images are training images, too.

    Args:
        num_samples: number of samples, with the seeds 0 to num_samples − 1, split over the ranks by batches.
        batch_size: samples drawn at a time, on each rank.
        threshold: largest ratio of nearest to second nearest distance at which a sample is a copy.
        num_pairs: pairs in the picture; 0 for none.

    Raises:
        InputError: num_samples or batch_size < 1, num_pairs < 0, threshold outside (0, 1]; at `setup`, data without a
            reference set, or a search that finds fewer than two images.
    """

    def __init__(
        self, num_samples: int = 1000, batch_size: int = 500, threshold: float = 1 / 3, num_pairs: int = 32
    ) -> None:
        if num_samples < 1 or batch_size < 1 or num_pairs < 0:
            raise InputError(
                f"Memorisation: num_samples={num_samples} and batch_size={batch_size} must be at least 1, "
                f"num_pairs={num_pairs} at least 0"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.num_pairs = num_pairs
        self.metric = MemorisationMetric(threshold)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Search for one image, so that a search that cannot detect copies fails before any long work."""
        if stage in ("fit", "validate"):
            check_search(data_reference("Memorisation", trainer).to(trainer.strategy.root_device))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sample with the averaged weights. They stay in the network until the EMA callback runs."""
        log_dir = trainer.log_dir  # Every rank must read `log_dir`, because reading it is a collective operation.
        if trainer.sanity_checking:
            return
        reference = data_reference("Memorisation", trainer)
        self.metric.to(reference.device).reset()
        likest = LikestPairs(self.num_pairs, reference)
        share = self.num_samples // trainer.world_size
        sample: Callable[[Tensor], Tensor] = pl_module.sample  # type: ignore[assignment]
        with measuring_bar(trainer, share, "Memorisation", " samples") as bar:
            for seeds, samples in draw_samples(sample, self.num_samples, self.batch_size):
                nearest = nearest_images(samples, reference)
                self.metric.update(nearest)
                likest.update(samples, nearest)
                bar.update(len(seeds))
        for name, value in self.metric.compute().items():
            pl_module.log(name, value, rank_zero_only=True, logger=False)  # for callbacks that monitor it
            pl_module.log(f"samples/{name}", value, rank_zero_only=True)
        samples, ids = likest.compute()  # Every rank calls this, because the ranks exchange pairs.
        if trainer.is_global_zero and log_dir is not None and len(ids) and are_pictures(reference.shape):
            step = int(pl_module.step)  # type: ignore[arg-type]
            picture = pair_grid(samples, reference.gather(ids))
            save_picture(
                trainer, picture, Path(log_dir) / "memorisation" / f"step_{step:07d}.png", "samples/memorisation", step
            )
