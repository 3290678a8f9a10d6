"""Distributions of the times τ at which a flow is trained: uniform, and logit-normal."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.sampling.flow_times import TimeSpan
from lit_knn.theory.noise import LINEAR_PROCESS, Process


class TimeDistribution(TimeSpan, ABC):
    """A distribution of times τ, cut to low <= τ <= high. A subclass implements `cdf` and its inverse, `quantile`.

    The lower end keeps float32 exact enough: a velocity is (z − μ)/τ, so the rounding of z, 6e-8, becomes 6e-8/τ, which
    is 6e-4 at τ = 1e-4. The upper end is below 1, because at τ = 1 the noise level σ = τ/(1 − τ) is infinite and z has
    no trace of x. Times outside the ends are not moved to the ends, but have probability 0. A sampler starts at `high`
    and evaluates no time below `low`.

    Args:
        low: smallest time, above 0.
        high: largest time, below 1.
    """

    def __init__(self, low: float, high: float) -> None:
        super().__init__(low, high)
        before, after = self.cdf(torch.tensor([low, high], dtype=torch.float64)).tolist()
        if not before < after:
            raise InputError(
                f"{type(self).__name__}: there is no probability between low={low} and high={high}"
            )
        # The probability below `low`, and between the ends, before the cut.
        self._before, self._mass = before, after - before

    process: Process = LINEAR_PROCESS
    """The noise process of the times; `LitFlow` sets its own."""

    @abstractmethod
    def cdf(self, tau: Tensor) -> Tensor:
        """Return the probability of a time below `tau`, before the cut; elementwise, float64."""

    @abstractmethod
    def quantile(self, probability: Tensor) -> Tensor:
        """Return the time below which a time is with this probability, before the cut; elementwise, float64."""

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """Draw times, (size,) float64, on the generator's device."""
        uniform = torch.rand(
            size, dtype=torch.float64, generator=generator, device=generator.device
        )
        # Rounding may leave a time one unit of float64 outside the ends.
        return self.quantile(self._before + self._mass * uniform).clamp(self.low, self.high)

    def draw_below(self, tau: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a time from the part of the distribution below each of tau (B,), float64: (B,) float64."""
        uniform = torch.rand(
            len(tau), dtype=torch.float64, generator=generator, device=generator.device
        )
        below = self._before + (self.cdf(tau) - self._before) * uniform
        return torch.minimum(self.quantile(below).clamp(min=self.low), tau)

    def bands(self, count: int) -> Tensor:
        """Divide the range into bands of equal length: their edges, (count + 1,) float64."""
        return torch.linspace(self.low, self.high, count + 1, dtype=torch.float64)

    def noise_range(self) -> tuple[float, float]:
        """Return the noise levels σ of the ends, τ/(1 − τ) on the straight path."""
        low, high = self.process.sigma(
            torch.tensor([self.low, self.high], dtype=torch.float64)
        ).tolist()
        return low, high


class UniformTimes(TimeDistribution):
    """Uniform times, flow matching's own choice (Lipman et al. 2022, arXiv 2210.02747).

    Args:
        low: smallest time.
        high: largest time.
    """

    def __init__(self, low: float = 1e-4, high: float = 1 - 1e-4) -> None:
        super().__init__(low, high)

    def cdf(self, tau: Tensor) -> Tensor:
        return tau

    def quantile(self, probability: Tensor) -> Tensor:
        return probability


class LogitNormalTimes(TimeDistribution):
    """Times whose logit, ln(τ/(1 − τ)), is normal (Esser et al. 2024, arXiv 2403.03206, Eq. 19).

    On the straight path the logit of τ is ln σ. So EDM's log-normal noise levels are
    `LogitNormalTimes(mean=-1.2, std=1.2)`, its P_mean and P_std.

    Args:
        mean: mean of the logit; below 0, there is less noise.
        std: standard deviation of the logit.
        low: smallest time.
        high: largest time.
    """

    def __init__(
        self, mean: float = 0.0, std: float = 1.0, low: float = 1e-4, high: float = 1 - 1e-4
    ) -> None:
        if not 0 < std < math.inf:
            raise InputError(f"LogitNormalTimes: std must be above 0, got {std}")
        if not math.isfinite(mean):
            raise InputError(f"LogitNormalTimes: mean must be finite, got {mean}")
        self.mean = mean
        self.std = std
        super().__init__(low, high)

    def cdf(self, tau: Tensor) -> Tensor:
        return torch.special.ndtr((torch.logit(tau) - self.mean) / self.std)

    def quantile(self, probability: Tensor) -> Tensor:
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(probability))
