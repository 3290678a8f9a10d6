"""Mean, variance and bias of a random gradient."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class GradientMoments(NamedTuple):
    """Mean and variance of a random gradient g.

    Attributes:
        variance: trace of the covariance of g, unbiased.
        variance_se: standard error of `variance` over the repeats.
        norm_sq: ‖E g‖², unbiased: the squared norm of the sample mean, less variance/R. It may be negative.
        bias_sq: ‖E g − g'‖² for the gradient g' of exact targets, unbiased likewise.
    """

    variance: float
    variance_se: float
    norm_sq: float
    bias_sq: float


def gradient_moments(gradients: Iterable[Tensor], exact: Tensor) -> GradientMoments:
    """Compute the moments from R >= 2 independent draws of the gradient, each (P,).

    `exact` (P,) is the gradient of exact targets.
    """
    g = torch.stack(list(gradients)).double()
    repeats = len(g)
    mean = g.mean(0)
    # The mean of these R numbers is the trace of the covariance, because the sample mean takes one degree of freedom.
    deviations = (g - mean).square().sum(1) * (repeats / (repeats - 1))
    variance = deviations.mean()
    norm_sq = mean.square().sum() - variance / repeats
    bias_sq = (mean - exact).square().sum() - variance / repeats
    return GradientMoments(
        variance.item(), (deviations.std() / repeats**0.5).item(), norm_sq.item(), bias_sq.item()
    )


def flat_gradient(objective: Callable[[], Tensor], parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the gradient of a scalar with respect to all parameters in one vector, (P,); 0 where there is none."""
    with torch.enable_grad():
        own = [each for each in parameters if each.requires_grad]
        found = torch.autograd.grad(objective(), own, allow_unused=True)
    pairs = zip(found, own, strict=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g.detach()).flatten() for g, p in pairs]
    )
