"""Measure all kept checkpoints of a run and find the best: the protocol of the paper's Table 1 (tab:cifar_fid)."""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError
from lit_knn.common.files import locked, written_whole
from lit_knn.common.settings import fingerprint
from lit_knn.common.tables import AVERAGES_PREFIX, CHECKPOINTS_PREFIX, TITLES, ResultsTable, Row
from lit_knn.figures import average_curve, checkpoint_curve, save_figure
from lit_knn.metrics import FidelityMeasure
from lit_knn.runs.checkpoints import read_training
from lit_knn.runs.folder import RunFolder, averages_in
from lit_knn.runs.run import data_reference, measuring_bar


@runtime_checkable
class MeasuresSamples(Protocol):
    """A callback that draws samples of a model and compares them with the data, such as `callbacks.Fidelity`."""

    measure: FidelityMeasure
    num_samples: int

    def samples(self, pl_module: pl.LightningModule) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the samples: seeds (B,) and images (B, *shape)."""


class BestCheckpoint(pl.Callback):
    """In `predict`, measure each kept checkpoint of a run that is not in its table yet, and report the best.

    The table has one row for each checkpoint. It is rewritten after each of them, completely or not at all, so that an
    interrupted measurement can continue. All ranks load each checkpoint and share its samples.

    Args:
        fidelity: measures the samples; it sets their number.
        run: folder of the training run; the table and the picture are written there.
        folder: folder of the checkpoints, if it is not that of `run`. If it has averages of `lit-knn average`, these
            are measured, and the table and the picture are written there.

    Attributes:
        damaged: the unreadable checkpoints and the reasons; filled while measuring.

    Raises:
        InputError: at `setup`, no kept checkpoint, or a table of other settings.
    """

    def __init__(self, fidelity: MeasuresSamples, run: str, folder: str | None = None) -> None:
        self.fidelity = fidelity
        self.run = Path(run)
        self.folder = folder
        self.damaged: list[str] = []

    @property
    def metric(self) -> str:
        """Name of the metric; the best checkpoint has the lowest value."""
        return self.fidelity.measure.metric

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the checkpoints and their finished measurements, before anything is sampled."""
        self.checkpoints, self._key = on_first_rank(lambda: self._find(trainer.max_steps))
        self._reference = data_reference(trainer, may_be_sharded=True)
        self.fidelity.measure.prepare(self._reference, self.fidelity.num_samples)
        self._settings = self._describe(pl_module)  # Every rank must call `_describe`.
        self._table = self._open_table()
        self._rows = on_first_rank(self._finished)

    def _find(self, max_steps: int) -> tuple[dict[Any, Path], str]:
        """Return the checkpoints by images seen, or the averages by relative length, and the name of that column."""
        averages = {} if self.folder is None else averages_in(self.folder)
        if averages:
            return averages, "ema"
        return RunFolder(Path(self.run)).kept_checkpoints(self.folder, max_steps), "images_seen"

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the remaining checkpoints, then draw and print the result."""
        todo = {place: path for place, path in self.checkpoints.items() if place not in self._rows}
        done = len(self.checkpoints) - len(todo)
        rank_zero_info(f"{done} of {len(self.checkpoints)} checkpoints are measured already")
        with measuring_bar(trainer, len(self.checkpoints), "Checkpoints", " checkpoints", leave=True) as bar:
            bar.unit_scale = False  # Checkpoints are too few for units such as k.
            bar.update(done)
            for place, path in todo.items():
                bar.set_description(path.name)
                if self._load(trainer, pl_module, path):
                    self._rows[place] = self._measure(trainer, pl_module, place, path)
                bar.update()
        if trainer.is_global_zero and self._rows:
            self._conclude()

    def _load(self, trainer: pl.Trainer, pl_module: pl.LightningModule, path: Path) -> bool:
        """Load the averaged weights of a checkpoint into the model; return False on all ranks if one refuses it."""
        problem, checkpoint = None, None
        try:
            checkpoint = read_training(path)
            if not all(value.isfinite().all() for value in checkpoint["state_dict"].values()):
                problem = f"{path} has weights that are not finite"
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

    def _measure(self, trainer: pl.Trainer, pl_module: Any, place: float, path: Path) -> Row:
        start, fidelity = time.monotonic(), self.fidelity
        samples = fidelity.samples(pl_module)
        try:
            device, bar = trainer.strategy.root_device, partial(measuring_bar, trainer)
            values = fidelity.measure(self._reference, samples, fidelity.num_samples, device, bar)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        row: Row = {"step": int(pl_module.step), "images_seen": int(pl_module.images_seen), self._key: place}
        row["checkpoint"] = str(path)
        row |= {**values, "num_samples": fidelity.num_samples, "seconds": round(time.monotonic() - start, 2)}
        row["settings"] = fingerprint(self._settings)
        on_first_rank(lambda: self._add(row))
        return row

    def _add(self, row: Row) -> None:
        path = self._settings_path
        # Two commands may measure the same run at the same time.
        with locked(self._table.path):
            if not self._table.path.exists():
                with written_whole(path) as partial:
                    partial.write_text(json.dumps(self._settings, indent=2) + "\n")
            if self._table.find(self._table.load(), **row) is None:
                self._table.append(row)

    def _open_table(self) -> ResultsTable:
        measure = self.fidelity.measure
        names = [self.metric, *(("inception_score", "inception_score_std") if measure.extractor.num_logits else ())]
        names += [n for m in measure.extra_metrics for n in ((m, "kid_std") if m == "kid" else (m,))]
        columns = {"step": int, "images_seen": int, **({"ema": float} if self._key == "ema" else {}), "checkpoint": str}
        columns |= dict.fromkeys(names, float)
        columns |= {"num_samples": int, "seconds": float, "settings": str}
        path = self.run / f"{CHECKPOINTS_PREFIX}{self.metric}.csv"
        if self._key == "ema":
            path = Path(str(self.folder)) / f"{AVERAGES_PREFIX}{self.metric}.csv"
        return ResultsTable(path, columns, key=(self._key,))

    def _describe(self, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Describe everything that the results depend on, except the checkpoint."""
        measure = self.fidelity.measure
        described = {
            "num_samples": self.fidelity.num_samples,
            "extractor": measure.extractor.fingerprint(),
            "extra_metrics": list(measure.extra_metrics),
            "mirrored": measure.mirrored,
            "data": self._reference.fingerprint(measure.mirrored),
            **({"kid_subset_size": measure.kid_subset_size} if "kid" in measure.extra_metrics else {}),
            **{f"model.{name}": value for name, value in pl_module.hparams.items()},
        }
        return json.loads(json.dumps(described, default=str))  # A table on disk gives the same types when read.

    @property
    def _settings_path(self) -> Path:
        return self._table.path.with_suffix(".json")

    def _finished(self) -> dict[Any, Row]:
        """Return the rows of the table, by images seen or relative length.

        Raises:
            InputError: the rows have other settings.
        """
        if not self._table.path.exists():
            return {}
        path, now = self._settings_path, self._settings
        before = json.loads(path.read_text()) if path.exists() else {}
        other = next((name for name in {**now, **before} if now.get(name) != before.get(name)), None)
        if other is not None:
            raise InputError(
                f"{self._table.path} has results with {other}={before.get(other)}, not {now.get(other)}: "
                "measure with the same settings, or rename that file"
            )
        return {row[self._key]: row for row in self._table.load()}

    def _conclude(self) -> None:
        rows = [self._rows[place] for place in sorted(self._rows)]
        best = min(rows, key=lambda row: row[self.metric])
        points: list[Any] = [(row[self._key], row[self.metric]) for row in rows]
        draw: Any = average_curve if self._key == "ema" else checkpoint_curve
        figure = draw(points, (best[self._key], best[self.metric]), self.metric, f"{self.run}")
        pictures = save_figure(figure, self._table.path.with_suffix(""))
        shown = [name for name in self._table.columns if name in TITLES and name in best]
        values = ", ".join(f"{TITLES[name]} {best[name]:.4g}" for name in shown)
        values = values or f"{self.metric} {best[self.metric]:.4g}"
        print(
            f"\nBest of {len(rows)} checkpoints: {values}, step {best['step']:,}, {best['images_seen']:,} images seen\n"
            f"  {best['checkpoint']}\n"
            f"Rows:     {self._table.path}\n"
            f"Pictures: {', '.join(map(str, pictures))}"
        )
