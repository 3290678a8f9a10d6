"""Lightning's trainer with two more subcommands, `plan` and `best`."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar

from lit_knn.best_checkpoint import BestCheckpoint, MeasuresSamples
from lit_knn.data import ReferenceDataModule
from lit_knn.errors import InputError
from lit_knn.planning import Plan, make_plan


class Trainer(pl.Trainer):
    """Lightning's trainer; it can also plan a run, and measure the kept checkpoints of a run."""

    def plan(
        self,
        model: pl.LightningModule,
        datamodule: ReferenceDataModule | None = None,
        images: int | None = None,
        image_shape: list[int] | None = None,
        gpu_gb: float | None = None,
        machine_gb: float | None = None,
    ) -> Plan:
        """Show how much memory each rank of a fit needs, and whether that is available. Nothing is loaded or built.

        Args:
            model: the module.
            datamodule: the data.
            images: plan for this number of images instead of the data's.
            image_shape: plan for this image shape, such as [3, 64, 64], instead of the data's.
            gpu_gb: plan for GPUs with this many GB each, instead of the devices of this machine.
            machine_gb: plan for a machine with this many GB; by default this machine's, but unknown with `gpu_gb`.

        Raises:
            InputError: the size of the data is not given, and is not known before loading.
            SystemExit: with status 1, if the run does not fit.
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
        """Measure all kept checkpoints of a run and name the best; an interrupted measurement continues.

        Model, data and trainer come from RUN/config.yaml. Add a metric with `-c configs/evaluate/fid.yaml`; without it
        the run's own `Fidelity` measures. RUN/checkpoints_fid.csv (named after the metric) gets one row per checkpoint;
        `python -m lit_knn.figures.figure4` reads it. The curve goes to the .png and .pdf beside it. The devices,
        `--trainer.devices`, share the samples of each checkpoint.

        Args:
            model: the module.
            run: folder of the training run, such as runs/table1/version_0, with its config.yaml; rows and picture go
                there. For a resumed training give the last folder: earlier ones are found. If the run has no
                callbacks.Fidelity, add a metric, -c configs/evaluate/fid.yaml.
            datamodule: the data.
            checkpoints: folder of the checkpoints, if it is not RUN/checkpoints.

        Raises:
            InputError: there is no metric or no kept checkpoint, or the table is from other settings; at the end, if
                checkpoints were damaged.
        """
        callbacks: list[pl.Callback] = self.callbacks  # type: ignore[has-type]
        measures = [callback for callback in callbacks if isinstance(callback, MeasuresSamples)]
        if not measures:
            raise InputError("best: the run has no callbacks.Fidelity; add -c configs/evaluate/fid.yaml")
        best = BestCheckpoint(measures[-1], run, checkpoints)
        bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
        for bar in bars:
            bar.disable()  # One bar over all checkpoints replaces this bar.
        self.callbacks, self.loggers = [best, *bars], []
        assert datamodule is not None
        # `predict` itself draws one sample on each rank, as a trial before the long work.
        datamodule.predict_samples, self.limit_predict_batches = self.world_size, 1
        self.predict(model, datamodule=datamodule, return_predictions=False)
        if best.damaged:
            raise InputError(f"{len(best.damaged)} checkpoint(s) are not measured: {'; '.join(best.damaged)}")
