"""The target of the stable target field by its authors, github.com/Newbeeer/stf."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.others.checkout import OthersEstimator


class STFTarget(OthersEstimator):
    """Their `EDMLoss.stf_targets` with their reference batch: B sources and n - B other images.

    All latents of a batch share these images. Their data loader draws the others without
    repetition.

    Args:
        folder: a checkout of the project.
        n: size of the reference batch.
    """

    project, module, name = "Newbeeer/stf", "training.loss", "EDMLoss"
    uses_source = True

    def __init__(self, folder: Path, n: int) -> None:
        super().__init__(folder)
        self.n = n

    def make(self, their_class: Any) -> Any:
        return their_class()

    def mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        assert x is not None
        others = torch.randperm(self.reference.N)[: self.n - len(z)]
        batch = torch.cat([x, self.reference.take(others)])

        return self.theirs.stf_targets(t, z, batch).reshape(z.shape)
