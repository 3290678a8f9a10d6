"""Consistency preconditioning and sampler: the boundary, limits and a closed-form consistency function."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from lit_knn.common.errors import InputError
from lit_knn.nets.precond import ConsistencyFunction
from lit_knn.sampling.samplers import consistency_sampler, seeded_noise

SIGMA_DATA = 0.5


class RandomNet(nn.Module):
    """A network with large outputs that depend on all inputs, to show any coefficient that is not exactly 0."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 12)
        self.seen = []

    def forward(self, z, noise_label, class_label=None):
        self.seen.append((z, noise_label, class_label))
        label = 0 if class_label is None else class_label[:, None]
        return 100 * (self.layer(z.flatten(1)) + noise_label[:, None] + label + 1).reshape(z.shape)


def images(b=4, seed=0):
    z = torch.randn(b, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    z[0, 0] = 0.0  # next to a zero every small change is visible
    return z


@pytest.mark.parametrize("t_min", [0.002, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity_at_t_min_is_bitwise(t_min, dtype):
    f = ConsistencyFunction(RandomNet(), SIGMA_DATA, t_min)
    z = images()
    assert torch.equal(f(z, torch.full((4,), t_min, dtype=dtype)), z)


def test_the_network_gets_unit_variance_and_a_quarter_of_log_t():
    net = RandomNet()
    net.forward = lambda z, noise_label, class_label=None: net.seen.append((z, noise_label)) or z
    f = ConsistencyFunction(net, SIGMA_DATA)
    generator = torch.Generator().manual_seed(0)
    t = torch.tensor([0.002, 0.1, 1.0, 80.0])
    x = SIGMA_DATA * torch.randn(4, 3, 64, 64, generator=generator)
    f(x + t.reshape(4, 1, 1, 1) * torch.randn(x.shape, generator=generator), t)
    z, noise_label = net.seen[0]
    np.testing.assert_allclose(z.flatten(1).std(1), 1.0, atol=0.03)
    np.testing.assert_allclose(noise_label, np.log(t.numpy()) / 4, rtol=1e-5)
    assert z.dtype == noise_label.dtype == torch.float32


def test_output_is_the_preconditioned_network():
    net = RandomNet()
    f = ConsistencyFunction(net, SIGMA_DATA)
    z, t, label = images(), torch.tensor([0.5, 1.0, 5.0, 80.0], dtype=torch.float64), torch.arange(4)
    out = f(z, t, label)
    assert out.dtype == torch.float32
    assert net.seen[0][2] is label
    for b in range(4):
        s = t[b].item()
        c_skip = 0.25 / ((s - 0.002) ** 2 + 0.25)
        c_out = 0.5 * (s - 0.002) / math.sqrt(s**2 + 0.25)
        z_in = (z[b : b + 1] / math.sqrt(s**2 + 0.25)).float()
        raw = net(z_in, torch.tensor([math.log(s) / 4]), label[b : b + 1])
        torch.testing.assert_close(out[b : b + 1], (c_skip * z[b : b + 1] + c_out * raw).float(), rtol=1e-4, atol=1e-3)


# Data N(M, S²): p_t = N(M, S² + t²), and the PF-ODE keeps (z − M) / sqrt(S² + t²). The consistency function maps
# to noise level sigma_min, so its output has variance S² + sigma_min².
M, S = 0.4, 0.3


def gaussian_consistency(sigma_min, calls=None):
    def f(z, t):
        if calls is not None:
            calls.append(t)
        scale = torch.sqrt((S**2 + sigma_min**2) / (S**2 + t**2)).reshape(-1, *[1] * (z.ndim - 1))
        return (M + (z - M) * scale).to(z.dtype)

    return f


@pytest.mark.parametrize("sigmas", [(80.0,), (80.0, 1.0), (80.0, 5.0, 0.8)])
@pytest.mark.parametrize("sigma_min", [0.002, 0.6])
def test_samples_have_the_mean_and_variance_of_the_data(sigmas, sigma_min):
    n = 200_000
    noise = torch.randn(len(sigmas), n, 1, generator=torch.Generator().manual_seed(0))
    calls = []
    x = consistency_sampler(gaussian_consistency(sigma_min, calls), noise, sigmas, sigma_min)
    assert [t[0].item() for t in calls] == list(sigmas)
    assert all(t.shape == (n,) for t in calls)
    variance = S**2 + sigma_min**2
    # The prior N(0, 80²) ignores the mean M, so the sampler has an offset of M·sd/80.
    assert x.mean().item() == pytest.approx(M, abs=M * math.sqrt(variance) / 80 + 5 * math.sqrt(variance / n))
    # Wrong re-noising with σ instead of sqrt(σ² − σ_min²) would raise the variance by 26 % at σ = 1, σ_min = 0.6.
    assert x.var().item() == pytest.approx(variance, rel=5 * math.sqrt(2 / n) + 1e-4)


def test_renoising_is_exact():
    # A recorder that returns 1 replaces the consistency function, so the second z is 1 + sqrt(σ² − σ_min²)·ε.
    seen = []
    noise = torch.full((2, 1, 3), 2.0)
    consistency_sampler(lambda z, t: seen.append(z) or torch.ones_like(z), noise, (80.0, 5.0), sigma_min=3.0)
    np.testing.assert_allclose(seen[0], np.full((1, 3), 160.0))
    np.testing.assert_allclose(seen[1], np.full((1, 3), 1 + 4 * 2.0))  # a 3-4-5 triangle


@pytest.mark.parametrize(
    ("sigmas", "draws"),
    [
        ((), 0),
        ((1.0, 80.0), 2),
        ((math.inf, 1.0), 2),
        ((80.0, math.nan), 2),
        ((80.0, 80.0), 2),
        ((80.0, 0.002), 2),
        ((80.0, 1.0), 1),
        ((80.0,), 2),
    ],
)
def test_sampler_refuses(sigmas, draws):
    with pytest.raises(InputError, match=r"sigmas|noise"):
        consistency_sampler(lambda z, t: z, torch.zeros(draws, 1, 3), sigmas)


def test_seeded_noise_depends_on_the_seed_alone():
    noise = seeded_noise([5, 3, 5, 9], (3, 4, 4))
    assert noise.shape == (4, 3, 4, 4)
    assert noise.dtype == torch.float32
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])
    torch.manual_seed(99)  # the default generator must not matter
    for i, seed in enumerate((5, 3, 5, 9)):
        assert torch.equal(seeded_noise([seed], (3, 4, 4))[0], noise[i])
    assert torch.equal(seeded_noise(torch.tensor([3, 9]), (3, 4, 4)), noise[[1, 3]])
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(seeded_noise([3], (3, 4, 4))[0], noise[1])
    finally:
        torch.set_default_dtype(torch.float32)
    before = torch.get_rng_state()
    seeded_noise([0], (2,))
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_noise_of_another_draw_is_independent():
    first, second = (seeded_noise(range(200), (64,), draw=draw) for draw in (0, 1))
    correlation = np.corrcoef(first.flatten(), second.flatten())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(first.numel())
    # Neighbouring seeds also differ: draw 1 of seed s is not draw 0 of seed s + 1.
    assert not torch.equal(first[1:], second[:-1])
    assert abs(np.corrcoef(first[1:].flatten(), second[:-1].flatten())[0, 1]) < 5 / math.sqrt(first.numel())
    np.testing.assert_allclose([first.mean(), first.std()], [0, 1], atol=0.05)
