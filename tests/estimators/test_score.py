"""The score under any noise process against autograd of the log marginal, by enumeration in float64."""

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from lit_knn.common.errors import InputError
from lit_knn.estimators import KNN, Exact, SubspaceKNN
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import EDM, VP, LinearInterpolant, forward_noise
from lit_knn.theory.posterior import mean_from_score, score_from_mean

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


@every_process
def test_mean_and_score_are_inverse(process):
    x, _ = small_set()
    z = latents(x, TIMES, process)
    mu = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    score = score_from_mean(mu, z, TIMES, process)
    torch.testing.assert_close(mean_from_score(score, z, TIMES, process), mu, rtol=1e-9, atol=1e-9)


def test_the_default_is_the_process_of_the_paper_to_the_last_bit():
    x, reference = small_set()
    z = latents(x, TIMES, EDM(), torch.float32)
    estimator = KNN(k=4, n=6).bind(reference)
    mu, score, named = (
        method(z, TIMES, generator=torch.Generator().manual_seed(0), **options)
        for method, options in (
            (estimator.posterior_mean, {}),
            (estimator.score, {}),
            (estimator.score, {"process": EDM()}),
        )
    )
    assert torch.equal(score, named)
    t = TIMES.reshape(-1, 1, 1)
    assert torch.equal(score, ((mu.double() - z.double()) / t.square()).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_score_of_half_precision_latents_has_their_precision(dtype):
    # A mean rounded to z's type would have errors up to 2e-3, and the score this error over t² = 0.0025.
    x, reference = small_set()
    z = latents(x, torch.full((4,), 0.05), EDM()).to(dtype)
    expected = gradient_of_log_marginal(x, z, torch.full((4,), 0.05, dtype=torch.float64), EDM())
    score = Exact().bind(reference).score(z, 0.05)
    assert score.dtype == dtype
    np.testing.assert_allclose(score.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0.01)


@pytest.mark.parametrize(("process", "t"), [(LinearInterpolant(), 1.0), (LinearInterpolant(), 1.5), (VP(), 1e4)])
def test_a_time_without_a_noise_level_is_named(process, t):
    _, reference = small_set()
    estimator = Exact().bind(reference)
    with pytest.raises(InputError, match=f"{type(process).__name__} has no finite noise level at t={t}"):
        estimator.score(torch.zeros(2, 2, 3), t, process=process)
