"""TrigFlow's terms for latents and networks of the EDM process (Lu & Song 2024, arXiv 2410.11081)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.nets.forward_derivative import value_and_derivative
from lit_knn.theory.noise import per_item

Output = Callable[[Tensor, Tensor], Tensor]
"""The network F: (x_t/σ_d (B, *shape), noise label (B,)) -> (B, *shape)."""

# The noise label is ln(σ)/4, and cos(t)·sin(t) times the derivative of ln(tan t) is 1.
LABEL_RATE = 0.25


class TrigFlow(NamedTuple):
    """Latents x_t = cos(t)·x + sin(t)·ε of TrigFlow, ε ~ N(0, σ_d²·I), 0 <= t <= π/2 (their Section 3).

    x_t is cos(t) times the EDM process's latent at noise level σ = σ_d·tan(t) (their Eq. 30). A consistency function is
    f = cos(t)·x_t − sin(t)·σ_d·F(x_t/σ_d, t). EDM's coefficients are the same: c_skip·z = cos(t)·x_t,
    c_out = σ_d·sin(t) and c_in·z = x_t/σ_d. So F is minus the raw network inside EDM's preconditioning.
    """

    x_t: Tensor  # (B, *shape)
    cos: Tensor  # (B, 1, …, 1), in the type of x_t
    sin: Tensor  # (B, 1, …, 1), in the type of x_t
    sigma_data: float  # σ_d
    label: Tensor  # (B,), EDM's noise label ln(σ)/4, in the type of x_t

    @classmethod
    def of(cls, z: Tensor, sigma: Tensor, sigma_data: float) -> "TrigFlow":
        """Convert latents of the EDM process.

        Args:
            z: (B, *shape), latents x + σε.
            sigma: (B,) float64, their noise levels.
            sigma_data: standard deviation of the data.
        """
        total = torch.sqrt(sigma.square() + sigma_data**2)
        cos = per_item(sigma_data / total, z).to(z.dtype)
        sin = per_item(sigma / total, z).to(z.dtype)
        return cls(cos * z, cos, sin, sigma_data, label=(sigma.log() / 4).to(z.dtype))

    def evaluate(self, output: Output) -> Tensor:
        """Return F, (B, *shape), in the type of x_t."""
        return output(self.x_t / self.sigma_data, self.label).to(self.x_t.dtype)

    @torch.no_grad()
    def tangent(self, output: Output, mean: Tensor, share: float = 1.0) -> Tensor:
        """Return g = cos(t)·df/dt along the probability flow, (B, *shape), without gradient (their Algorithm 1).

        g = −cos²(t)·(σ_d·F − v) − share·cos(t)·sin(t)·(x_t + σ_d·dF/dt) with the velocity v = dx_t/dt =
        cos(t)·E[ε|x_t] − sin(t)·E[x|x_t]. A consistency function has g = 0 everywhere. The derivative is taken in the
        direction cos(t)·sin(t)·(v/σ_d, 1), which is finite at both ends of t (their Section 5.1, "JVP rearrangement").

        Args:
            output: F.
            mean: (B, *shape), the posterior mean E[x|x_t].
            share: weight r of the part with dF/dt, for the warm-up; with 0, g is the error of the velocity.
        """
        x_t, cos, sin, sigma_data, label = self
        scaled_velocity = cos * (cos * x_t - mean)  # cos(t)·sin(t)·v
        directions = scaled_velocity / sigma_data, torch.full_like(label, LABEL_RATE)
        point = x_t / sigma_data, label
        value, derivative = value_and_derivative(output, point, directions)

        velocity = scaled_velocity / (cos * sin)
        error_of_velocity = cos.square() * (sigma_data * value - velocity)
        return -error_of_velocity - share * (cos * sin * x_t + sigma_data * derivative)
