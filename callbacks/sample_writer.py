"""Write the samples of `predict` as PNG files or one .npz file, and a picture of the first."""

import os
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from pytorch_lightning.callbacks import BasePredictionWriter
from torch import Tensor
from torchvision.utils import save_image

from lit_knn.callbacks.sample_files import (
    GRID_SAMPLES,
    picture_of_first,
    write_classes,
    write_npz,
    write_pngs,
)
from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.common.pixels import are_pictures, to_uint8
from lit_knn.modules.conditioning import Conditioning
from lit_knn.runs.names import expanded
from lit_knn.runs.run import decoded

GRID_ENDING = "grid.png"


class SampleWriter(BasePredictionWriter):
    """Write the samples of `predict` batch by batch, and a picture of the first ones.

    The folder holds no other picture, so that other programs can measure it. The picture is
    beside it, in `FOLDER_grid.png`: a grid of images, a scatter plot of points (2,), or the lines
    of series (1, L).

    Args:
        format: `png`, one file per sample, named by its seed; or `npz`, one file `samples.npz` with
            `images`, uint8 (N, H, W, C), and `seeds`. An autoencoder of the data decodes latents
            first. Other latents and vectors are always written as `npz`, float32, not rescaled. The
            classes of a class-conditional model are `labels` of the `npz`, or, in EDM's layout,
            `dataset.json` among the images, which `ImageFiles` reads. With their names they are in
            `classes.csv` there. With guidance 0 samples have no class.
        folder: output folder, empty or new; by default `predictions/` in the run's folder.
    """

    def __init__(self, format: Literal["png", "npz"] = "png", folder: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.format = format
        self.folder = folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the folder; raise InputError if something is in the way."""
        if stage != "predict":
            return

        # Every rank must read `log_dir`, because reading it is a collective operation.
        run_folder = trainer.log_dir or trainer.default_root_dir
        self._folder = Path(run_folder) / "predictions"
        if self.folder:
            self._folder = expanded(self.folder)

        problem = trainer.strategy.broadcast(self._taken())
        if problem is not None:  # The first rank decides, so that all ranks stop.
            raise InputError(f"SampleWriter: {problem}")

        # Batches are files until all are drawn, which saves memory and keeps the ranks apart.
        self._shards = self._folder / "batches"
        on_first_rank(lambda: self._shards.mkdir(parents=True))

    def _taken(self) -> str | None:
        """Say what is in the way of the samples, if anything is."""
        if self._folder.exists() and any(self._folder.iterdir()):
            return f"folder={self._folder} is not empty; nothing in it is overwritten"
        picture = self._beside(GRID_ENDING)
        if picture.exists():
            return f"{picture} exists; nothing is overwritten, give another folder"
        return None

    def _beside(self, ending: str) -> Path:
        """Name a file beside the folder of the samples after the folder."""
        place = Path(os.path.abspath(self._folder))
        return place.with_name(f"{place.name}_{ending}")

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        result: Tensor,
        indices: object,
        batch: Tensor,
        batch_idx: int,
        *_: object,
    ) -> None:
        """Write one batch of samples and its seeds to a file.

        Raises:
            InputError: a sample is not finite.
        """
        seeds = batch.cpu()
        samples = decoded(trainer, result).cpu().float()
        _check_finite(samples, seeds)

        images = samples.numpy()
        is_picture = are_pictures(samples.shape[1:])
        if is_picture:
            images = to_uint8(samples).numpy()

        drawn = seeds.numpy()
        in_shard = np.full(len(drawn), True)
        if is_picture and self.format == "png":
            write_pngs(self._folder, images, seeds.tolist())
            in_shard = drawn < GRID_SAMPLES  # The picture of the first ones needs these again.

        shard = self._shards / f"{trainer.global_rank:04d}_{batch_idx:06d}.npz"
        with written_whole(shard) as partial:
            np.savez(partial, drawn=drawn, seeds=drawn[in_shard], images=images[in_shard])

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Join the batches of all ranks in the order of their seeds."""
        trainer.strategy.barrier()
        self._join(trainer, pl_module)

    @rank_zero_only
    def _join(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write all samples, their classes and the picture, and remove the files of batches."""
        shards = self._read_shards(trainer.world_size)
        seeds = np.concatenate([shard["seeds"] for shard in shards])
        images = np.concatenate([shard["images"] for shard in shards])
        drawn = np.concatenate([shard["drawn"] for shard in shards])

        order = np.argsort(seeds)
        seeds, images = seeds[order], images[order]
        drawn = np.sort(drawn)
        conditioning = _conditioning(pl_module)
        classes, names = None, None
        if conditioning is not None:
            labels = conditioning.of_samples(torch.from_numpy(drawn), torch.device("cpu"))
            classes = None if labels is None else labels.numpy()
            names = conditioning.class_names

        picture = picture_of_first(images, len(drawn))
        if picture is not None:
            with written_whole(self._beside(GRID_ENDING)) as partial:
                save_image(picture, partial)

        is_picture = images.dtype == np.uint8
        if self.format == "npz" or not is_picture:
            write_npz(self._folder / "samples.npz", images, seeds, classes)
        elif classes is not None:
            write_classes(self._folder, drawn, classes, names)
        shutil.rmtree(self._shards)

    def _read_shards(self, ranks: int) -> list[dict[str, np.ndarray]]:
        """Return the arrays of all batches, by name."""
        paths = sorted(self._shards.iterdir())
        ranks_here = {path.name[:4] for path in paths}
        if len(ranks_here) < ranks:
            problem = f"{self._shards} lacks batches of other machines"
            raise InputError(f"SampleWriter: {problem}: give a shared folder")

        # A dict holds the arrays and no open file: a process may open only about a thousand.
        return [dict(np.load(path)) for path in paths]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "predict":
            rank_zero_info(f"Samples are in {self._folder}")


def _check_finite(samples: Tensor, seeds: Tensor) -> None:
    """Raise InputError if a sample (B, *shape) is not finite; it would become of one colour."""
    is_finite = samples.isfinite().flatten(1).all(1)
    if not is_finite.all():
        seed = seeds[~is_finite][0].item()
        problem = f"the sample of seed {seed} is not finite"
        raise InputError(f"SampleWriter: {problem}: check weights and noise levels")


def _conditioning(pl_module: pl.LightningModule) -> Conditioning | None:
    """Return what gives samples their classes, or None if they have none."""
    conditioning: Conditioning | None = getattr(pl_module, "conditioning", None)
    if not conditioning or getattr(pl_module, "guidance", 1.0) <= 0:
        return None
    return conditioning
