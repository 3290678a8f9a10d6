"""Noise processes z = s(t)·(x + σ(t)·ε): EDM's (σ(t) = t, s(t) = 1) and others (appendix, ap:general_diffusion).

Dividing z by s(t) turns every process into the EDM process at noise level σ(t). So an estimator needs only one
posterior mean, μ(y, σ) = E[x | x + σε = y], and `under_process` evaluates it at (z / s(t), σ(t)).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from lit_knn.common.errors import InputError

# Maximum doublings, from 1 to about 1e30, and number of bisections in a search for a time. So many bisections reach
# the precision of float64.
SEARCH_STEPS = 100


def per_item(t: Tensor | float, like: Tensor) -> Tensor:
    """Reshape `t`, () or (B, 1, …), to () or (B, 1, …, 1), to broadcast over `like`, (B, *shape), on its device."""
    if isinstance(t, Real):
        # A number that `torch.full` writes does not make the CPU wait for a GPU, and a copy from the CPU would.
        return torch.full((), t, dtype=torch.float64, device=like.device)
    if not isinstance(t, Tensor):
        raise InputError(f"t must be a number or a tensor, got {t!r}")
    if (t.ndim > 1 and t.numel() != t.shape[0]) or t.is_complex():
        raise InputError(
            f"t must be real, a scalar or ({len(like)},), got {t.dtype} {tuple(t.shape)}"
        )
    t = t.to(like.device)
    return t if t.ndim == 0 else t.reshape(-1, *[1] * (like.ndim - 1))


class Process(ABC):
    """A noise process, p_t(z|x) = N(z; s(t)·x, s(t)²σ(t)²·I) (eq:general_forward). σ increases from σ(0) = 0.

    A subclass implements `sigma` and `scale`. The base class computes the derivatives of both and the inverse of σ.
    Closed forms in a subclass are faster and lose no digits at the ends. All methods work elementwise on float tensors
    of any shape. A dot marks the derivative with respect to t.
    """

    growth: float = 1.0
    """The exponent with which σ grows near 0, σ ∝ t^growth. Samplers of flows take equal steps in t^growth."""

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor:
        """Return σ(t), the noise level in z / s(t)."""

    @abstractmethod
    def scale(self, t: Tensor) -> Tensor:
        """Return s(t), the factor that multiplies the clean data in z."""

    def sigma_derivative(self, t: Tensor) -> Tensor:
        """Return σ̇(t)."""
        return _derivative(self.sigma, t)

    def scale_derivative(self, t: Tensor) -> Tensor:
        """Return ṡ(t)."""
        return _derivative(self.scale, t)

    def t_of_sigma(self, sigma: Tensor) -> Tensor:
        """Find the time t with σ(t) = `sigma`, by bisection in float64. Raises InputError if there is no such time."""
        level = sigma.double()
        low, high = torch.zeros_like(level), torch.ones_like(level)
        # Double `high` until its noise level is large enough, and then halve the interval from `low` to `high`.
        for _ in range(SEARCH_STEPS):
            high = torch.where(self.sigma(high) < level, 2 * high, high)
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            below = self.sigma(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        missed = ~torch.isclose(self.sigma(high), level, rtol=1e-6)
        if missed.any():
            raise InputError(
                f"{type(self).__name__}: no t has the noise level σ(t)={level[missed][0].item():g}"
            )
        return high.to(sigma.dtype)

    def noise_std(self, t: Tensor) -> Tensor:
        """Return s(t)·σ(t), the standard deviation of z given x."""
        return self.scale(t) * self.sigma(t)

    def mean_of_velocity(self, z: Tensor, t: Tensor, velocity: Tensor) -> Tensor:
        """Return the posterior mean μ that has the given velocity, (B, *shape). This inverts `velocity`.

        Args:
            z: (B, *shape).
            t: time, broadcasts over z.
            velocity: (B, *shape).
        """
        s = self.scale(t)
        drift = self.scale_derivative(t) / s * z
        return (z - self.sigma(t) / self.sigma_derivative(t) * (velocity - drift)) / s

    def velocity(self, z: Tensor, t: Tensor, mu: Tensor) -> Tensor:
        """Return dz/dt of the probability flow ODE for t > 0: (ṡ/s)·z + (σ̇/σ)·(z − s·μ), (B, *shape).

        This is Eq. 4 of Karras et al. 2022 (eq:general_pfode) with ∇_z log p(z/s; σ) = (μ − z/s) / (s·σ²).

        Args:
            z: (B, *shape).
            t: time, broadcasts over z.
            mu: (B, *shape), the posterior mean E[x | z/s(t), σ(t)].
        """
        s = self.scale(t)
        return self.scale_derivative(t) / s * z + self.sigma_derivative(t) / self.sigma(t) * (
            z - s * mu
        )


def _derivative(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """Return the derivative of an elementwise function at t."""
    # A copy, because forward mode refuses expanded tensors.
    t = t.clone(memory_format=torch.contiguous_format)
    return torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]


class EDM(Process):
    """The process of the paper and of Karras et al. 2022: σ(t) = t, s(t) = 1, so that time is the noise level."""

    def sigma(self, t: Tensor) -> Tensor:
        return t

    def scale(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def t_of_sigma(self, sigma: Tensor) -> Tensor:
        return sigma

    def velocity(self, z: Tensor, t: Tensor, mu: Tensor) -> Tensor:
        """Return (z − μ) / t: Eq. 3 (eq:pfode) with the score of Eq. 5 (eq:clean_score)."""
        return (z - mu) / t


class VP(Process):
    """The variance-preserving process (appendix, ap:general_diffusion; Karras et al. 2022, Table 1), 0 <= t <= 1.

    With u(t) = β_d·t²/2 + β_min·t: s(t) = e^(−u/2) and σ(t) = sqrt(e^u − 1), so that s²·(1 + σ²) = 1.

    Args:
        beta_d: growth of the noise rate, β_d >= 0.
        beta_min: noise rate at t = 0, β_min > 0.
    """

    growth = 0.5

    def __init__(self, beta_d: float = 19.9, beta_min: float = 0.1) -> None:
        if not (beta_d >= 0 and beta_min > 0):
            raise InputError(
                f"VP: need beta_d >= 0 and beta_min > 0, got beta_d={beta_d} and beta_min={beta_min}"
            )
        self.beta_d = beta_d
        self.beta_min = beta_min

    def _u(self, t: Tensor) -> Tensor:
        return (self.beta_d / 2 * t + self.beta_min) * t

    def _u_derivative(self, t: Tensor) -> Tensor:
        return self.beta_d * t + self.beta_min

    def sigma(self, t: Tensor) -> Tensor:
        return torch.expm1(self._u(t)).sqrt()

    def sigma_derivative(self, t: Tensor) -> Tensor:
        """Return σ̇(t) = u̇·e^u / 2σ, which is infinite at t = 0."""
        return self._u_derivative(t) * self._u(t).exp() / (2 * self.sigma(t))

    def scale(self, t: Tensor) -> Tensor:
        return (-self._u(t) / 2).exp()

    def scale_derivative(self, t: Tensor) -> Tensor:
        return -self._u_derivative(t) * self.scale(t) / 2

    def t_of_sigma(self, sigma: Tensor) -> Tensor:
        """Return the positive root t of β_d·t²/2 + β_min·t = ln(1 + σ²), in a form that loses no digits at small σ."""
        u = torch.log1p(sigma.square())
        return 2 * u / ((self.beta_min**2 + 2 * self.beta_d * u).sqrt() + self.beta_min)


class LinearInterpolant(Process):
    """The straight path of flow matching, z = (1 − t)·x + t·ε: s(t) = 1 − t and σ(t) = t / (1 − t), 0 < t < 1."""

    def sigma(self, t: Tensor) -> Tensor:
        return t / (1 - t)

    def scale(self, t: Tensor) -> Tensor:
        return 1 - t

    def t_of_sigma(self, sigma: Tensor) -> Tensor:
        return sigma / (1 + sigma)

    def noise_std(self, t: Tensor) -> Tensor:
        """Return s(t)·σ(t) = t, also at t = 1, where σ is infinite."""
        return t

    def mean_of_velocity(self, z: Tensor, t: Tensor, velocity: Tensor) -> Tensor:
        """Return z − t·v, also at t = 1."""
        return z - t * velocity

    def velocity(self, z: Tensor, t: Tensor, mu: Tensor) -> Tensor:
        """Return (z − μ) / t = E[ε − x | z], for 0 < t <= 1. Unlike the general formula, it is finite at t = 1."""
        return (z - mu) / t


EDM_PROCESS = EDM()
LINEAR_PROCESS = LinearInterpolant()


def forward_noise(
    x: Tensor, t: Tensor | float, noise: Tensor, process: Process = EDM_PROCESS
) -> Tensor:
    """Draw z = s(t)·(x + σ(t)·ε), (B, *shape) in the dtype of `x`, from p_t(z|x) (below Eq. 2; eq:general_forward).

    Args:
        x: (B, *shape), clean data.
        t: (B,) or scalar, time (the noise level in the EDM process).
        noise: (B, *shape), standard normal ε.
        process: the noise process.
    """
    if not x.is_floating_point():
        raise InputError(f"x must be float, in model space, got {x.dtype}")
    t = per_item(t, x).double()
    return process.scale(t).to(x.dtype) * x + process.noise_std(t).to(x.dtype) * noise


def under_process(posterior_mean: Callable[..., Tensor], process: Process) -> Callable[..., Tensor]:
    """Turn a posterior mean of the EDM process into a posterior mean of `process` (appendix, alg:general_estimator).

    E[x|z,t] under `process` is the EDM mean at z / s(t) and noise level σ(t). So every estimator and denoiser works
    under every process: `under_process(estimator.posterior_mean, VP())`.

    Args:
        posterior_mean: (y (B, *shape), sigma (B,) or scalar, float64, ...) -> E[x | x + σε = y].
        process: the noise process.

    Returns:
        (z (B, *shape), t (B,) or scalar, ...) -> E[x|z,t]. It passes further arguments (`x_source`, `generator`) on
        unchanged.
    """

    def mean(z: Tensor, t: Tensor | float, *args: object, **kwargs: object) -> Tensor:
        t = (t if isinstance(t, Tensor) else per_item(t, z)).to(z.device, torch.float64)
        y = z.double() / process.scale(per_item(t, z))
        return posterior_mean(y.to(z.dtype), process.sigma(t), *args, **kwargs)

    return mean
