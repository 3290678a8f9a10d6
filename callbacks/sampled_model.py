"""What measurements of samples need of a model."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class SampledModel(Protocol):
    """What measurements of samples need of a model."""

    @property
    def step(self) -> int:
        """Number of optimiser steps that the weights have seen."""

    @property
    def images_seen(self) -> int:
        """Number of images that the weights have seen."""

    def sample(self, seeds: Sequence[int] | Tensor, num_steps: int | None = None) -> Tensor:
        """Draw a sample of each seed, (B, *shape)."""
