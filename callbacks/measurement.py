"""The base of the callbacks that measure or draw at validation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torchvision.utils import save_image
from tqdm import tqdm

from lit_knn.callbacks.picture_loggers import show_picture
from lit_knn.common.distributed import broadcast
from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.files import written_whole
from lit_knn.common.progress import progress_bar
from lit_knn.figures import save_figure
from lit_knn.reference import ReferenceSet
from lit_knn.runs.run import data_reference

# Dots per inch of the pictures that loggers get. Files have more, for print.
SCREEN_DPI = 100


class Measurement(pl.Callback):
    """Base of the callbacks that measure or draw at validation.

    A subclass implements `check` and `evaluate`. Every rank calls both. The constructor raises `InputError` for an
    option out of its range, and `check` raises it for data, a model or a package that does not fit; the message begins
    with the name of the callback. `trainer`, `module`, `data`, `device` and `run_folder` are set before `check` is
    called.
    """

    # This is True if `fit` may use the callback. Most refuse it, because each validation would overwrite the results
    # of the one before.
    in_fit = False
    # The class that the model must have.
    model_class: type[pl.LightningModule] = pl.LightningModule
    # The files that the callback writes. None may exist yet, and no other callback may write them.
    outputs: Sequence[str] = ()
    # The names of the values that the callback logs. Other callbacks may log values of the same name.
    logged: Sequence[str] = ()

    def check(self) -> None:
        """Raise InputError if the measurement is not possible with these settings and data."""

    def evaluate(self) -> None:
        """Measure or draw. At this moment the network has its averaged weights."""
        raise NotImplementedError

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the model, the output files, the settings and the data before any long work."""
        name = type(self).__name__
        if stage == "fit" and not self.in_fit:
            raise InputError(f"{name} is for validate, not for fit")
        if stage not in ("fit", "validate"):
            return

        with prefixed(name):
            if not isinstance(pl_module, self.model_class):
                needed, model = self.model_class.__name__, type(pl_module).__name__
                raise InputError(f"needs the model {needed}, got {model}")
            self.join(trainer, pl_module)
            self._check_outputs()
            self.check()

    def _check_outputs(self) -> None:
        """Raise InputError if another callback writes a file of `outputs`, or if one exists."""
        existing = [file for file in self.outputs if (self.run_folder / file).exists()]
        # All ranks take the first rank's list, so that all of them stop.
        existing = broadcast(existing)

        for file in self.outputs:
            if any(file in other.outputs for other in self._later_measurements()):
                raise InputError(f"another callback of this run also writes {file}")
        if existing:
            path = self.run_folder / existing[0]
            raise InputError(f"{path} exists; nothing is overwritten, use another folder")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.join(trainer, pl_module)
        if not trainer.sanity_checking:
            with prefixed(type(self).__name__):
                self.evaluate()

    def join(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the attributes for the trainer, the model, the data and the folder of a run. Every rank must call it."""
        self.trainer, self.module = trainer, cast(Any, pl_module)
        self.data: object = getattr(trainer, "datamodule", None)
        self.device = trainer.strategy.root_device
        # Every rank must read `log_dir`, because reading it is a collective operation.
        self.run_folder = Path(trainer.log_dir or trainer.default_root_dir)

    @property
    def seed(self) -> int:
        """Seed of the run, which is the option `--seed_everything`."""
        return int(self.module.seed)

    @property
    def reference(self) -> ReferenceSet:
        """The whole reference set of the run's data."""
        return data_reference(self.trainer)

    def real_images(self, held_out: bool, may_be_sharded: bool = False) -> ReferenceSet:
        """Return the images that samples are compared with.

        Args:
            held_out: return the held-out images, and not those of the reference set.
            may_be_sharded: accept a sharded reference set.
        """
        reference = data_reference(self.trainer, may_be_sharded)
        if not held_out:
            return reference

        images: ReferenceSet | None = getattr(self.data, "held_out_reference", None)
        if images is None:
            raise InputError(
                "held_out=true: the data holds no images out: set data.held_out to their number"
            )
        return images

    def bar(self, total: int | None, description: str, unit: str, leave: bool = False) -> tqdm:
        """Make a progress bar, which is hidden if the run shows no bars.

        Args:
            total: the number that it counts to, or None if it is not known.
            description: text before the bar.
            unit: what it counts, with a space before it.
            leave: keep the bar on the screen when it is full.
        """
        shown = self.trainer.progress_bar_callback is not None
        return progress_bar(total, description, unit, leave, shown=shown)

    def log_values(self, values: Mapping[str, float], shown: Sequence[str] = ()) -> None:
        """Log measured values of samples.

        Loggers get them as `samples/NAME`, beside the pictures of samples. Callbacks that monitor a
        value, such as early stopping, find it as NAME; so that they find it on every rank, every rank must
        call this with the same values. If several callbacks measure a value of the same name, only the
        last of them logs it, because Lightning would log their mean.

        Args:
            values: the values by name.
            shown: the names of the values that the progress bar shows.
        """
        logged_later: set[str] = set()
        for other in self._later_measurements():
            logged_later.update(other.logged)

        for name, value in values.items():
            if name in logged_later:
                continue
            self.module.log(name, value, prog_bar=name in shown, rank_zero_only=True, logger=False)
            self.module.log(f"samples/{name}", value, rank_zero_only=True)

    def _later_measurements(self) -> list["Measurement"]:
        """Return the measurements that come after this one in the trainer's list of callbacks."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        later = callbacks[callbacks.index(self) + 1 :]
        return [callback for callback in later if isinstance(callback, Measurement)]

    def save_figure(self, figure: Figure, name: str, tag: str | None = None) -> Path:
        """Write NAME.png and NAME.pdf to the run's folder, and give the loggers the picture.

        Args:
            figure: the picture.
            name: name of the files without their endings.
            tag: name of the picture for the loggers; by default that of the files.

        Returns:
            The path of the .png file.
        """
        path, _ = save_figure(figure, self.run_folder / name)
        if self.trainer.loggers:
            figure.set_dpi(SCREEN_DPI)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            rgb = np.asarray(canvas.buffer_rgba())[..., :3]
            show_picture(self.trainer, rgb, tag or name)
        return path

    @rank_zero_only
    def save_picture(self, picture: Tensor, path: Path, tag: str, step: int = 0) -> None:
        """Write a picture to a file on the first rank, and give the loggers the same pixels.

        Args:
            picture: the picture, (3, H, W) in [0, 1].
            path: path of the file.
            tag: name of the picture for the loggers.
            step: number of the step for the loggers.
        """
        with written_whole(path) as partial:
            save_image(picture, partial)
        with Image.open(path) as written:
            show_picture(self.trainer, np.asarray(written.convert("RGB")), tag, step)
