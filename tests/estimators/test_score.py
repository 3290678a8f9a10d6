"""Scores and targets under any noise process against autograd of the log marginal, by enumeration in float64."""

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from lit_knn.estimators import Exact, SubspaceKNN
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import EDM, VP, LinearInterpolant, forward_noise, per_item, under_process

N = 12
# Each process uses the levels that it can reach.
TIMES = torch.tensor([0.05, 0.3, 0.6, 0.9], dtype=torch.float64)


def small_set():
    x = torch.randn(N, 2, 3, generator=torch.Generator().manual_seed(3))
    return x, ReferenceSet(x)


def latents(x, t, process, dtype=torch.float64):
    noise = torch.randn(len(t), *x.shape[1:], generator=torch.Generator().manual_seed(4))
    return forward_noise(x[: len(t)].to(dtype), t, noise.to(dtype), process)


def gradient_of_log_marginal(x, z, t, process):
    """Compute ∇_z log (1/N) Σ_i N(z; s·x_i, s²σ²·I), eq:general_forward, by autograd."""
    z = z.double().requires_grad_()
    s, std = (
        v.reshape(-1, 1, 1, 1) for v in (process.scale(t), process.scale(t) * process.sigma(t))
    )
    log_p = Normal(s * x.double(), std).log_prob(z.unsqueeze(1)).flatten(2).sum(2)
    return torch.autograd.grad(torch.logsumexp(log_p, dim=1).sum(), z)[0]


@pytest.mark.parametrize(
    "process", [EDM(), VP(), VP(beta_d=0.0, beta_min=2.0), LinearInterpolant()], ids=range(4)
)
# With n = N the sampling estimator is exact up to the rounding of float32 weights and images.
@pytest.mark.parametrize(
    ("estimator", "most"), [(Exact(), 1e-9), (SubspaceKNN(2, N, "float32"), 2e-5)], ids=range(2)
)
def test_the_score_is_the_gradient_of_the_log_marginal(process, estimator, most):
    x, reference = small_set()
    z = latents(x, TIMES, process)
    expected = gradient_of_log_marginal(x, z, TIMES, process)
    score = estimator.bind(reference).score(z, TIMES, process=process)
    scale = expected.abs().amax((1, 2), keepdim=True)
    assert ((score - expected).abs() / scale).max() < most
    # A scalar time gives the same as separate rows.
    one = estimator.score(z[2:3], TIMES[2].item(), process=process)
    torch.testing.assert_close(one, score[2:3], rtol=1e-6, atol=1e-6 * scale[2].item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_score_of_half_precision_latents_has_their_precision(dtype):
    # A mean rounded to z's type would have errors up to 2e-3, and the score this error over t² = 0.0025.
    (x, reference), t = small_set(), torch.full((4,), 0.05, dtype=torch.float64)
    z = latents(x, t, EDM()).to(dtype)
    expected = gradient_of_log_marginal(x, z, t, EDM())
    score = Exact().bind(reference).score(z, 0.05)
    np.testing.assert_allclose(score.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0.01)


def test_noise_and_velocity_targets_are_conditional_means():
    # docs/library.md makes these targets of a posterior mean.
    data = torch.randn(20, 3)
    x, noise, points = data[:8], torch.randn(8, 3), data.double()
    estimator = Exact().bind(ReferenceSet(data))

    def conditional_mean(values, z, means, std):
        """Enumerate E[values | z], values (B, N, d), if z is N(means, std²) of one of N points."""
        sq_dist = (z.double()[:, None] - means).square().sum(2)
        return ((-sq_dist / (2 * std.double().square())).softmax(1)[:, :, None] * values).sum(1)

    sigma = torch.linspace(0.3, 3, 8)[:, None]
    z = x + sigma * noise
    epsilon = (z - estimator.posterior_mean(z, sigma.flatten())) / sigma
    expected = conditional_mean(
        (z.double()[:, None] - points) / sigma[:, :, None], z, points, sigma
    )
    # Differences are float32 numbers of size 10 over noise levels of 0.3: 2^-24 · 10 / 0.3 is 2e-6.
    torch.testing.assert_close(epsilon.double(), expected, rtol=1e-5, atol=1e-5)

    # In torchcfm, x_t = (1 − t)·x0 + t·x1 goes from noise x0 to data x1, and the target is x1 − x0.
    t = torch.linspace(0.2, 0.9, 8)[:, None]
    x_t = (1 - t) * noise + t * x
    mean = under_process(estimator.posterior_mean, LinearInterpolant())
    velocity = (mean(x_t, 1 - t.flatten()) - x_t) / per_item(1 - t.flatten(), x_t)
    x0 = (x_t.double()[:, None] - t[:, :, None] * points) / (1 - t)[:, :, None]
    expected = conditional_mean(points - x0, x_t, t[:, :, None] * points, 1 - t)
    torch.testing.assert_close(velocity.double(), expected, rtol=1e-5, atol=1e-5)
