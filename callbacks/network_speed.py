"""Make networks faster: compile them, and store them channels last in memory."""

from typing import cast

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, first_line
from lit_knn.modules import LitMeanFlow


class NetworkSpeed(pl.Callback):
    """Compile the network of `fit` and lay its weights out channels last.

    The computation stays the same. Append it to any run: `--trainer.callbacks+
    lit_knn.callbacks.NetworkSpeed`. Only the network of the training steps is compiled, not its
    averaged copy. Checkpoints are the same as without it.

    With dropout, a compiled network draws from the compiler's own random stream. So its results
    differ slightly from those of an uncompiled run. Student and teacher of `LitICT` still share
    their masks: a compiled network draws its seeds at once, in the order of its layers, from the
    generator that `LitICT` sets. A mask depends only on its seed and on places in the image.
    `LitICT` refuses a step in which the two drew differently.

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
        """Change the network before DDP reads it.

        It is changed in place, so that its parameters keep their names.
        """
        if stage != "fit":
            return

        # PyTorch says nothing, and runs it as it is.
        if self.compile and isinstance(pl_module, LitMeanFlow):
            problem = "PyTorch does not compile forward derivatives, which LitMeanFlow takes"
            raise InputError(f"NetworkSpeed: {problem}")

        network = cast(nn.Module, pl_module.network)
        if self.compile:
            self._try_compiler(trainer.strategy.root_device)
        if self.channels_last:
            network.to(memory_format=torch.channels_last)
        if self.compile:
            network.compile(backend=self.backend)

    def _try_compiler(self, device: torch.device) -> None:
        """Compile a small function before the long work.

        Without a compiler it fails like the network.
        """
        try:
            torch.compile(_double, backend=self.backend)(torch.ones(2, device=device))
        except Exception as error:  # Backends raise errors of their own.
            problem = f"NetworkSpeed: torch.compile with backend={self.backend} does not work here"
            advice = "install what it needs, such as g++, or give compile=false"
            raise InputError(f"{problem} ({first_line(error):.200}): {advice}") from error


def _double(values: Tensor) -> Tensor:
    return 2 * values
