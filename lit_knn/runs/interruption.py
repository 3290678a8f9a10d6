"""Stops a training between two batches when it is asked to by Ctrl-C or SIGTERM."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lit_knn.common.exchange import all_reduce_max, cpu_group, leave
from lit_knn.runs.run import find_callback
from lit_knn.runs.steps import StepCallback

# A terminal sends a Ctrl-C to all processes, and a launcher passes it on to them once more. So two that come within
# this time count as one.
SECONDS_BETWEEN_TWO = 1.0
# A job can ask SLURM to send one of these signals before its time is over. Lightning then saves a checkpoint and queues
# the job again.
REQUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
EXIT_STATUS_OF_SIGNALS = 128  # A shell adds the number of the signal that ended a process.
STDERR = 2  # the file descriptor of standard error
Handler = Callable[[int, FrameType | None], object]
"""A signal handler: it gets the number of a signal, and the frame in which the signal came."""


class RunInterrupted(SystemExit):
    """Says that a signal has ended the run after `step`; `checkpoint` is the last one that was saved.

    The exit status is the shell's, 130 for Ctrl-C and 143 for SIGTERM.
    """

    def __init__(self, signum: int, step: int, checkpoint: str | None) -> None:
        super().__init__(EXIT_STATUS_OF_SIGNALS + signum)
        self.signum = signum
        self.step = step
        self.checkpoint = checkpoint


class Interruption(StepCallback):
    """Notes a signal during a training, and ends the run after the batch, when the checkpoint is saved.

    Within a batch, an end could leave an optimiser step half done. A validation changes no weights, so
    there the run ends at once. A second Ctrl-C always ends the process at once. SLURM's signal to queue
    the job again also waits for the end of the batch.
    """

    def __init__(self) -> None:
        # Signals are numbers, 0 for none. `stops` ends the run after this batch; it is the same on all ranks.
        self.stops = 0
        self._noted = 0  # the signal that has come to this rank
        self._noted_at = 0.0  # the time when it came
        self._requeue_noted = 0  # SLURM's signal that has come to this rank
        self._requeue: Handler | None = None  # Lightning's handler for SLURM's signal
        self._ends_at_once = False  # True in a validation, where a signal need not wait
        self._group: dist.ProcessGroup | None = None  # the ranks, which agree on signals by the CPU

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set this callback's handlers of the signals. Lightning restores the earlier ones when the run ends."""
        self.stops = 0
        self._requeue_noted = 0
        super().on_train_start(trainer, pl_module)
        self._has_open_gradients = False  # True if gradients wait for their step
        # Lightning's handler may have noted a SIGTERM before.
        self._noted = signal.SIGTERM if trainer.received_sigterm else 0
        self._trainer = trainer
        self._group = cpu_group()
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows only the main thread to set handlers.

        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._note)
        if not SLURMEnvironment.detect():
            return
        for signum in REQUEUE_SIGNALS:
            handler = signal.getsignal(signum)
            if callable(handler):
                self._requeue = handler
                signal.signal(signum, self._note_requeue)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the group of processes at the end of the run."""
        self._close_group()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Close the group of processes, because Lightning calls no `teardown` after an error or an interruption."""
        self._close_group()

    def _close_group(self) -> None:
        """Close the group of processes that agree on signals."""
        group = self._group
        self._group = None
        leave(group)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Note whether gradients wait for their step. An end would lose them, so it waits, too."""
        self._has_open_gradients = trainer.global_step == self._step
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Agree with the other ranks whether to stop. The callbacks that save checkpoints are called after this one."""
        self.stops, requeue = all_reduce_max([self._noted, self._requeue_noted], self._group)
        if requeue and self._requeue is not None:
            self._requeue_noted = 0
            self._requeue(requeue, None)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """End the run if a signal came in the batch before."""
        if self.stops:
            raise self._interrupted(self.stops)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let a signal end the run at once from now on, because the checkpoint before the validation is saved."""
        in_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        self._ends_at_once = in_training and not self._has_open_gradients
        signum = self.stops or self._noted
        if self._ends_at_once and signum:
            raise self._interrupted(signum)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let signals wait for the end of a batch again, because checkpoints are saved now and training goes on."""
        self._ends_at_once = False

    def _interrupted(self, signum: int) -> RunInterrupted:
        """Return the exception that ends the run, with the checkpoint that was saved last."""
        saved = None
        # `LastCheckpoint` is the last of them. The checkpoints of the others may be old.
        for callback in reversed(self._trainer.checkpoint_callbacks):
            saved = getattr(callback, "last_saved", None)
            if saved:
                break
        return RunInterrupted(signum, self._trainer.global_step, saved)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C or SIGTERM: note it, or end the run at once in a validation or at a second Ctrl-C."""
        launcher = self._trainer.strategy.launcher
        now = time.monotonic()
        if self._noted:
            if signum == signal.SIGINT and now - self._noted_at > SECONDS_BETWEEN_TWO:
                if launcher is not None:
                    launcher.kill(signal.SIGKILL)
                os._exit(EXIT_STATUS_OF_SIGNALS + signum)
            return

        self._noted = signum
        self._noted_at = now
        if self._trainer.is_global_zero:
            name = signal.Signals(signum).name
            line = f"\n{name}: stopping after this batch; Ctrl-C ends at once\n"
            # `print` would fail if the signal came during another print.
            os.write(STDERR, line.encode())
        if launcher is not None:
            launcher.kill(signum)
        if self._ends_at_once:
            raise self._interrupted(signum)

    def _note_requeue(self, signum: int, frame: FrameType | None) -> None:
        """Handle SLURM's signal: note it until the end of the batch."""
        self._requeue_noted = signum


def stop_signal(trainer: pl.Trainer) -> int:
    """Return the number of the signal that ends the run after this batch, or 0 if none does."""
    interruption = find_callback(trainer, Interruption)
    return 0 if interruption is None else interruption.stops


class EndAtSigterm(pl.Callback):
    """Ends `validate` and `predict` at once at SIGTERM, by `SIGTERMException`; Lightning would only note the signal."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the handler, except for the validations of a training."""
        if trainer.state.fn != "fit":  # `Interruption` ends a training.
            self.on_predict_start(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the handler of SIGTERM. Lightning restores the earlier one when the command ends."""

        def end(signum: int, frame: FrameType | None) -> None:
            signal.signal(signum, signal.SIG_IGN)  # A launcher may send it twice.
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signum)
            raise SIGTERMException

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, end)
