"""Track averages of the weights from which an average of any length is made after training."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lit_knn.callbacks.checkpoints import images_seen, passed_multiple
from lit_knn.common.checkpoint_file import Content, kept_in
from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError, check_at_least, prefixed
from lit_knn.common.files import make_folder
from lit_knn.modules.base import EstimatorTraining
from lit_knn.modules.power_averages import TrackedAverages, checked_lengths, make_snapshot
from lit_knn.runs.checkpoints import WholeCheckpointIO
from lit_knn.runs.kept_files import SNAPSHOTS_FOLDER
from lit_knn.runs.steps import StepCallback

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class PowerAverages(StepCallback):
    """Track power-function averages of the weights (EDM2), and store snapshots of them.

    The module's own average of the weights is kept as before. After the training,
    `lit-knn average RUN --ema 0.07` makes a checkpoint of any other length from the snapshots. A
    snapshot is written each time the images seen pass a multiple of `every_n_images`, and at the
    end of the training. Between two snapshots no step waits for a GPU. See docs/training.md.

    Args:
        lengths: relative lengths of the tracked averages: the standard deviation of an average's
            profile, as a share of the training so far. EDM2 (arXiv 2312.02696) tracks 0.05 and
            0.10. Each takes a copy of the weights in the memory of the device, in each checkpoint
            and in each snapshot.
        every_n_images: images between snapshots. With 1/32 of the training or less, the error of
            lengths from 0.03 to 0.20 is at most 1 %. The default is 1/40 of EDM's 200 million images.
        dtype: type of float32 weights in snapshots. float16 halves the files, but rounds. An
            average adds many snapshots with weights of both signs, which enlarges the rounding
            error, about 10 times at length 0.03.
    """

    @prefixed("PowerAverages")
    def __init__(
        self,
        lengths: Sequence[float] = (0.05, 0.10),
        every_n_images: int = 5_000_000,
        dtype: str = "float32",
    ) -> None:
        self.lengths = checked_lengths(lengths)
        check_at_least(1, every_n_images=every_n_images)
        if dtype not in DTYPES:
            raise InputError(f"dtype={dtype} is not one of {', '.join(DTYPES)}")
        self.every_n_images = every_n_images
        self.dtype = dtype
        self._tracked: TrackedAverages | None = None
        self._resumed = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy the module and make the folder of the snapshots when a fit begins."""
        if stage != "fit":
            return
        device = trainer.strategy.root_device
        self._tracked = TrackedAverages(pl_module, device, self.lengths)
        self._resumed = False
        self._folder = Path(trainer.log_dir or trainer.default_root_dir) / SNAPSHOTS_FOLDER
        on_first_rank(lambda: make_folder(self._folder))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the averages begin with the training, and remove later snapshots."""
        seen = images_seen(pl_module)
        if seen and not self._resumed:
            problem = f"the checkpoint, of {seen} images, has no such averages"
            reason = "and they need the whole training"
            advice = "leave the callback out, or start a new training"
            raise InputError(f"PowerAverages: {problem}, {reason}: {advice}")

        super().on_train_start(trainer, pl_module)
        on_first_rank(lambda: self._remove_later(seen))

    def _remove_later(self, seen: int) -> None:
        """Remove the snapshots of more than `seen` images, because the resumed run makes them again.

        Args:
            seen: the images seen at the checkpoint that the run resumes from; 0 for a new training.

        Raises:
            InputError: the training is new, so the snapshots are those of another one.
        """
        for images, path in kept_in(self._folder).items():
            if images <= seen:
                continue
            if not seen:
                problem = f"{path} is of another training"
                raise InputError(f"PowerAverages: {problem}: move {self._folder} away")

            resumes = f"this training resumes from {seen} images"
            rank_zero_warn(f"{path} is removed: {resumes}, and makes it again")
            path.unlink()

    def on_step_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Update the averages, and write a snapshot if it is time."""
        assert self._tracked is not None
        module = cast(EstimatorTraining, pl_module)
        seen = module.images_seen
        self._tracked.update(module, seen - module.images_of_step, seen)

        # The snapshot of the last step is written here and not in `on_train_end`, because a validation
        # lies between them. If that is interrupted, `on_train_end` is never called.
        is_last_step = trainer.global_step == trainer.max_steps
        if is_last_step or passed_multiple(pl_module, self.every_n_images):
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the last snapshot of a training that ends before `max_steps`, such as one that a callback stops."""
        if trainer.global_step != trainer.max_steps:
            self._write(trainer, pl_module)

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write a snapshot of the current averages, or warn if they are not finite."""
        assert self._tracked is not None
        module = cast(EstimatorTraining, pl_module)
        snapshot = make_snapshot(trainer, module, self._tracked, DTYPES[self.dtype])
        if snapshot is None:
            problem = f"an average is not finite in {self.dtype}; no snapshot is written"
            rank_zero_warn(f"PowerAverages: at step {trainer.global_step} {problem}")
            return

        # `kept_in` finds snapshots by this name.
        path = self._folder / f"images_seen={snapshot['images_seen']}.ckpt"
        # A trial (`fast_dev_run`) writes none, because `_remove_later` of the next one would refuse it.
        if not getattr(trainer, "fast_dev_run", False):
            on_first_rank(lambda: WholeCheckpointIO().save_checkpoint(snapshot, path))

    def state_dict(self) -> Content:
        if self._tracked is None:
            return {}
        return self._tracked.state_dict()

    def load_state_dict(self, state_dict: Content) -> None:
        if self._tracked is not None and state_dict:
            with prefixed("PowerAverages"):
                self._tracked.load_state_dict(state_dict)
            self._resumed = True
