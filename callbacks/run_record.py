"""Write the record of a training run beside its checkpoints."""

from pathlib import Path

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

from lit_knn.callbacks.checkpoints import images_seen
from lit_knn.common.errors import InputError, first_line
from lit_knn.runs.clock import training_clock
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.record import Record, read_record
from lit_knn.runs.run import find_reference


class RunRecord(pl.Callback):
    """Write `run.json` into the run's folder: command, versions, revision, data, hardware and time.

    The settings are in `config.yaml` beside it. The record is written at the start, at each checkpoint,
    at the end, and when the run is interrupted or fails. `lit-knn report RUN...` compares records.
    `lit-knn fit` always adds this callback.
    """

    _record: Record | None = None  # None on other ranks, and before the training starts

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the record of this part of the run, and write it."""
        # Every rank must read `log_dir` and hash its images: both can be collective operations.
        self._folder = trainer.log_dir
        self._begin(trainer, _describe_data(trainer))
        self._write(trainer, pl_module)

    @rank_zero_only
    def _begin(self, trainer: pl.Trainer, data: dict[str, object]) -> None:
        """Make the record of this part of the run, on the first rank.

        Args:
            trainer: the trainer of the run.
            data: the description of its data.
        """
        resumed_from = None
        if trainer.ckpt_path is not None:
            resumed_from = str(trainer.ckpt_path)
        self._record = Record(resumed_from=resumed_from, data=data, processes=trainer.world_size)

        # If this part goes on in its run's own folder, the run keeps the start that its record has: it may have
        # been resumed from a run in another folder before.
        run = RunFolder(Path(str(self._folder)))
        if resumed_from is not None and run.holds(resumed_from):
            try:
                self._record.resumed_from = read_record(run.path).resumed_from
            except InputError as error:
                rank_zero_warn(f"{error}; where this run began is lost")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        """Write the record with the current step and time."""
        self._write(trainer, pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the record with the error or the interruption that ended the run."""
        if isinstance(exception, (KeyboardInterrupt, SystemExit)):
            status = "interrupted"
        else:
            status = f"failed: {first_line(exception)}"
        self._write(trainer, pl_module, status)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the record with the status `finished`."""
        self._write(trainer, pl_module, "finished")

    def _write(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, status: str | None = None
    ) -> None:
        """Write the record with the current step, time and images seen.

        Args:
            trainer: the trainer of the run.
            pl_module: its module.
            status: the new status; None to keep the one before.
        """
        record = self._record
        if record is None or self._folder is None or trainer.state.fn != "fit":
            return

        record.status = status or record.status
        record.step = trainer.global_step
        record.time = training_clock(trainer).total()
        record.images_seen = images_seen(pl_module)
        record.write(self._folder)


def _describe_data(trainer: pl.Trainer) -> dict[str, object]:
    """Return the class of the run's data and, if they have a reference set, number, shape and hash of its images."""
    datamodule = getattr(trainer, "datamodule", None)
    data: dict[str, object] = {"class": type(datamodule).__name__}
    reference = find_reference(trainer)
    if reference is not None:
        data["images"] = reference.N
        data["shape"] = list(reference.shape)
        # A set of latents does not know that it holds those of mirror images, too.
        data["hflip"] = getattr(datamodule, "hflip", reference.hflip)
        data["fingerprint"] = reference.fingerprint()
    return data
