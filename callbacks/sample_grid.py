"""Write pictures of samples during training."""

from pathlib import Path

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import check_at_least, prefixed
from lit_knn.figures import captioned, sample_picture
from lit_knn.modules.base import EstimatorTraining
from lit_knn.runs.run import decoded


class SampleGrid(Measurement):
    """At each validation, draw samples of fixed seeds, and write a picture of them, which the loggers get, too.

    Images of 1 or 3 channels become a grid; latents are decoded first if the data have an autoencoder.
    Points, of shape (2,), become a scatter plot, and series, of shape (1, L), become lines. Samples of
    other shapes get no picture. The model must have `sample(seeds, num_steps)` and `step`.

    Args:
        num_samples: samples in a picture; the seeds are 0 to num_samples − 1.
        num_steps: numbers of sampling steps; each gives one picture. null stands for the number
            that the model or its sampler has.
    """

    in_fit = True

    @prefixed("SampleGrid")
    def __init__(self, num_samples: int = 64, num_steps: tuple[int | None, ...] = (1, 2)) -> None:
        check_at_least(1, num_samples=num_samples)
        self.num_samples = num_samples
        self.num_steps = tuple(num_steps)
        self.last_paths: list[Path] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check before the long training that the model can sample with these numbers of steps."""
        if not isinstance(pl_module, EstimatorTraining) or pl_module.image_shape is None:
            return

        model = pl_module.generative_model()
        for steps in self.num_steps:
            with prefixed("SampleGrid"):
                model.check_steps(model.num_steps if steps is None else steps)

    @rank_zero_only
    def evaluate(self) -> None:
        """Write a picture of samples for each number of steps, on the first rank."""
        self.last_paths = []
        for steps in self.num_steps:
            images = decoded(self.trainer, self.module.sample(range(self.num_samples), steps))
            picture = sample_picture(images)
            if picture is None:
                shape = tuple(images.shape[1:])
                rank_zero_warn(f"SampleGrid draws nothing of samples of shape {shape}")
                return

            name = "default" if steps is None else f"{steps}-step"
            path = self.run_folder / "samples" / f"step_{self.module.step:07d}_{name}.png"
            picture = captioned(picture, f"{len(images):,} samples, step {self.module.step:,}")
            self.save_picture(picture, path, f"samples/{name}", int(self.module.step))
            self.last_paths.append(path)
