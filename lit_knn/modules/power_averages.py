"""Power-function averages of the weights of a training (EDM2, arXiv 2312.02696).

Such an average is ∫ p(t)·θ(t) dt over the training time (0, T], with the network's weights θ(t) and the profile
p(t) = (γ+1)·t^γ / T^(γ+1). An average is named by its relative length σ_rel, the standard deviation of its profile
divided by T. Times are numbers of images seen.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lit_knn.common.checkpoint_file import Content, not_finite
from lit_knn.common.errors import InputError
from lit_knn.modules.averaging import MovingAverage
from lit_knn.runs.clock import TrainingClock
from lit_knn.runs.run import find_callback
from lit_knn.runs.same_run import SameRun

# σ_rel of γ = 0, the plain mean of all weights: 12^(−1/2), rounded up so that users can give it. Longer averages would
# prefer the weights of the beginning.
LONGEST = 0.2887


def exponent(length: float) -> float:
    """Return the γ of a relative length: σ_rel = (γ+1)^(1/2) (γ+2)^(−1) (γ+3)^(−1/2), Eq. 123 of arXiv 2312.02696."""
    if not 0 < length <= LONGEST:
        raise InputError(
            f"a relative length must be above 0 and at most {LONGEST}, the plain mean; got {length}"
        )
    # Squared, the equation is (γ+2)² (γ+3) = t·(γ+1), a polynomial equation whose largest root is γ.
    t = length**-2
    return max(float(np.roots([1, 7, 16 - t, 12 - t]).real.max()), 0.0)


def checked_lengths(lengths: Sequence[float]) -> tuple[float, ...]:
    """Return the relative lengths as floats. Raises InputError if there is none, or one is repeated or out of range."""
    lengths = tuple(float(length) for length in lengths)
    if not lengths or len(set(lengths)) < len(lengths):
        raise InputError(
            f"relative lengths must be different numbers, at least one; got {list(lengths)}"
        )
    for length in lengths:
        exponent(length)
    return lengths


class TrackedAverages:
    """Power-function averages of the parameters and buffers of a module, one for each relative length.

    Nothing is read from the device.

    Args:
        model: the module. It is copied, once for each length.
        device: where the averages are.
        lengths: relative lengths.
    """

    def __init__(self, model: nn.Module, device: torch.device, lengths: Sequence[float]) -> None:
        self.lengths = list(lengths)
        self._before, self._now = 0, 0
        self._averages = []
        for length in self.lengths:
            decay = partial(self._decay, exponent(length))
            self._averages.append(MovingAverage(model, device, decay))

    def _decay(self, gamma: float) -> float:
        """Return β = (before/now)^(γ+1), the weight of the old average, Eq. 127 of arXiv 2312.02696.

        The updates at t_1 < t_2 < … < T give θ(t_i) exactly the share of the profile between t_{i−1} and t_i, t_0 = 0.
        """
        return float((self._before / self._now) ** (gamma + 1))

    def update(self, model: nn.Module, before: int, now: int) -> None:
        """Add the weights of `model` after a step, which moved the images seen from `before` to `now`."""
        self._before, self._now = before, now
        for average in self._averages:
            average.update_parameters(model)

    def weights(self) -> list[dict[str, Tensor]]:
        """Return the averaged weights by name, for each length; they are not copied."""
        return [average.module.state_dict() for average in self._averages]

    def state_dict(self) -> Content:
        """Return what a checkpoint keeps."""
        return {
            "lengths": self.lengths,
            "averages": [average.state_dict() for average in self._averages],
        }

    def load_state_dict(self, state: Content) -> None:
        """Go on from the averages of a checkpoint. Raises InputError if they have other lengths."""
        if state["lengths"] != self.lengths:
            problem = f"the checkpoint has averages of the lengths {state['lengths']}"
            advice = "they need the whole training, so give the same"
            raise InputError(f"{problem}, not {self.lengths}: {advice}")
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.load_state_dict(saved)


def make_snapshot(
    trainer: pl.Trainer, module: pl.LightningModule, tracked: TrackedAverages, dtype: torch.dtype
) -> Content | None:
    """Collect the averages on the CPU, and all that a checkpoint without an optimiser has. All ranks must call this.

    Returns:
        The snapshot, with float32 weights in `dtype`, or None if an average is not finite in it.
    """
    snapshot: Content = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "hparams_name": "kwargs",
        "hyper_parameters": dict(module.hparams),
    }
    module.on_save_checkpoint(snapshot)
    for callback in (find_callback(trainer, TrainingClock), find_callback(trainer, SameRun)):
        if callback is not None:
            callback.on_save_checkpoint(trainer, module, snapshot)

    averages = []
    for weights in tracked.weights():
        averages.append({name: _stored(value, dtype) for name, value in weights.items()})
    snapshot["lengths"] = tracked.lengths
    snapshot["averages"] = averages

    if any(not_finite(weights) for weights in averages):
        return None
    return snapshot


def _stored(value: object, dtype: torch.dtype) -> object:
    """Copy a value to the CPU, and float32 weights to `dtype`. An extra state that is no tensor stays as it is."""
    if not isinstance(value, Tensor):
        return value
    dtype = dtype if value.dtype == torch.float32 else value.dtype
    return value.detach().to("cpu", dtype, copy=True)
