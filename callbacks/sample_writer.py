"""Write the samples of `predict` as PNG files or one .npz file, and a grid."""

import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import save_image

from lit_knn.common.errors import InputError, printable
from lit_knn.common.files import written_whole
from lit_knn.common.pixels import are_pictures, to_uint8
from lit_knn.common.tables import write_rows
from lit_knn.figures import captioned, image_grid
from lit_knn.runs.folder import expanded
from lit_knn.runs.run import decoded

GRID_SAMPLES = 64


class SampleWriter(BasePredictionWriter):
    """Write the samples of `predict` batch by batch, and a grid of the first 64 with their number.

    Args:
        format: `png`, one file per sample, named by its seed; or `npz`, one file `samples.npz` with `images`, uint8
            (N, H, W, C), and `seeds`. An autoencoder of the data decodes latents first. Other latents and vectors are
            always written as `npz`, float32, not rescaled. The classes of a class-conditional model are `labels` of
            the `npz`, or `classes.csv` beside the images, with their names; with guidance 0 samples have no class.
        folder: output folder, empty or new; by default `predictions/` in the run's folder.
    """

    def __init__(self, format: Literal["png", "npz"] = "png", folder: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.format = format
        self.folder = folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        # Every rank must read `log_dir`, because reading it is a collective operation.
        run_folder = trainer.log_dir or trainer.default_root_dir
        self._folder = expanded(self.folder) if self.folder else Path(run_folder) / "predictions"
        taken = trainer.strategy.broadcast(self._folder.exists() and any(self._folder.iterdir()))
        if taken:  # The first rank decides, so that all ranks stop.
            raise InputError(f"SampleWriter: folder={self._folder} is not empty; nothing in it is overwritten")
        # Batches are files until all are drawn, which saves memory and keeps the ranks apart.
        self._shards = self._folder / "batches"
        if trainer.is_global_zero:
            self._shards.mkdir(parents=True)
        trainer.strategy.barrier()

    def write_on_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, result: Tensor, indices: Any, batch: Tensor, batch_idx: int, *_: Any
    ) -> None:
        """Write one batch of samples and its seeds to a file; raise InputError if a sample is not finite."""
        images = decoded(trainer, result).cpu().float()
        finite = images.isfinite().flatten(1).all(1)
        if not finite.all():  # They would become pictures of one colour.
            seed = batch.cpu()[~finite][0].item()
            raise InputError(f"SampleWriter: the sample of seed {seed} is not finite: check weights and noise levels")
        is_picture = are_pictures(images.shape[1:])
        drawn = batch.cpu()
        arrays = {"seeds": drawn.numpy(), "images": (to_uint8(images) if is_picture else images).numpy()}
        if is_picture and self.format == "png":
            for seed, image in zip(batch.tolist(), arrays["images"], strict=True):
                with written_whole(self._folder / f"{seed:06d}.png", flush=False) as partial:
                    to_pil_image(image.transpose(1, 2, 0)).save(partial)
            keep = arrays["seeds"] < GRID_SAMPLES
            arrays = {name: array[keep] for name, array in arrays.items()}
        with written_whole(self._shards / f"{trainer.global_rank:04d}_{batch_idx:06d}.npz") as partial:
            np.savez(partial, drawn=drawn.numpy(), **arrays)  # type: ignore[arg-type]

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Join the batches of all ranks in the order of their seeds."""
        trainer.strategy.barrier()
        if not trainer.is_global_zero:
            return
        # A dict holds the arrays and no open file, because a process may open only about a thousand.
        paths = sorted(self._shards.iterdir())
        if len({path.name[:4] for path in paths}) < trainer.world_size:
            raise InputError(f"SampleWriter: {self._shards} lacks batches of other machines: give a shared folder")
        shards = [{**np.load(path)} for path in paths]
        names = ("seeds", "images", "drawn")
        seeds, images, drawn = (np.concatenate([shard[name] for shard in shards]) for name in names)
        order, drawn = np.argsort(seeds), np.sort(drawn)
        images = images[order]
        conditioning: Any = getattr(pl_module, "conditioning", None)
        classes: dict[str, Any] = {}
        if conditioning and pl_module.hparams.get("guidance", 1) > 0:
            classes = {"labels": conditioning.of_samples(torch.from_numpy(drawn), torch.device("cpu")).numpy()}
        is_picture = images.dtype == np.uint8
        if is_picture:
            grid = image_grid(torch.from_numpy(images[:GRID_SAMPLES]).float() / 127.5 - 1)
            caption = f"{min(len(order), GRID_SAMPLES)} of {len(drawn):,} samples"
            with written_whole(self._folder / "grid.png") as partial:
                save_image(captioned(grid, caption), partial)
        if self.format == "npz" or not is_picture:
            stored = images.transpose(0, 2, 3, 1) if is_picture else images
            with written_whole(self._folder / "samples.npz") as partial:
                np.savez_compressed(partial, images=stored, seeds=seeds[order], **classes)
        elif classes:
            of_class = conditioning.class_names
            rows = [
                {"file": f"{seed:06d}.png", "class": c} | ({"name": printable(of_class[c])} if of_class else {})
                for seed, c in zip(drawn, classes["labels"], strict=True)
            ]
            write_rows(self._folder / "classes.csv", rows)
        shutil.rmtree(self._shards)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "predict":
            rank_zero_info(f"Samples are in {self._folder}")
