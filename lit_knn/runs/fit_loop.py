"""Lightning's loops. A resumed run first repeats the validation that was interrupted; no batch waits for a signal."""

from typing import Any

from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over batches, without its exchange of signals before each batch.

    That exchange waits for the GPU. `Interruption` does the same on the CPU.
    """

    def _broadcast_sigterm_tensor(self) -> None:
        pass


class ResumingFitLoop(_FitLoop):
    """Also repeats a validation after the last step, where Lightning would end at once."""

    @property
    def done(self) -> bool:
        """Tell whether training has ended, and with it the last validation."""
        return not self._validation_is_left() and super().done

    def advance(self) -> None:
        """Run an epoch. A resumed one first sets the loggers' count of steps, so that it continues.

        Lightning adds one for a batch whose validation had not begun, and one for a step with a validation.
        """
        if self.restarting and self._data_fetcher is not None:
            validates = self.epoch_loop._should_check_val_fx(self._data_fetcher)
            self.epoch_loop._batches_that_stepped = self.epoch_loop.global_step - self._is_due() - validates
        super().advance()

    def _validation_is_left(self) -> bool:
        """Tell whether the checkpoint was saved before a validation that is due at its step."""
        if not self.restarting or self._data_fetcher is None or not self._is_due():
            return False
        return self.epoch_loop._should_check_val_fx(self._data_fetcher)

    def _is_due(self) -> bool:
        progress: Any = self.epoch_loop.val_loop.batch_progress.total
        return progress.started > progress.processed
