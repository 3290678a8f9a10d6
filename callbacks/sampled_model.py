"""The interface of a model whose samples are measured."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class SampledModel(Protocol):
    """The interface of a model whose samples are measured."""

    @property
    def step(self) -> int:
        """Number of optimiser steps that the weights have seen."""

    @property
    def images_seen(self) -> int:
        """Number of images that the weights have seen."""

    def sample(self, seeds: Sequence[int] | Tensor, num_steps: int | None = None) -> Tensor:
        """Draw a sample for each seed; returns (B, *shape). By default the model chooses the number of steps."""
