"""Power-function averages of the weights during a training, and snapshots of them (arXiv 2312.02696, EDM2).

An average over the training time (0, T] weights the weights θ(t) by the profile p(t) = (γ+1)·t^γ / T^(γ+1). It is named
by its relative length σ_rel, the standard deviation of its profile divided by T. Times are images seen.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.modules.averaging import MovingAverage

# σ_rel of γ = 0, the plain mean of all weights. Longer averages would prefer the weights of the beginning.
LONGEST = 12**-0.5


def relative_length(gamma: float) -> float:
    """Return σ_rel = (γ+1)^(1/2) (γ+2)^(−1) (γ+3)^(−1/2), Eq. 123 of arXiv 2312.02696."""
    return float((gamma + 1) ** 0.5 / (gamma + 2) / (gamma + 3) ** 0.5)


def exponent(length: float) -> float:
    """Return the γ of a relative length: the solution of Eq. 123 of arXiv 2312.02696, by bisection."""
    if not 0 < length <= LONGEST:
        raise InputError(f"a relative length must be above 0 and at most {LONGEST:.4f}, the plain mean; got {length}")
    # `relative_length` falls with γ ≥ 0, and is below 1/γ.
    low, high = 0.0, 1 / length
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if relative_length(middle) > length else (low, middle)
    return low


def checked_lengths(lengths: Sequence[float]) -> tuple[float, ...]:
    """Return the relative lengths as floats. Raises InputError if there is none, or one is repeated or out of range."""
    lengths = tuple(float(length) for length in lengths)
    if not lengths or len(set(lengths)) < len(lengths):
        raise InputError(f"relative lengths must be different numbers, at least one; got {list(lengths)}")
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
        self._averages = [MovingAverage(model, device, partial(self._decay, exponent(s))) for s in self.lengths]

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

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"lengths": self.lengths, "averages": [average.state_dict() for average in self._averages]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the averages of a checkpoint. Raises InputError if they have other lengths."""
        if state["lengths"] != self.lengths:
            raise InputError(
                f"the checkpoint has averages of the lengths {state['lengths']}, not {self.lengths}: they need the "
                "whole training, so give the same"
            )
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.load_state_dict(saved)


def make_snapshot(
    trainer: pl.Trainer, pl_module: Any, tracked: TrackedAverages, dtype: torch.dtype
) -> dict[str, Any] | None:
    """Collect the averages on the CPU, and all that a checkpoint without an optimiser has. All ranks must call this.

    Returns:
        The snapshot, with float32 weights in `dtype`, or None if an average is not finite in it.
    """
    snapshot: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "hparams_name": "kwargs",
        "hyper_parameters": dict(pl_module.hparams),
    }
    pl_module.on_save_checkpoint(snapshot)
    # The module has not finished the batch yet, and so does not count its images.
    snapshot["images_seen"] = int(pl_module.images_seen)
    del snapshot["batches_done"]
    snapshot["lengths"] = tracked.lengths
    snapshot["averages"] = [{n: _stored(v, dtype) for n, v in each.items()} for each in tracked.weights()]
    finite = all(value.isfinite().all() for each in snapshot["averages"] for value in each.values())
    return snapshot if finite else None


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().to("cpu", dtype if value.dtype == torch.float32 else value.dtype, copy=True)
