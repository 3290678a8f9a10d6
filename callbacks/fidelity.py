"""Measure the fidelity of samples at each validation, such as FID and the Inception Score."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import check_at_least, prefixed
from lit_knn.common.tables import FIDELITY_CSV, undamaged_rows, write_rows
from lit_knn.metrics import FeatureExtractor, FidelityMeasure, Pixels
from lit_knn.metrics.latents import draw_samples
from lit_knn.reference import ReferenceSet
from lit_knn.runs.run import decoded


class SampledModel(Protocol):
    """The interface of a model whose samples are measured."""

    @property
    def step(self) -> int:
        """Number of optimiser steps that the weights have seen."""

    @property
    def images_seen(self) -> int:
        """Number of images that the weights have seen."""

    def sample(self, seeds: Sequence[int] | Tensor, num_steps: int | None = None) -> Tensor:
        """Draw a sample for each seed; returns (B, *shape). By default the model chooses the number of steps."""


class Fidelity(Measurement):
    """At each validation, draw samples and log how close they are to the data.

    The values are also written into `fidelity.csv`, one row for each validation. With Inception
    features they are `fid` and `inception_score`, which equal torch-fidelity's on the same images.
    The model must have `sample(seeds)`, which draws with its own number of steps, and the data module
    must have a `reference`. The seeds are always 0 to num_samples − 1, whatever the model or
    checkpoint. The ranks split them.

    Args:
        num_samples: number of samples.
        batch_size: images drawn or compared at a time, on each rank.
        extractor: maps images to the features that are compared.
        extra_metrics: any of `kid`, `precision`, `recall`, `density`, `coverage`, on the same features.
        kid_subset_size: images of each set in one of KID's 100 subsets.
        cache_dir: folder that keeps the statistics of the data for other runs; null to keep none.
        mirrored: with data that has `hflip`, also count the mirror images as data. Published values
            do not: their statistics leave out mirror images even if training uses them.
        held_out: compare with the held-out images of the data (`data.held_out`) instead of its
            training images, which copies would match perfectly. The names of the values then end in
            `_held_out`.
    """

    in_fit = True

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
        with prefixed(type(self).__name__):
            check_at_least(2, num_samples=num_samples)
            self.measure = FidelityMeasure(
                extractor,
                batch_size,
                extra_metrics,
                kid_subset_size=kid_subset_size,
                cache_dir=cache_dir,
                mirrored=mirrored,
                held_out=held_out,
            )
        self.num_samples = num_samples
        self.held_out = held_out
        self.last_values: dict[str, float] = {}

    @property
    def logged(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the values that this callback logs."""
        return self.measure.names

    def check(self) -> None:
        """Check that this number of samples can be compared with the real images."""
        self.measure.prepare(self.real(), self.num_samples)

    def evaluate(self) -> None:
        """Draw the samples, measure them, log the values and write them into the table."""
        samples = self.samples(self.module)
        self.last_values = self.measure(
            self.real(), samples, total=self.num_samples, device=self.device, bar=self.bar
        )
        self.log_values(self.last_values, shown=(self.measure.metric, "inception_score"))
        self._write()

    def samples(self, model: SampledModel, draw: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the samples in batches: seeds (B,) and decoded images.

        Args:
            model: the model that draws the samples.
            draw: number of the set of samples, from 1; each set has other seeds.
        """
        first = (draw - 1) * self.num_samples
        batches = draw_samples(model.sample, self.num_samples, self.measure.batch_size, first)
        for seeds, drawn in batches:
            yield seeds, decoded(self.trainer, drawn)

    def real(self) -> ReferenceSet:
        """Return the images that samples are compared with. If the data are latents, it is their images."""
        reference = self.real_images(self.held_out, may_be_sharded=True)
        name = "held_out_image_reference" if self.held_out else "image_reference"
        images = getattr(self.data, name, None)
        return reference if images is None else images

    @rank_zero_only
    def _write(self) -> None:
        """Write the values of this validation into `fidelity.csv`, on the first rank.

        They get a new row, or go into the row that another callback wrote at this validation.
        """
        validation = {
            "step": str(self.module.step),
            "images_seen": str(self.module.images_seen),
            "num_samples": str(self.num_samples),
            "checkpoint": str(self.trainer.ckpt_path or ""),
        }
        if self.trainer.state.fn == "fit":
            # The weights differ from those of the checkpoint that the run resumed from.
            validation["checkpoint"] = ""

        values = {}
        for name, value in self.last_values.items():
            values[name] = f"{value:.6g}"

        path = self.run_folder / FIDELITY_CSV
        rows = undamaged_rows(path)
        if not rows or not self._can_take(rows[-1], validation, values):
            rows.append(validation)
        rows[-1].update(values)
        write_rows(path, rows)

    def _can_take(
        self,
        row: dict[str, str],
        validation: dict[str, str],
        values: dict[str, str],
    ) -> bool:
        """Return whether a row is of this validation and has no other values in the columns of these.

        Args:
            row: the last row of the table.
            validation: step, images seen, number of samples and checkpoint of this validation.
            values: the measured values by name.
        """
        # A row of an earlier measurement differs in one of these.
        for name, value in validation.items():
            if row.get(name) != value:
                return False

        if row.get(self.measure.metric):
            return False

        # Another callback may have measured a value of the same name, such as `precision`, on other features.
        taken = [name for name, value in values.items() if row.get(name) not in (None, "", value)]
        return not taken


class PixelFrechetDistance(Fidelity):
    """`Fidelity` on the pixels themselves: at each validation, log `fd_pixels`, which is not FID.

    It suits small images such as the digits, and latents; it needs no weights and keeps nothing on
    disk.

    Args:
        num_samples: number of samples, with the seeds 0 to num_samples − 1.
        batch_size: samples drawn at a time, on each rank.
        held_out: compare with the held-out images of the data, and log `fd_pixels_held_out`.
    """

    def __init__(
        self, num_samples: int = 5000, batch_size: int = 500, held_out: bool = False
    ) -> None:
        super().__init__(num_samples, batch_size, Pixels(), cache_dir=None, held_out=held_out)
