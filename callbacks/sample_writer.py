"""Write the samples of `predict` as PNG files or one .npz file, and a picture beside their folder."""

import json
import os
import shutil
from collections.abc import Sequence
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
from lit_knn.figures import captioned, sample_picture
from lit_knn.runs.folder_choice import expanded
from lit_knn.runs.run import decoded

GRID_SAMPLES = 64
# A scatter plot has room for more points.
GRID_POINTS = 2000
GRID_ENDING, CLASSES_NAME = "grid.png", "classes.csv"


class SampleWriter(BasePredictionWriter):
    """Write the samples of `predict` batch by batch, and a picture of the first ones.

    The folder holds no other picture, so that other programs can measure it. The picture is
    beside it, in `FOLDER_grid.png`: a grid of images, a scatter plot of points (2,), or the lines
    of series (1, L).

    Args:
        format: `png`, one file per sample, named by its seed; or `npz`, one file `samples.npz` with `images`, uint8
            (N, H, W, C), and `seeds`. An autoencoder of the data decodes latents first. Other latents and vectors are
            always written as `npz`, float32, not rescaled. The classes of a class-conditional model
            are `labels` of the `npz`, or, in EDM's layout, `dataset.json` among the images, which
            `ImageFiles` reads. With their names they are in `classes.csv` there.
            With guidance 0 samples have no class.
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
        problem = trainer.strategy.broadcast(self._taken())
        if problem is not None:  # The first rank decides, so that all ranks stop.
            raise InputError(f"SampleWriter: {problem}")
        # Batches are files until all are drawn, which saves memory and keeps the ranks apart.
        self._shards = self._folder / "batches"
        if trainer.is_global_zero:
            self._shards.mkdir(parents=True)
        trainer.strategy.barrier()

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
        pl_module: Any,
        result: Tensor,
        indices: Any,
        batch: Tensor,
        batch_idx: int,
        *_: Any,
    ) -> None:
        """Write one batch of samples and its seeds to a file; raise InputError if a sample is not finite."""
        images = decoded(trainer, result).cpu().float()
        finite = images.isfinite().flatten(1).all(1)
        if not finite.all():  # They would become pictures of one colour.
            seed = batch.cpu()[~finite][0].item()
            raise InputError(
                f"SampleWriter: the sample of seed {seed} is not finite: check weights and noise levels"
            )
        is_picture = are_pictures(images.shape[1:])
        drawn = batch.cpu()
        arrays = {
            "seeds": drawn.numpy(),
            "images": (to_uint8(images) if is_picture else images).numpy(),
        }
        if is_picture and self.format == "png":
            for seed, image in zip(batch.tolist(), arrays["images"], strict=True):
                with written_whole(self._folder / f"{seed:06d}.png", flush=False) as partial:
                    to_pil_image(image.transpose(1, 2, 0)).save(partial)
            keep = arrays["seeds"] < GRID_SAMPLES
            arrays = {name: array[keep] for name, array in arrays.items()}
        with written_whole(
            self._shards / f"{trainer.global_rank:04d}_{batch_idx:06d}.npz"
        ) as partial:
            np.savez(partial, drawn=drawn.numpy(), **arrays)  # type: ignore[arg-type]

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Join the batches of all ranks in the order of their seeds."""
        trainer.strategy.barrier()
        if not trainer.is_global_zero:
            return
        # A dict holds the arrays and no open file, because a process may open only about a thousand.
        paths = sorted(self._shards.iterdir())
        if len({path.name[:4] for path in paths}) < trainer.world_size:
            raise InputError(
                f"SampleWriter: {self._shards} lacks batches of other machines: give a shared folder"
            )
        shards = [{**np.load(path)} for path in paths]
        names = ("seeds", "images", "drawn")
        seeds, images, drawn = (np.concatenate([shard[name] for shard in shards]) for name in names)
        order, drawn = np.argsort(seeds), np.sort(drawn)
        images = images[order]
        classes = _classes(pl_module, drawn)
        is_picture = images.dtype == np.uint8
        self._draw(images, len(drawn))

        if self.format == "npz" or not is_picture:
            stored = images.transpose(0, 2, 3, 1) if is_picture else images
            arrays: dict[str, Any] = {"images": stored, "seeds": seeds[order]}
            if classes is not None:
                arrays["labels"] = classes
            with written_whole(self._folder / "samples.npz") as partial:
                np.savez_compressed(partial, **arrays)
        elif classes is not None:
            self._write_classes(drawn, classes, pl_module.conditioning.class_names)
        shutil.rmtree(self._shards)

    def _draw(self, images: np.ndarray, number: int) -> None:
        """Draw the first of so many samples, in the order of their seeds, if their shape allows it."""
        limit = GRID_POINTS if images.shape[1:] == (2,) else GRID_SAMPLES
        first = torch.from_numpy(images[:limit]).float()
        if images.dtype == np.uint8:
            first = first / 127.5 - 1

        picture = sample_picture(first)
        if picture is None:
            return

        caption = f"{len(first):,} of {number:,} samples"
        with written_whole(self._beside(GRID_ENDING)) as partial:
            save_image(captioned(picture, caption), partial)

    def _write_classes(
        self, seeds: np.ndarray, classes: np.ndarray, names: Sequence[str] | None
    ) -> None:
        """Write the class of each PNG file: for programs in EDM's layout, for people with its name."""
        files = [f"{seed:06d}.png" for seed in seeds]
        labels = [[file, int(c)] for file, c in zip(files, classes, strict=True)]
        with written_whole(self._folder / "dataset.json") as partial:
            partial.write_text(json.dumps({"labels": labels}) + "\n", encoding="utf-8")

        rows: list[dict[str, Any]] = [{"file": file, "class": c} for file, c in labels]
        if names:
            for row in rows:
                row["name"] = printable(names[row["class"]])
        write_rows(self._folder / CLASSES_NAME, rows)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "predict":
            rank_zero_info(f"Samples are in {self._folder}")


def _classes(pl_module: Any, seeds: np.ndarray) -> np.ndarray | None:
    """Return the class of the sample of each seed, (N,), or None if samples have no class."""
    conditioning: Any = getattr(pl_module, "conditioning", None)
    if not conditioning or pl_module.hparams.get("guidance", 1) <= 0:
        return None
    labels: Tensor = conditioning.of_samples(torch.from_numpy(seeds), torch.device("cpu"))
    return labels.numpy()
