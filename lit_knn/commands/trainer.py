"""Lightning's trainer with safe checkpoints and three more subcommands, `plan`, `probe` and `best`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytorch_lightning as pl
from jsonargparse.typing import restricted_number_type
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.callbacks import ModelCheckpoint, ProgressBar

from lit_knn.callbacks import Fidelity, LastCheckpoint
from lit_knn.commands.best import BestCheckpoint
from lit_knn.commands.plan import plan
from lit_knn.commands.probe import probe
from lit_knn.common.checkpoint_file import CHECKPOINTS
from lit_knn.common.errors import InputError
from lit_knn.data import ReferenceDataModule
from lit_knn.modules.refused_callbacks import check_callbacks
from lit_knn.runs.checkpoints import WholeCheckpointIO
from lit_knn.runs.interruption import EndAtSigterm

# A share of the batches, such as `1.0` for all; `1` is one batch. The parser tries the types of a union in their order,
# but for Union[int, float] Python may return a cached Union[float, int], and `1` would be read as `1.0`. This type is
# in no other union, so the order is kept.
Share: Any = float if TYPE_CHECKING else restricted_number_type("Share", float, ("<", math.inf))
Batches: TypeAlias = int | Share


def _do_nothing() -> None:
    """Do nothing; a lambda could not be sent to the processes that `ddp_spawn` starts."""


class Trainer(pl.Trainer):
    """Lightning's trainer, which can also plan a run, probe data, and measure the kept checkpoints of a run.

    It replaces a checkpoint only by a complete file, and checks checkpoints when it reads them. It does not lock the
    folder of a run; only the command line does.

    Args:
        limit_train_batches: how much of each training epoch to use: `10` is 10 batches, and `0.1` a tenth.
        limit_val_batches: how much of each validation to use, likewise: `1` is one batch, and `1.0` is all.
        limit_predict_batches: how many of the batches of samples to draw, likewise.
        overfit_batches: train and validate on the same first batches, this number or share of them; 0 trains on all.
        precision: 32-true, which is the default, bf16-mixed or 16-mixed.
        callbacks: called during the run; some of Lightning's are refused, see `check_callbacks`.
        kwargs: see Lightning's trainer.
    """

    _run_folder: Path | None = None
    # The arguments of the command that made this trainer, as they were typed.
    command_line: Sequence[str] = ()
    plan = plan
    probe = probe

    def __init__(
        self,
        *,
        limit_train_batches: Batches | None = None,
        limit_val_batches: Batches | None = None,
        limit_predict_batches: Batches | None = None,
        overfit_batches: Batches = 0.0,
        precision: int | str | None = None,
        callbacks: list[pl.Callback] | pl.Callback | None = None,
        **kwargs: Any,
    ) -> None:
        """Make Lightning's trainer, with checkpoints that are whole and with an end at SIGTERM."""
        if isinstance(callbacks, pl.Callback):
            callbacks = [callbacks]
        callbacks = list(callbacks or ())
        check_callbacks(callbacks)
        # Lightning would refuse the LastCheckpoint that the command line gives to every run.
        if kwargs.get("enable_checkpointing") is False:
            callbacks = [each for each in callbacks if not isinstance(each, LastCheckpoint)]

        super().__init__(
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_predict_batches=limit_predict_batches,
            overfit_batches=overfit_batches,
            precision=precision,  # type: ignore[arg-type]  # The command line checks it.
            callbacks=callbacks,
            **kwargs,
        )

        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = WholeCheckpointIO()
        self.callbacks = [EndAtSigterm(), *self.callbacks]  # type: ignore[has-type]
        # Here Lightning would exchange signals between ranks on the GPU, and so wait for it. `Interruption` exchanges
        # them on the CPU.
        self.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing  # type: ignore[method-assign]

    def write_into(self, folder: Path) -> None:
        """Set the folder of the run, and with it that of Lightning's checkpoints. Call this before the run begins."""
        self._run_folder = folder
        for callback in self.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(folder / CHECKPOINTS)

    @property
    def log_dir(self) -> str | None:
        """The folder of the run, the same on every process; every process must read it."""
        if self._run_folder is None:
            return super().log_dir
        return self.strategy.broadcast(str(self._run_folder))

    def best(
        self,
        model: pl.LightningModule,
        run: str,
        datamodule: ReferenceDataModule | None = None,
        checkpoints: str | None = None,
        draws: int = 1,
    ) -> None:
        """Measure all kept checkpoints of a run and name the best; an interrupted measurement continues.

        Model, data and trainer come from RUN/config.yaml. Add a metric with `-c configs/evaluate/fid.yaml`; without it
        the run's own `Fidelity` measures. RUN/checkpoints_fid.csv (named after the metric) gets one row per checkpoint;
        `lit-knn report` reads it. The curve goes to the .png and .pdf beside it. The devices,
        `--trainer.devices`, share the samples of each checkpoint.

        Args:
            model: the module.
            run: folder of the training run, such as runs/table1/knn_0, with its config.yaml; rows and picture go
                there. For a resumed training give the last folder: earlier ones are found. If the run has no
                lit_knn.callbacks.Fidelity, add a metric, -c configs/evaluate/fid.yaml.
            datamodule: the data.
            checkpoints: folder of the checkpoints, if it is not RUN/checkpoints. Of RUN/averages, which `lit-knn
                average` made, it names the best length, and puts rows and picture there.
            draws: number of draws of samples of the best checkpoint, each with seeds of its own. EDM's authors report
                the least FID of three (arXiv 2206.00364). All are printed and kept in RUN/draws_fid.csv.
        """
        callbacks: list[pl.Callback] = self.callbacks
        measures = [callback for callback in callbacks if isinstance(callback, Fidelity)]
        if not measures:
            raise InputError(
                "best: the run has no lit_knn.callbacks.Fidelity; add -c configs/evaluate/fid.yaml"
            )

        best = BestCheckpoint(measures[-1], run, checkpoints, draws)
        bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
        for bar in bars:
            bar.disable()  # `BestCheckpoint` shows one bar over all checkpoints.
        self.callbacks = [best, *bars, EndAtSigterm()]
        self.loggers = []

        # `predict` draws one sample on each rank, as a trial. Then `BestCheckpoint` does the work in its hook.
        assert datamodule is not None
        datamodule.predict_samples = self.world_size
        self.limit_predict_batches = 1
        self.predict(model, datamodule=datamodule, return_predictions=False)

        if best.damaged:
            raise InputError(
                f"{len(best.damaged)} checkpoint(s) are not measured: {'; '.join(best.damaged)}"
            )
