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

# A launcher passes a Ctrl-C on to processes that already got it from the terminal. Two so close
# together are one.
SECONDS_BETWEEN_TWO = 1.0
# SLURM is asked to send one of these before it ends a job. Lightning then saves a checkpoint and
# queues the job again.
REQUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], object]
"""Gets the number of a signal, and the frame in which it came."""


class RunInterrupted(SystemExit):
    """A signal has ended the run after `step`; `checkpoint` is the last one that was saved.

    The exit status is the shell's: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, signum: int, step: int, checkpoint: str | None) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.step = step
        self.checkpoint = checkpoint


class Interruption(pl.Callback):
    """Notes signals in training, and ends the run after the batch, when checkpoints are saved.

    Inside a batch, an end could leave an optimiser step half done. A validation changes no weights,
    so the run ends at once there. A second Ctrl-C ends the process at once, too. SLURM's signal to
    requeue waits for the end of the batch.
    """

    def __init__(self) -> None:
        self.stops = 0  # The signal that ends the run after this batch; the same on all ranks.
        self._noted, self._noted_at, self._requeue_noted = 0, 0.0, 0
        self._requeue: Handler | None = None
        self._ends_at_once = False
        self._group: dist.ProcessGroup | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the signals. Lightning gives them back when the run ends."""
        self.stops = self._requeue_noted = 0
        self._step, self._open = trainer.global_step, False
        self._noted = signal.SIGTERM if trainer.received_sigterm else 0
        self._trainer = trainer
        self._group = cpu_group()
        if threading.current_thread() is not threading.main_thread():
            return

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
        self._close_group()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Tear down: Lightning does not after a failure or an interruption."""
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
        """Agree with the other ranks whether to stop. Checkpoints are saved after that."""
        self._open = trainer.global_step == self._step
        if self._open:
            return  # Gradients without their step would be lost.

        self._step = trainer.global_step
        self.stops, requeue = all_reduce_max([self._noted, self._requeue_noted], self._group)
        if requeue and self._requeue is not None:
            self._requeue_noted = 0
            self._requeue(requeue, None)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """End the run if a signal has come in the batch before."""
        if self.stops:
            raise self._interrupted(self.stops)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let a signal end the run at once from now on.

        The checkpoint before the validation is saved.
        """
        in_fit = trainer.state.fn == "fit" and not trainer.sanity_checking
        self._ends_at_once = in_fit and not self._open
        signum = self.stops or self._noted
        if self._ends_at_once and signum:
            raise self._interrupted(signum)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let a signal wait again: checkpoints are saved now, and then training goes on."""
        self._ends_at_once = False

    def _interrupted(self, signum: int) -> RunInterrupted:
        """Return the exception that ends the run, with the checkpoint that was saved last."""
        saved = None
        # The last callback is `LastCheckpoint`. Others may have saved long ago.
        for callback in reversed(self._trainer.checkpoint_callbacks):
            saved = getattr(callback, "last_saved", None)
            if saved:
                break
        return RunInterrupted(signum, self._trainer.global_step, saved)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Note a signal; a second Ctrl-C, and any signal in a validation, end the run at once."""
        launcher = self._trainer.strategy.launcher
        now = time.monotonic()
        if self._noted:
            if signum == signal.SIGINT and now - self._noted_at > SECONDS_BETWEEN_TWO:
                if launcher is not None:
                    launcher.kill(signal.SIGKILL)
                os._exit(128 + signum)
            return

        self._noted, self._noted_at = signum, now
        if self._trainer.is_global_zero:
            name = signal.Signals(signum).name
            line = f"\n{name}: stopping after this batch; Ctrl-C ends at once\n"
            # The signal may have come inside a print, which cannot be entered twice.
            os.write(2, line.encode())
        if launcher is not None:
            launcher.kill(signum)
        if self._ends_at_once:
            raise self._interrupted(signum)

    def _note_requeue(self, signum: int, frame: FrameType | None) -> None:
        self._requeue_noted = signum


def stop_signal(trainer: pl.Trainer) -> int:
    """Return the signal that ends the run after this batch, or 0."""
    interruption = find_callback(trainer, Interruption)
    return 0 if interruption is None else interruption.stops


class EndAtSigterm(pl.Callback):
    """Makes SIGTERM end a validation or a prediction at once, by `SIGTERMException`.

    Lightning would only note it.
    """

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit":  # `Interruption` ends a training.
            self.on_predict_start(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the signal. Lightning gives it back when the trainer's work ends."""

        def end(signum: int, frame: FrameType | None) -> None:
            signal.signal(signum, signal.SIG_IGN)  # A launcher may send it twice.
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signum)
            raise SIGTERMException

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, end)
