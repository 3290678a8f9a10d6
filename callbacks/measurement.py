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

SCREEN_DPI = 100


class Measurement(pl.Callback):
    """Base of the callbacks that measure or draw at validation.

    A subclass implements `check` and `evaluate`. Every rank calls both. The constructor raises
    `InputError` for an option out of its range, and `check` for data, a model or a package that
    does not fit; such an error gets the name of the callback in front. `trainer`, `module`, `data`,
    `device` and `run_folder` are there when `check` begins.
    """

    # Others refuse `fit`, because each validation would overwrite the results of the last one.
    in_fit = False
    model_class: type[pl.LightningModule] = pl.LightningModule
    # files that must not be in the run's folder yet, nor another callback's
    outputs: Sequence[str] = ()
    logged: Sequence[str] = ()  # names of values that another callback may log, too

    def check(self) -> None:
        """Check settings and data before any long work."""

    def evaluate(self) -> None:
        """Measure; the network has the averaged weights until the EMA callback runs."""
        raise NotImplementedError

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check model, output files, settings and data before any long work."""
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
        # The first rank decides, so that all ranks stop.
        existing = broadcast(existing)

        for file in self.outputs:
            if any(file in other.outputs for other in self._later()):
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
        """Take trainer, model and data of a run. Every rank must call it."""
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
            held_out: they are the held-out ones, and not those of the reference set.
            may_be_sharded: the reference set may be a sharded one.
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
        """Make a `progress_bar`; it is shown unless the run's bars are off.

        Args:
            total: what it counts to, if that is known.
            description: text before the bar.
            unit: what it counts, with a space before it.
            leave: the bar stays on the screen when it is full.
        """
        shown = self.trainer.progress_bar_callback is not None
        return progress_bar(total, description, unit, leave, shown=shown)

    def log_values(self, values: Mapping[str, float], shown: Sequence[str] = ()) -> None:
        """Log values of samples.

        Every rank must call this with the same values, so that every rank can monitor them. Loggers
        get `samples/NAME`, beside the pictures of samples; callbacks that monitor a value know it
        as NAME. If several callbacks measure a value, the last one logs it: Lightning would log
        their mean.

        Args:
            values: by name.
            shown: the names of those that the progress bar has.
        """
        later: set[str] = set()
        for other in self._later():
            later.update(other.logged)

        for name, value in values.items():
            if name in later:
                continue
            self.module.log(name, value, prog_bar=name in shown, rank_zero_only=True, logger=False)
            self.module.log(f"samples/{name}", value, rank_zero_only=True)

    def _later(self) -> list["Measurement"]:
        """Return the measurements that stand behind this one."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        later = callbacks[callbacks.index(self) + 1 :]
        return [callback for callback in later if isinstance(callback, Measurement)]

    def save_figure(self, figure: Figure, name: str, tag: str | None = None) -> Path:
        """Write NAME.png and NAME.pdf to the run's folder, and give the loggers the picture.

        Args:
            figure: the picture.
            name: of the files.
            tag: name of the picture for the loggers; by default that of the files.

        Returns:
            the path of the first file.
        """
        path, _ = save_figure(figure, self.run_folder / name)
        if self.trainer.loggers:
            figure.set_dpi(SCREEN_DPI)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            show_picture(self.trainer, np.asarray(canvas.buffer_rgba())[..., :3], tag or name)
        return path

    @rank_zero_only
    def save_picture(self, picture: Tensor, path: Path, tag: str, step: int = 0) -> None:
        """Write a picture to a file on the first rank, and give the loggers the same pixels.

        Args:
            picture: (3, H, W) in [0, 1].
            path: of the file.
            tag: name of the picture for the loggers.
            step: number of the step for the loggers.
        """
        with written_whole(path) as partial:
            save_image(picture, partial)
        with Image.open(path) as written:
            show_picture(self.trainer, np.asarray(written.convert("RGB")), tag, step)
