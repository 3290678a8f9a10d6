"""Make networks faster: compile them, and store them channels last in memory."""

from typing import cast

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, first_line
from lit_knn.modules import LitMeanFlow, LitSCT


class NetworkSpeed(pl.Callback):
    """Make the network of `fit` faster: compile it, and store its weights channels last.

    The network computes the same function. Append the callback to any run with
    `--trainer.callbacks+ lit_knn.callbacks.NetworkSpeed`. Only the network of the training steps is
    compiled, not its averaged copy. Checkpoints can be exchanged with runs that lack the callback.

    With dropout, a compiled network draws its masks from the compiler's own random numbers, so it drops
    other values than an uncompiled one. Student and teacher of `LitICT` still share their masks: a
    compiled network first draws a seed for each layer, in order, from the generator that `LitICT` sets,
    and a mask depends only on its seed and on places in the image. `LitICT` refuses a step in which the
    two drew differently.

    Args:
        compile: use `torch.compile`. The first steps take minutes.
        channels_last: lay weights and activations out channels last, for tensor cores.
        backend: backend of `torch.compile`.
    """

    def __init__(
        self, compile: bool = True, channels_last: bool = True, backend: str = "inductor"
    ) -> None:
        self.compile = compile
        self.channels_last = channels_last
        self.backend = backend

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Change the network in place, before DDP wraps it, so that its parameters keep their names."""
        if stage != "fit":
            return

        # PyTorch would run this network uncompiled, without a word.
        if self.compile and isinstance(pl_module, LitMeanFlow | LitSCT):
            owner = type(pl_module).__name__
            problem = f"PyTorch does not compile forward derivatives, which {owner} takes"
            raise InputError(f"NetworkSpeed: {problem}")

        network = cast(nn.Module, pl_module.network)
        if self.compile:
            self._try_compiler(trainer.strategy.root_device)
        if self.channels_last:
            network.to(memory_format=torch.channels_last)
        if self.compile:
            network.compile(backend=self.backend)

    def _try_compiler(self, device: torch.device) -> None:
        """Compile a small function, and raise InputError if that fails, because the network would fail later."""
        try:
            torch.compile(_double, backend=self.backend)(torch.ones(2, device=device))
        except Exception as error:  # Backends raise errors of their own.
            problem = f"NetworkSpeed: torch.compile with backend={self.backend} does not work here"
            advice = "install what it needs, such as g++, or give compile=false"
            raise InputError(f"{problem} ({first_line(error):.200}): {advice}") from error


def _double(values: Tensor) -> Tensor:
    """Return twice the values; a small function to try the compiler with."""
    return 2 * values
