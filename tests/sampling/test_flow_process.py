"""Flow matching in other processes than the straight path: a Gaussian's exact velocity and flow, files, bad input."""

import math

import pytest
import torch
from torch import nn

from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact
from lit_knn.modules import LitFlow
from lit_knn.nets import UNet
from lit_knn.nets.flow import DataOutput, EDMOutput, FlowDenoiser, NoiseOutput, VelocityOutput
from lit_knn.nets.precond import edm_coefficients
from lit_knn.sampling import FlowModel
from lit_knn.sampling.flow_times import FixedSteps, TimeSpan
from lit_knn.sampling.loading import build
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.noise import EDM, VP, LinearInterpolant, Process, per_item
from main import main
from tests.gaussian_flow import M, S, gaussian_mean, latents, slope


class Trigonometric(Process):
    """z = cos(πt/2)·x + sin(πt/2)·ε, whose derivatives come from autograd."""

    def sigma(self, t):
        return torch.tan(math.pi / 2 * t)

    def scale(self, t):
        return torch.cos(math.pi / 2 * t)


PROCESSES = [LinearInterpolant(), VP(), VP(10.0, 0.5), Trigonometric()]
EVERY = pytest.mark.parametrize("process", PROCESSES)
TIMES = torch.tensor([1e-3, 0.1, 0.5, 0.9, 0.999], dtype=torch.float64)


def on_trajectory(process, c, t):
    """z(t) of the flow of data N(M, S²) that keeps c: z = s·(M + c·sqrt(S² + σ²))."""
    return process.scale(t) * (M + c * (S**2 + process.sigma(t) ** 2).sqrt())


def exact(process, c):
    """The latents at `TIMES` on trajectories c (5, d), and the derivative along each of them by autograd."""
    t = per_item(TIMES, c).expand(c.shape).contiguous()
    return torch.func.jvp(lambda t: on_trajectory(process, c, t), (t,), (torch.ones_like(t),))


class Gaussian(nn.Module):
    """A network that knows data N(M, S²), and puts out what its kind of flow expects."""

    def __init__(self, kind, process):
        super().__init__()
        self.kind, self.process = kind, process
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, z, label, class_label=None):
        sigma = (4 * label.double()).exp()
        z, level = z.double(), per_item(sigma, z)
        if self.kind is EDMOutput:
            c_skip, c_out, c_in = (per_item(c, z) for c in edm_coefficients(sigma)[:3])
            y = z / c_in
            return (gaussian_mean(y, sigma) - c_skip * y) / c_out
        t = per_item(self.process.t_of_sigma(sigma), z)
        s = self.process.scale(t)
        mu = gaussian_mean(z / s, sigma)
        if self.kind is DataOutput:
            return mu
        return (z - s * mu) / (s * level) if self.kind is NoiseOutput else self.process.velocity(z, t, mu)


def gaussian_flow(kind, process):
    network = kind(Gaussian(kind, process))
    network.process = process
    return network


@EVERY
def test_the_velocity_of_a_gaussian_is_the_derivative_along_its_flow(process):
    c = latents(5, 3)
    z, expected = exact(process, c)
    t = per_item(TIMES, z)
    mu = gaussian_mean(z / process.scale(t), process.sigma(TIMES))
    torch.testing.assert_close(process.velocity(z, t, mu), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(process.mean_of_velocity(z, t, expected), mu, rtol=1e-6, atol=1e-6)


@EVERY
@pytest.mark.parametrize("kind", [VelocityOutput, DataOutput, NoiseOutput, EDMOutput])
def test_every_output_gives_the_velocity_of_the_process(process, kind):
    network, c = gaussian_flow(kind, process), latents(5, 3)
    z, expected = exact(process, c)
    # The input and the noise label of a network are float32.
    torch.testing.assert_close(network(z, TIMES).double(), expected, rtol=2e-3, atol=2e-3)
    y, sigma = z / process.scale(per_item(TIMES, z)), process.sigma(TIMES)
    denoised = FlowDenoiser(network)(y.float(), sigma).double()
    torch.testing.assert_close(denoised[:4], gaussian_mean(y, sigma)[:4], rtol=1e-3, atol=1e-3)


def test_samples_are_those_of_the_exact_flow():
    process, times, steps = VP(), TimeSpan(1e-3, 0.999), 200
    # Equal steps in √τ, of which the last would be below `low`.
    low, high = times.descending(steps, process.growth)[[-1, 0]]
    model = FlowModel(gaussian_flow(DataOutput, process), (3,), times, num_steps=steps)
    noise = seeded_noise(range(4), (3,)).double()
    start = process.noise_std(high) * noise
    c = (start / process.scale(high) - M) / (S**2 + process.sigma(high) ** 2).sqrt()
    z = on_trajectory(process, c, low)
    expected = gaussian_mean(z / process.scale(low), process.sigma(low).expand(4))
    torch.testing.assert_close(model.sample(range(4)).double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("solver", "order"), [(euler_step, 1), (heun_step, 2)])
def test_the_order_under_vp_is_that_of_the_solver(solver, order):
    process, times = VP(), TimeSpan(1e-9, 0.999)
    noise = seeded_noise(range(4), (3,)).double()

    def velocity(z, tau):
        mu = gaussian_mean(z / process.scale(per_item(tau, z)), process.sigma(tau))
        return process.velocity(z, per_item(tau, z), mu)

    high = torch.tensor(times.high, dtype=torch.float64)
    start = process.noise_std(high) * noise
    c = (start / process.scale(high) - M) / (S**2 + process.sigma(high) ** 2).sqrt()
    exact = M + S * c
    counts = [100, 200, 400]
    sampled = [FixedSteps(solver)(velocity, noise, times, count, process) for count in counts]
    errors = [(images - exact).abs().max().item() for images in sampled]
    assert slope(counts, errors) == pytest.approx(order, abs=0.25)


def lit(process, output=VelocityOutput, **options):
    return LitFlow(UNet(1, channels=4, multipliers=(1,), blocks=1), Exact(), output, process=process, **options)


@pytest.mark.parametrize("process", [VP(), Trigonometric()])
def test_the_loss_is_against_the_derivative_of_the_path(process):
    model, x, noise = lit(process), latents(5, 1, 4, 4), latents(5, 1, 4, 4, seed=1)
    t = per_item(TIMES, x).expand(x.shape).contiguous()

    def path(t):
        return process.scale(t) * (x + process.sigma(t) * noise)

    z, expected = torch.func.jvp(path, (t,), (torch.ones_like(t),))
    model.flow.forward = lambda z, *args: torch.zeros_like(z)
    losses = model.item_losses(z, TIMES, x, None, None)
    torch.testing.assert_close(losses, expected.square().flatten(1).mean(1), rtol=1e-8, atol=1e-8)


def test_a_file_and_a_checkpoint_keep_the_process():
    model = lit(VP(10.0, 0.5), sampling_steps=3)
    model.image_shape = (1, 4, 4)
    assert model.grid.noise_range()[1] == pytest.approx(VP(10.0, 0.5).sigma(torch.tensor(0.9999)).item(), rel=1e-4)
    made = model.generative_model()
    loaded = build(made.description(), made.net.state_dict())
    assert vars(loaded.network.process) == {"beta_d": 10.0, "beta_min": 0.5}
    assert torch.equal(loaded.sample(range(2)), model.sample(range(2)))
    straight = lit(None)
    with pytest.raises(InputError, match="another parameterisation"):
        straight.check_checkpoint({"flow": model.flow.description()})
    with pytest.raises(InputError, match="another parameterisation"):
        model.check_checkpoint({"flow": straight.flow.description()})


def test_processes_that_are_no_flows_are_refused(tmp_path, monkeypatch, capsys):
    class Own(VelocityOutput):
        """An output of a user, which may be written for the straight path."""

    with pytest.raises(InputError, match=r"LitFlow: process=EDM has the noise levels 0\.0001 to 0\.9999 at the times"):
        lit(EDM())
    with pytest.raises(InputError, match="LitFlow: process=VP needs an output of lit_knn"):
        lit(VP(), Own)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["fit", "--model", "LitFlow", "--model.process", "nonsense", "--data", "Digits"])
    assert "--model.process" in capsys.readouterr().err
