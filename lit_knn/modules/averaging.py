"""The moving average of a training's weights, updated with few GPU kernels a step and without waiting for the GPU."""

from collections import defaultdict
from collections.abc import Callable
from itertools import chain

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class MovingAverage(AveragedModel):
    """An exponential moving average of parameters and buffers. The first update copies them.

    PyTorch's own update reads `n_averaged` from the device twice a step. Here the count stays on the CPU.

    Args:
        model: the model to average; it is copied.
        device: where the average is.
        decay: returns the weight of the old average in the next update, in [0, 1].
    """

    def __init__(self, model: nn.Module, device: torch.device, decay: Callable[[], float]) -> None:
        super().__init__(model, device, use_buffers=True)
        self.n_averaged = self.n_averaged.cpu()
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move the average towards the values of `model`. All tensors of one number type share a few GPU kernels."""
        averages = _values_by_type(self.module)
        currents = _values_by_type(model)
        first = self.n_averaged.item() == 0

        for dtype, averaged in averages.items():
            # Integers, such as counts in a buffer, have no average.
            if first or not (dtype.is_floating_point or dtype.is_complex):
                torch._foreach_copy_(averaged, currents[dtype])
            else:
                torch._foreach_lerp_(averaged, currents[dtype], 1 - self.decay())
        self.n_averaged += 1


def _values_by_type(model: nn.Module) -> dict[torch.dtype, list[Tensor]]:
    """Return the parameters and buffers of a model by their number type."""
    values: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for value in chain(model.parameters(), model.buffers()):
        values[value.dtype].append(value.detach())
    return values


class Averaging(WeightAveraging):
    """Lightning's callback with a `MovingAverage`: validation, checkpoints and the end of a run use the average.

    Args:
        device: the device of the run. Lightning sets callbacks up before it moves the module.
        decay: see `MovingAverage`.
    """

    def __init__(self, device: torch.device, decay: Callable[[], float]) -> None:
        super().__init__(device)
        self._of_run, self._decay = device, decay

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy the module when a fit begins. Other commands get averaged weights from the checkpoint."""
        self._average_model = None
        if stage == "fit":
            self._average_model = MovingAverage(pl_module, self._of_run, self._decay)
