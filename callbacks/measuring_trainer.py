"""Lightning's trainer, which can also measure all kept checkpoints of a run: `python main.py best --run …`."""

import argparse
from collections.abc import Sequence

import pytorch_lightning as pl
import yaml
from pytorch_lightning.callbacks import ProgressBar

from callbacks.best_checkpoint import BestCheckpoint
from callbacks.fidelity import Fidelity
from callbacks.kept_checkpoints import config_of_run
from callbacks.planner import PlanningTrainer
from lit_knn.data import ReferenceDataModule
from lit_knn.errors import InputError

# Of the configuration of a run: the rest is how its training was started.
PARTS_OF_A_RUN = ("seed_everything", "model", "data", "trainer")


class MeasuringTrainer(PlanningTrainer):
    """Lightning's trainer, which can also plan a run, and measure what it kept."""

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
        by the metric), which `python -m callbacks.figure4` reads, and the curve to the .png and .pdf beside it. The
        devices, `--trainer.devices`, share the samples of each checkpoint.

        Args:
            model: the module.
            run: folder of the training run, such as runs/table1/version_0. Of a resumed training the last one: the
                others are found.
            datamodule: the data.
            checkpoints: folder of the checkpoints, if it is not RUN/checkpoints.

        Raises:
            InputError: nothing to measure with, no kept checkpoint, a table of other settings; and, when all others
                are measured, damaged checkpoints.
        """
        callbacks: list[pl.Callback] = self.callbacks  # type: ignore[has-type]
        measures = [callback for callback in callbacks if isinstance(callback, Fidelity)]
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


def with_config_of_run(args: Sequence[str]) -> list[str]:
    """The command line `best --run RUN …` with the configuration of that run before its other options.

    Raises:
        InputError: the folder has no such configuration.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run")
    run = parser.parse_known_args(list(args[1:]))[0].run if args and args[0] == "best" else None
    if run is None:
        return list(args)
    config = {name: value for name, value in config_of_run(run).items() if name in PARTS_OF_A_RUN}
    return ["best", "-c", yaml.safe_dump(config), *args[1:]]
