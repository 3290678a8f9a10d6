"""The score under any noise process against autograd of the log marginal, by enumeration in float64."""

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from lit_knn.estimators import Exact, SubspaceKNN
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import EDM, VP, LinearInterpolant, forward_noise

N = 12
PROCESSES = [EDM(), VP(), VP(beta_d=0.0, beta_min=2.0), LinearInterpolant()]
every_process = pytest.mark.parametrize("process", PROCESSES, ids=lambda p: f"{type(p).__name__}{vars(p) or ''}")
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
    s, std = (v.reshape(-1, 1, 1, 1) for v in (process.scale(t), process.scale(t) * process.sigma(t)))
    log_p = Normal(s * x.double(), std).log_prob(z.unsqueeze(1)).flatten(2).sum(2)
    return torch.autograd.grad(torch.logsumexp(log_p, dim=1).sum(), z)[0]


@every_process
@pytest.mark.parametrize(
    "estimator",
    [Exact(), SubspaceKNN(r=2, n=N, compute="float32")],
    ids=lambda e: type(e).__name__,
)
def test_the_score_is_the_gradient_of_the_log_marginal(process, estimator):
    # With n = N the sampling estimators are exact up to the rounding of float32 weights and images.
    x, reference = small_set()
    z = latents(x, TIMES, process)
    expected = gradient_of_log_marginal(x, z, TIMES, process)
    score = estimator.bind(reference).score(z, TIMES, process=process)
    assert score.dtype == torch.float64
    tolerance = 1e-9 if isinstance(estimator, Exact) else 2e-5
    scale = expected.abs().amax((1, 2), keepdim=True)
    assert ((score - expected).abs() / scale).max() < tolerance
    # A scalar time gives the same as separate rows.
    one = estimator.score(z[2:3], TIMES[2].item(), process=process)
    torch.testing.assert_close(one, score[2:3], rtol=1e-6, atol=1e-6 * scale[2].item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_score_of_half_precision_latents_has_their_precision(dtype):
    # A mean rounded to z's type would have errors up to 2e-3, and the score this error over t² = 0.0025.
    x, reference = small_set()
    z = latents(x, torch.full((4,), 0.05), EDM()).to(dtype)
    expected = gradient_of_log_marginal(x, z, torch.full((4,), 0.05, dtype=torch.float64), EDM())
    score = Exact().bind(reference).score(z, 0.05)
    assert score.dtype == dtype
    np.testing.assert_allclose(score.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0.01)
