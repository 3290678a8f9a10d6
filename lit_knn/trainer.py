"""Lightning's trainer with the subcommands `plan` and `best` of the application."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar

from lit_knn.best_checkpoint import BestCheckpoint, MeasuresSamples
from lit_knn.data import ReferenceDataModule
from lit_knn.errors import InputError
from lit_knn.planning import Plan, make_plan


class Trainer(pl.Trainer):
    """Lightning's trainer, which can also plan a run, and measure the checkpoints that one kept."""

    def plan(
        self,
        model: pl.LightningModule,
        datamodule: ReferenceDataModule | None = None,
        images: int | None = None,
        image_shape: list[int] | None = None,
        gpu_gb: float | None = None,
        machine_gb: float | None = None,
    ) -> Plan:
        """Tell what each rank of a fit would hold in memory, and whether it fits; nothing is loaded or built.

        Args:
            model: the module.
            datamodule: the data.
            images: plan for this many images instead of those of the data.
            image_shape: plan for images of this shape, such as [3, 64, 64], instead of those of the data.
            gpu_gb: plan for GPUs with this many GB each, instead of the devices of this machine.
            machine_gb: plan for a machine with this many GB; if not given, this one, or unknown with `gpu_gb`.

        Raises:
            InputError: the size of the data is not known before it is loaded, and not given.
            SystemExit: with status 1, if it does not fit.
        """
        plan = make_plan(self, model, datamodule, images, image_shape, gpu_gb, machine_gb)
        print(plan)
        if not plan.fits:
            raise SystemExit(1)
        return plan

    def best(
        self,
        model: pl.LightningModule,
        run: str,
        datamodule: ReferenceDataModule | None = None,
        checkpoints: str | None = None,
    ) -> None:
        """Measure all kept checkpoints of a run, and tell which is the best; an interrupted measurement goes on.

        Model, data and trainer are those of RUN/config.yaml; append what to measure, `-c configs/evaluate/fid.yaml`.
        Without it the run's own `Fidelity` measures. One row for each checkpoint goes to RUN/checkpoints_fid.csv (named
        by the metric), which `python -m lit_knn.figures.figure4` reads, and the curve to the .png and .pdf beside it.
        The devices, `--trainer.devices`, share the samples of each checkpoint.

        Args:
            model: the module.
            run: folder of the training run, such as runs/table1/version_0, whose config.yaml has model, data and
                trainer; rows and picture go there. Of a resumed training the last one: the others are found. Add what
                measures, -c configs/evaluate/fid.yaml, if the run has no callbacks.Fidelity.
            datamodule: the data.
            checkpoints: folder of the checkpoints, if it is not RUN/checkpoints.

        Raises:
            InputError: nothing to measure with, no kept checkpoint, a table of other settings; and, when all others
                are measured, damaged checkpoints.
        """
        callbacks: list[pl.Callback] = self.callbacks  # type: ignore[has-type]
        measures = [callback for callback in callbacks if isinstance(callback, MeasuresSamples)]
        if not measures:
            raise InputError("best: the run has no callbacks.Fidelity; add -c configs/evaluate/fid.yaml")
        best = BestCheckpoint(measures[-1], run, checkpoints)
        bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
        for bar in bars:
            bar.disable()  # one bar over the checkpoints takes its place
        self.callbacks, self.loggers = [best, *bars], []
        assert datamodule is not None
        datamodule.predict_samples, self.limit_predict_batches = self.world_size, 1  # a trial before the long work
        self.predict(model, datamodule=datamodule, return_predictions=False)
        if best.damaged:
            raise InputError(f"{len(best.damaged)} checkpoint(s) are not measured: {'; '.join(best.damaged)}")
