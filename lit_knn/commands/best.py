"""Measure all kept checkpoints of a run and find the best: the protocol of the paper's Table 1 (tab:cifar_fid)."""

import json
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

from lit_knn.callbacks import Fidelity
from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError, check_at_least, prefixed
from lit_knn.common.settings import describe
from lit_knn.common.tables import AVERAGES_PREFIX, CHECKPOINTS_PREFIX, DRAWS_PREFIX, TITLES, Row
from lit_knn.figures import average_curve, checkpoint_curve, save_figure
from lit_knn.metrics.kept_results import KeptResults
from lit_knn.runs.checkpoints import read_training
from lit_knn.runs.folder import RunFolder, averages_in
from lit_knn.runs.run import data_autoencoder


class BestCheckpoint(pl.Callback):
    """In `predict`, measure each kept checkpoint of a run that is not in its table yet, and report the best.

    The table has one row for each checkpoint. It is rewritten after each checkpoint, completely or not at all, so that
    an interrupted measurement can continue. All ranks load each checkpoint and share its samples.

    Args:
        fidelity: measures the samples; it sets their number.
        run: folder of the training run; the table and the picture are written there.
        folder: folder of the checkpoints, if it is not that of `run`. If `lit-knn average` wrote averages there, these
            are measured, and the table and the picture are written there.
        draws: number of draws of samples of the best checkpoint, which was found with the first.

    Attributes:
        damaged: the unreadable checkpoints and the reasons; filled while measuring.
        metric: name of the metric; the best checkpoint has the lowest value.
    """

    def __init__(
        self, fidelity: Fidelity, run: str, folder: str | None = None, draws: int = 1
    ) -> None:
        check_at_least(1, draws=draws)
        self.fidelity, self.run, self.folder, self.draws = fidelity, Path(run), folder, draws
        self.damaged: list[str] = []
        self.metric = fidelity.measure.metric

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the checkpoints and their finished measurements, before anything is sampled."""
        self.checkpoints, self._key = on_first_rank(lambda: self._find(trainer.max_steps))
        # The callback chooses the images: perhaps held-out ones, and those that latents are of.
        self.fidelity.join(trainer, pl_module)
        self.fidelity.check()
        self._reference = self.fidelity.real()

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the tables. The model's options are known only after its setup."""
        self._kept, self._drawn = self._open(pl_module)
        for table in (self._kept, self._drawn):
            table.refuse_other_settings()
        for place, path in self.checkpoints.items() if self._key == "ema" else ():
            row = self._kept.find(place)
            if row is not None and row["images_seen"] != (
                seen := read_training(path)["images_seen"]
            ):
                told = f"{path} is of {seen} images, and its row in {self._kept.path} of {row['images_seen']}"
                raise InputError(f"{told}: move that table away")

    def _find(self, max_steps: int) -> tuple[dict[Any, Path], str]:
        """Return the checkpoints by images seen, or the averages by relative length, and the name of that column."""
        averages = {} if self.folder is None else averages_in(self.folder)
        if averages:
            return averages, "ema"
        return RunFolder(self.run).kept_checkpoints(self.folder, max_steps), "images_seen"

    def _open(self, pl_module: Any) -> tuple[KeptResults, KeptResults]:
        """Open the tables of checkpoints and of further draws. All ranks call this: they describe the data together."""
        measure = self.fidelity.measure
        settings = {
            "num_samples": self.fidelity.num_samples,
            "extractor": measure.extractor.fingerprint(),
            "extra_metrics": list(measure.extra_metrics),
            "mirrored": measure.mirrored,
            "data": self._reference.fingerprint(measure.mirrored),
            **(
                {"kid_subset_size": measure.kid_subset_size}
                if "kid" in measure.extra_metrics
                else {}
            ),
            **(
                {}
                if (coder := data_autoencoder(pl_module.trainer)) is None
                else {"autoencoder": describe(coder)}
            ),
            **{
                f"model.{name}": value
                for name, value in pl_module.generative_model().options().items()
            },
        }
        # Settings read from a file have these types.
        settings = json.loads(json.dumps(settings, default=str))
        columns = {
            "step": int,
            "images_seen": int,
            **({"ema": float} if self._key == "ema" else {}),
            "checkpoint": str,
        }
        columns |= dict.fromkeys(measure.names, float) | {"num_samples": int, "seconds": float}
        folder, prefix = self.run, CHECKPOINTS_PREFIX
        if self._key == "ema":
            folder, prefix = Path(str(self.folder)), AVERAGES_PREFIX
        kept = KeptResults(
            folder / f"{prefix}{self.metric}.csv", columns, (self._key,), {(): settings}
        )
        path = folder / f"{DRAWS_PREFIX}{self.metric}.csv"
        return kept, KeptResults(path, columns | {"draw": int}, (self._key, "draw"), {(): settings})

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the remaining checkpoints, then draw and print the result."""
        todo = {
            place: path
            for place, path in self.checkpoints.items()
            if self._kept.find(place) is None
        }
        done = len(self.checkpoints) - len(todo)
        rank_zero_info(f"{done} of {len(self.checkpoints)} checkpoints are measured already")
        with self.fidelity.bar(
            len(self.checkpoints), "Checkpoints", " checkpoints", leave=True
        ) as bar:
            bar.unit_scale = False  # Checkpoints are too few for units such as k.
            bar.update(done)
            for place, path in todo.items():
                bar.set_description(path.name)
                if self._load(trainer, pl_module, path):
                    self._kept.add(self._measure(trainer, pl_module, place, path))
                bar.update()
        if not self._kept.rows:
            return
        rows: list[Any] = sorted(self._kept.rows, key=lambda row: row[self._key])
        best = min(rows, key=lambda row: row[self.metric])
        values = [best[self.metric], *self._further_draws(trainer, pl_module, best)]
        if trainer.is_global_zero:
            self._conclude(rows, best, values)

    def _further_draws(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, best: Any
    ) -> list[Any]:
        """Measure further draws of samples of the best checkpoint; return their values."""
        place, path = best[self._key], self.checkpoints.get(best[self._key])
        missing = [n for n in range(2, self.draws + 1) if self._drawn.find(place, n) is None]
        if missing and path is not None and self._load(trainer, pl_module, path):
            for n in missing:
                self._drawn.add({**self._measure(trainer, pl_module, place, path, n), "draw": n})
        found = [self._drawn.find(place, n) for n in range(2, self.draws + 1)]
        return [row[self.metric] for row in found if row is not None]

    def _load(self, trainer: pl.Trainer, pl_module: pl.LightningModule, path: Path) -> bool:
        """Load the averaged weights of a checkpoint into the model; return False on all ranks if any rank fails."""
        problem, checkpoint = None, None
        try:
            checkpoint = read_training(path)
        except InputError as error:
            problem = str(error)
        if not trainer.strategy.reduce_boolean_decision(problem is None, all=True):
            self.damaged.append(problem or f"{path} cannot be read by another rank")
            rank_zero_warn(f"{self.damaged[-1]}; the other checkpoints are measured all the same")
            return False
        assert checkpoint is not None
        pl_module.on_load_checkpoint(checkpoint)
        pl_module.load_state_dict(checkpoint["state_dict"])
        return True

    def _measure(
        self, trainer: pl.Trainer, pl_module: Any, place: float, path: Path, draw: int = 1
    ) -> Row:
        """Measure samples of the loaded weights."""
        start, fidelity = time.monotonic(), self.fidelity
        with prefixed(str(path)):
            samples, device = fidelity.samples(pl_module, draw), trainer.strategy.root_device
            values = fidelity.measure(
                self._reference, samples, fidelity.num_samples, device, fidelity.bar
            )
        row: Row = {
            "step": int(pl_module.step),
            "images_seen": int(pl_module.images_seen),
            self._key: place,
        }
        row |= {"checkpoint": str(path), **values, "num_samples": fidelity.num_samples}
        return row | {"seconds": round(time.monotonic() - start, 2)}

    def _conclude(self, rows: list[Any], best: Any, draws: list[Any]) -> None:
        """Draw the curve, and print the best checkpoint with all its draws."""
        points = [(row[self._key], row[self.metric]) for row in rows]
        draw: Any = average_curve if self._key == "ema" else checkpoint_curve
        figure = draw(points, (best[self._key], best[self.metric]), self.metric, f"{self.run}")
        pictures = save_figure(figure, self._kept.path.with_suffix(""))
        shown = [name for name in best if name in TITLES] or [self.metric]
        values = ", ".join(f"{TITLES.get(name, name)} {best[name]:.4g}" for name in shown)
        print(
            f"\nBest of {len(rows)} checkpoints: {values}, step {best['step']:,}, {best['images_seen']:,} images seen\n"
            f"  {self.checkpoints.get(best[self._key], 'Its file is gone, so no further draws are made.')}\n"
            f"{self._summary(draws)}"
            f"Rows:     {self._kept.path}\n"
            f"Pictures: {', '.join(map(str, pictures))}"
        )

    def _summary(self, draws: list[Any]) -> str:
        """Describe all draws of the best checkpoint. The first chose it, so only the others are a fair measurement."""
        if len(draws) < 2:
            return ""
        name, values = (
            TITLES.get(self.metric, self.metric),
            ", ".join(f"{value:.4g}" for value in draws),
        )
        mean = sum(draws[1:]) / (len(draws) - 1)
        told = f"{name} of {len(draws)} draws: {values}. The least, {min(draws):.4g}, is what EDM's authors report. "
        told += f"The mean of the draws that did not choose the checkpoint is {mean:.4g}"
        return f"{told}\nDraws:    {self._drawn.path}\n"
