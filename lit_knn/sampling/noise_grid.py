"""Noise levels for training and sampling: the Karras grid."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lit_knn.common.errors import InputError, check_at_least, check_positive


class LevelRange(Protocol):
    """A range of noise levels, or of times, that a training divides into bands for its log."""

    def bands(self, count: int) -> Tensor:
        """Return the count + 1 edges of the bands, ascending, float64."""

    def noise_range(self) -> tuple[float, float]:
        """Return the lowest and the highest noise level σ."""


@dataclass(frozen=True)
class NoiseGrid:
    """Noise levels for training and sampling, Karras et al. 2022, Eq. 5.

    Attributes:
        sigma_min: smallest noise level.
        sigma_max: largest noise level.
        rho: exponent; larger puts more levels at small noise.
    """

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            ends = f"{self.sigma_min} and {self.sigma_max}"
            raise InputError(f"need 0 < sigma_min < sigma_max, got {ends}")
        # Others would give a grid of other levels, or one level several times.
        check_positive(rho=self.rho)

    def noise_range(self) -> tuple[float, float]:
        """Return the lowest and the highest noise level σ."""
        return self.sigma_min, self.sigma_max

    def ascending(self, num_steps: int) -> Tensor:
        """Return levels for training, (num_steps,) float64: t_1 = sigma_min < … < t_N = sigma_max of Eq. 7 (eq:CM)."""
        check_at_least(2, num_steps=num_steps)
        ramp = torch.linspace(0, 1, num_steps, dtype=torch.float64)
        ends = torch.tensor([self.sigma_min, self.sigma_max], dtype=torch.float64)
        low, high = ends ** (1 / self.rho)
        sigmas = (low + ramp * (high - low)) ** self.rho
        # The powers have rounding errors, but f(x, t_min) = x needs the exact ends.
        sigmas[0], sigmas[-1] = self.sigma_min, self.sigma_max
        return sigmas

    def descending(self, num_steps: int) -> Tensor:
        """Return levels for a sampler, (num_steps,) float64, descending. A single level is sigma_max."""
        check_at_least(1, num_steps=num_steps)
        # `ascending` makes at least two levels, of which a single step takes the highest.
        return self.ascending(max(num_steps, 2)).flip(0)[:num_steps]

    def bands(self, count: int) -> Tensor:
        """Return the edges of bands of equal width in ln t, (count + 1,) float64, ascending."""
        edges = torch.linspace(
            math.log(self.sigma_min), math.log(self.sigma_max), count + 1, dtype=torch.float64
        )
        return edges.exp()


EDM_GRID = NoiseGrid()


def karras_sigmas(
    num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0
) -> Tensor:
    """Return the levels of Karras et al. 2022, Eq. 5, (num_steps,) float64, ascending.

    This is `NoiseGrid.ascending` in one call.

    Args:
        num_steps: number of levels.
        sigma_min: smallest noise level.
        sigma_max: largest noise level.
        rho: exponent; larger puts more levels at small noise.
    """
    return NoiseGrid(sigma_min, sigma_max, rho).ascending(num_steps)
