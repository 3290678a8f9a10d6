"""How many samples are copies of training images, and which."""

from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torchvision.utils import save_image

from lit_knn.atomic_files import written_whole
from lit_knn.errors import InputError
from lit_knn.figures import image_grid
from lit_knn.metrics import MemorisationMetric, NearestImages, nearest_images
from lit_knn.reference import ReferenceSet
from lit_knn.training.run import data_reference, measuring_bar

PAIRS_PER_ROW = 8


class Memorisation(pl.Callback):
    """At each validation, log `copied_fraction` and `mean_nearest_distance` of samples, and show the likest pairs.

    The ratio test: a sample is a copy if it is nearer to one training image than `threshold` times to any other one.
    The model must have `sample(seeds)` and `step`, the data module a `reference`. The picture, in the run's folder, has
    pairs of rows: samples, and under each its nearest training image; the smallest ratio first. With `hflip` mirror
    images are training images, too.

    Args:
        num_samples: samples drawn, with the seeds 0 to num_samples − 1, split over the ranks by batches.
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
        """Search for one image, so that a search that cannot tell copies is found out before anything long."""
        if stage in ("fit", "validate"):
            reference = data_reference("Memorisation", trainer).to(trainer.strategy.root_device)
            one = reference.gather(torch.tensor([0], device=reference.device))
            nearest_images(one, reference.search, reference.gather, reference.N)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sample with the averaged weights, which are in place until the EMA callback's turn."""
        log_dir = trainer.log_dir  # a collective: every rank must ask
        if trainer.sanity_checking:
            return
        reference = data_reference("Memorisation", trainer)
        self.metric.to(reference.device).reset()
        likest = _Likest(self.num_pairs, reference)
        batches = torch.arange(self.num_samples).split(self.batch_size)
        share = self.num_samples // trainer.world_size
        with measuring_bar(trainer, share, "Memorisation", " samples") as bar:
            for batch in batches[trainer.global_rank :: trainer.world_size]:
                samples = pl_module.sample(batch)  # type: ignore[operator]
                nearest = nearest_images(samples, reference.search, reference.gather, reference.N)
                self.metric.update(nearest)
                likest.add(samples, nearest)
                bar.update(len(batch))
        pl_module.log_dict(self.metric.compute(), rank_zero_only=True)
        likest.gather(trainer)
        if trainer.is_global_zero and log_dir is not None:
            step = int(pl_module.step)  # type: ignore[arg-type]
            _save_picture(likest, trainer, Path(log_dir) / "memorisation", step)


class _Likest:
    """The samples with the smallest ratios, and their nearest images."""

    def __init__(self, number: int, reference: ReferenceSet) -> None:
        self.reference = reference
        # Full from the start, so that all ranks have the same shapes to exchange.
        self.ratio = torch.full((number,), torch.inf, dtype=torch.float64, device=reference.device)
        self.samples = torch.zeros(number, *reference.shape, device=reference.device)
        self.ids = torch.zeros(number, dtype=torch.int64, device=reference.device)

    def add(self, samples: Tensor, nearest: NearestImages) -> None:
        """Compare a batch with the likest so far."""
        self._keep(
            torch.cat([self.ratio, nearest.ratio]),
            torch.cat([self.samples, samples]),
            torch.cat([self.ids, nearest.ids]),
        )

    def gather(self, trainer: pl.Trainer) -> None:
        """Compare those of all ranks; a collective."""
        if trainer.world_size > 1:
            parts = (trainer.strategy.all_gather(part) for part in (self.ratio, self.samples, self.ids))
            self._keep(*(part.flatten(0, 1) for part in parts))

    def _keep(self, ratio: Tensor, samples: Tensor, ids: Tensor) -> None:
        # Stable, so that ties do not depend on the number of ranks more than they must.
        order = ratio.sort(stable=True).indices[: len(self.ratio)]
        self.ratio, self.samples, self.ids = ratio[order], samples[order], ids[order]

    def picture(self) -> Tensor | None:
        """Pairs of rows, or None where there is nothing to show."""
        found = int(self.ratio.isfinite().sum())
        if found == 0 or len(self.reference.shape) != 3 or self.reference.shape[0] not in (1, 3):
            return None
        sources = self.reference.gather(self.ids[:found])
        rows = zip(self.samples[:found].split(PAIRS_PER_ROW), sources.split(PAIRS_PER_ROW), strict=True)
        columns = min(found, PAIRS_PER_ROW)
        return torch.cat(
            [image_grid(torch.cat([_filled(a, columns), _filled(b, columns)]), columns) for a, b in rows], 1
        )


def _filled(images: Tensor, columns: int) -> Tensor:
    """A row of `columns` images, white at the end."""
    white = images.new_ones(columns - len(images), *images.shape[1:])
    return torch.cat([images, white])


def _save_picture(likest: _Likest, trainer: pl.Trainer, folder: Path, step: int) -> None:
    picture = likest.picture()
    if picture is None:
        return
    with written_whole(folder / f"step_{step:07d}.png") as partial:
        save_image(picture, partial)
    if isinstance(trainer.logger, TensorBoardLogger):
        trainer.logger.experiment.add_image("memorisation", picture, step)
