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

# The picture of the first samples has the name of their folder with this ending.
GRID_ENDING = "grid.png"


class SampleWriter(BasePredictionWriter):
    """Write the samples of `predict` batch by batch, and a picture of the first ones.

    The picture is beside the folder of the samples, in `FOLDER_grid.png`, so that programs that measure all files of
    the folder do not count it. It is a grid of images, a scatter plot of points (2,), or the lines of series (1, L).

    Args:
        format: `png`, one file per sample, named by its seed; or `npz`, one file `samples.npz` with `images`, uint8 (N,
            H, W, C), and `seeds`. If the data have an autoencoder, it decodes latents first. Other latents and vectors
            are always written as `npz`, float32, not rescaled. The classes of a class-conditional model are the array
            `labels` of the `npz`. For `png` they are written beside the images: into `dataset.json` in EDM's layout,
            which `ImageFiles` reads, and into `classes.csv` with their names. With guidance 0 samples have no class.
        folder: output folder, empty or new; by default `predictions/` in the run's folder.
    """

    def __init__(self, format: Literal["png", "npz"] = "png", folder: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.format = format
        self.folder = folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the folder; raise InputError if files would be overwritten."""
        if stage != "predict":
            return

        # Every rank must read `log_dir`, because reading it is a collective operation.
        run_folder = trainer.log_dir or trainer.default_root_dir
        self._folder = Path(run_folder) / "predictions"
        if self.folder:
            self._folder = expanded(self.folder)

        # All ranks take the first rank's result, so that all of them stop.
        problem = trainer.strategy.broadcast(self._obstacle())
        if problem is not None:
            raise InputError(f"SampleWriter: {problem}")

        # Until all samples are drawn, each batch is a file, a shard. So a rank needs little memory, and the ranks
        # need not exchange samples.
        self._shards = self._folder / "batches"
        on_first_rank(lambda: self._shards.mkdir(parents=True))

    def _obstacle(self) -> str | None:
        """Return what keeps the samples from being written, which is something in their place; None if nothing is."""
        if self._folder.exists() and any(self._folder.iterdir()):
            return f"folder={self._folder} is not empty; nothing in it is overwritten"
        picture = self._beside(GRID_ENDING)
        if picture.exists():
            return f"{picture} exists; nothing is overwritten, give another folder"
        return None

    def _beside(self, ending: str) -> Path:
        """Return the path of a file beside the folder of the samples: its name is that of the folder and an ending."""
        # An absolute path has a name even if the folder is `.`.
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
        """Write one batch of samples and its seeds to a shard, and to PNG files if asked.

        The shard has all seeds of the batch, `drawn`. If the samples are PNG files, it has only those samples that
        the picture needs, `images`, with their `seeds`; otherwise it has all.

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
            in_shard = drawn < GRID_SAMPLES

        shard = self._shards / f"{trainer.global_rank:04d}_{batch_idx:06d}.npz"
        with written_whole(shard) as partial:
            np.savez(partial, drawn=drawn, seeds=drawn[in_shard], images=images[in_shard])

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait until all ranks have written their batches, and let the first rank join them."""
        trainer.strategy.barrier()
        self._join(trainer, pl_module)

    @rank_zero_only
    def _join(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write all samples in the order of their seeds, their classes and the picture, and remove the shards."""
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
        """Return the arrays of all shards by name; raise InputError if those of a rank are missing."""
        paths = sorted(self._shards.iterdir())
        # The name of a shard begins with the number of its rank.
        ranks_here = {path.name.partition("_")[0] for path in paths}
        if len(ranks_here) < ranks:
            problem = f"{self._shards} lacks batches of other machines"
            raise InputError(f"SampleWriter: {problem}: give a shared folder")

        # `dict` reads the arrays, so that no file stays open: a process may open only about a thousand.
        return [dict(np.load(path)) for path in paths]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Print where the samples are."""
        if stage == "predict":
            rank_zero_info(f"Samples are in {self._folder}")


def _check_finite(samples: Tensor, seeds: Tensor) -> None:
    """Raise InputError if one of the samples, (B, *shape), is not finite: its picture would only be of one colour."""
    is_finite = samples.isfinite().flatten(1).all(1)
    if not is_finite.all():
        seed = seeds[~is_finite][0].item()
        problem = f"the sample of seed {seed} is not finite"
        raise InputError(f"SampleWriter: {problem}: check weights and noise levels")


def _conditioning(pl_module: pl.LightningModule) -> Conditioning | None:
    """Return the part of the model that gives samples their classes, or None if samples have no class."""
    conditioning: Conditioning | None = getattr(pl_module, "conditioning", None)
    if not conditioning or getattr(pl_module, "guidance", 1.0) <= 0:
        return None
    return conditioning
