"""Measure the fidelity of samples to the data, such as FID and the Inception Score, at each validation."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytorch_lightning as pl
from torch import Tensor

from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.tables import FIDELITY_CSV, keep_aside, read_rows, write_rows
from lit_knn.metrics import FeatureExtractor, FidelityMeasure, InceptionV3
from lit_knn.metrics.samples import draw_samples
from lit_knn.reference import ReferenceSet
from lit_knn.runs.run import decoded, image_reference, measuring_bar


class Fidelity(pl.Callback):
    """At each validation, draw samples, log how close they are to the data, and add a row to `fidelity.csv`.

    With Inception features it logs `fid` and `inception_score`, which equal torch-fidelity's on the same images. The
    model must have `sample(seeds)`, which draws with its own number of steps; the data module a `reference`. The seeds
    are always 0 to num_samples − 1, whatever the model or checkpoint. The ranks split them.

    Args:
        num_samples: number of samples.
        batch_size: images drawn or compared at a time, on each rank.
        extractor: maps images to the features that are compared.
        extra_metrics: any of `kid`, `precision`, `recall`, on the same features.
        kid_subset_size: images of each set in one of KID's 100 subsets.
        cache_dir: folder that keeps the statistics of the data for other runs; null to keep none.
        mirrored: with data that has `hflip`, also count the mirror images as data. Published values do not: their
            statistics leave out mirror images even if training uses them.
        held_out: compare with the held-out images of the data (`data.held_out`) instead of its training images, which
            copies would match perfectly. The names of the values then end in `_held_out`.

    Raises:
        InputError: an option out of its range; at `setup`, weights, a package or images are missing or wrong, or no
            images are held out.
    """

    def __init__(
        self,
        num_samples: int = 50_000,
        batch_size: int = 128,
        extractor: FeatureExtractor | None = None,
        extra_metrics: Sequence[str] = (),
        kid_subset_size: int = 1000,
        cache_dir: str | None = "runs/fidelity_cache",
        mirrored: bool = False,
        held_out: bool = False,
    ) -> None:
        name = type(self).__name__
        if num_samples < 2:
            raise InputError(f"{name}: num_samples must be at least 2, got {num_samples}")
        self.num_samples = num_samples
        self.held_out = held_out
        with prefixed(name):
            extractor = InceptionV3() if extractor is None else extractor
            options = (extra_metrics, kid_subset_size, cache_dir, mirrored, held_out)
            self.measure = FidelityMeasure(extractor, batch_size, *options)
        self.last_values: dict[str, float] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Load the extractor, and report missing parts before any sampling or training."""
        if stage in ("fit", "validate"):
            self.measure.prepare(self._reference(trainer), self.num_samples)
            on_first_rank(partial(_check_table, trainer.log_dir))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw one sample before the hours of a validation, so that a model that cannot sample fails at once."""
        if not trainer.sanity_checking:
            pl_module.sample(range(1))  # type: ignore[operator]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sample with the averaged weights. They stay in the network until the EMA callback runs."""
        log_dir = trainer.log_dir  # Every rank must read `log_dir`, because reading it is a collective operation.
        if trainer.sanity_checking:
            return
        device, bar = trainer.strategy.root_device, partial(measuring_bar, trainer)
        samples = ((seeds, decoded(trainer, drawn)) for seeds, drawn in self.samples(pl_module))
        values = self.measure(self._reference(trainer), samples, self.num_samples, device, bar)
        self.last_values = values
        for name, value in values.items():
            # Every rank logs the shared value, so that every rank can monitor it. Loggers show it beside the samples.
            shown = name in (self.measure.metric, "inception_score")
            pl_module.log(name, value, prog_bar=shown, rank_zero_only=True, logger=False)
            pl_module.log(f"samples/{name}", value, rank_zero_only=True)
        if trainer.is_global_zero and log_dir is not None:
            self._write(trainer, pl_module, Path(log_dir) / FIDELITY_CSV)

    def _reference(self, trainer: pl.Trainer) -> ReferenceSet:
        return image_reference(type(self).__name__, trainer, self.held_out, may_be_sharded=True)

    def samples(self, pl_module: pl.LightningModule) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the samples: seeds (B,) and images (B, *shape)."""
        return draw_samples(pl_module.sample, self.num_samples, self.measure.batch_size)  # type: ignore[arg-type]

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule, path: Path) -> None:
        """Add a row, or add columns to the row that another callback wrote at this validation."""
        point = {
            "step": str(pl_module.step),
            "images_seen": str(pl_module.images_seen),
            "num_samples": str(self.num_samples),
            # In training, the weights differ from those of the checkpoint that the run resumed from.
            "checkpoint": "" if trainer.state.fn == "fit" else str(trainer.ckpt_path or ""),
        }
        rows = read_rows(path) if path.exists() else []
        # The last row must be from this validation, not from an earlier measurement.
        fits = rows and all(rows[-1].get(name) == value for name, value in point.items())
        if not fits or rows[-1].get(self.measure.metric):
            rows.append(point)
        rows[-1] |= {name: f"{value:.6g}" for name, value in self.last_values.items()}
        write_rows(path, rows)


def _check_table(log_dir: str | None) -> None:
    """Rename a damaged table of an earlier run now, not after hours of sampling."""
    path = Path(log_dir or "") / FIDELITY_CSV
    if log_dir is not None and path.exists():
        try:
            read_rows(path)
        except InputError as error:
            keep_aside(path, str(error))
