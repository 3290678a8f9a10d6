"""Flows and diffusion in every noise process: exact velocities and flows, training, files, bad input."""

import math
from functools import cache

import pytest
import torch
from torch import nn

import lit_knn
from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, OneSample
from lit_knn.modules import LitEDM, LitEstimator, LitFlow
from lit_knn.nets import UNet
from lit_knn.nets.flow import DataOutput, EDMOutput, FlowDenoiser, VelocityOutput
from lit_knn.nets.precond import EDMPrecond, coefficients
from lit_knn.sampling import DiffusionModel, FlowModel
from lit_knn.sampling.building import build
from lit_knn.sampling.flow_times import FixedSteps, TimeSpan
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.noise import EDM, LINEAR_PROCESS, VP, LinearInterpolant, Process, per_item
from main import main
from tests.gaussian_flow import M, S, gaussian_mean, latents, slope, trajectory
from tests.trained_runs import leave_run


class Trigonometric(Process):
    """z = cos(πt/2)·x + sin(πt/2)·ε, whose derivatives come from autograd."""

    def sigma(self, t):
        return torch.tan(math.pi / 2 * t)

    def scale(self, t):
        return torch.cos(math.pi / 2 * t)


PROCESSES = [LinearInterpolant(), VP(), VP(10.0, 0.5), Trigonometric()]
EVERY = pytest.mark.parametrize("process", PROCESSES)
TIMES = torch.tensor([1e-3, 0.1, 0.5, 0.9, 0.999], dtype=torch.float64)


# Flows


def end_of_flow(process, noise, low, high):
    """The exact flow from the noise at `high` to `low`, and the posterior mean there."""
    start = process.noise_std(high) * noise / process.scale(high)
    z = trajectory(process, (start - M) / (S**2 + process.sigma(high) ** 2).sqrt(), low)
    return gaussian_mean(z / process.scale(low), process.sigma(low).expand(len(z)))


class Gaussian(nn.Module):
    """A network that knows data N(M, S²), and puts out what its kind of flow expects."""

    def __init__(self, kind, process):
        super().__init__()
        self.kind, self.process = kind, process
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, z, label, class_label=None):
        sigma = (4 * label.double()).exp()
        z = z.double()
        if self.kind is EDMOutput:
            c_skip, c_out, c_in = (per_item(c, z) for c in coefficients(sigma, 0.5)[:3])
            y = z / c_in
            return (gaussian_mean(y, sigma) - c_skip * y) / c_out
        t = per_item(self.process.t_of_sigma(sigma), z)
        mu = gaussian_mean(z / self.process.scale(t), sigma)
        return mu if self.kind is DataOutput else self.process.velocity(z, t, mu)


def gaussian_flow(kind, process):
    network = kind(Gaussian(kind, process))
    network.process = process
    return network


@EVERY
def test_every_output_gives_the_velocity_of_the_process(process):
    c = latents(5, 3)
    t = per_item(TIMES, c).expand(c.shape).contiguous()
    z, expected = torch.func.jvp(lambda t: trajectory(process, c, t), (t,), (torch.ones_like(t),))
    y, sigma = z / process.scale(t), process.sigma(TIMES)
    mu = gaussian_mean(y, sigma)
    for kind in (VelocityOutput, DataOutput, EDMOutput):
        network = gaussian_flow(kind, process)
        # The input and the noise label of a network are float32.
        torch.testing.assert_close(network(z, TIMES).double(), expected, rtol=2e-3, atol=2e-3)
        denoised = FlowDenoiser(network)(y.float(), sigma).double()
        torch.testing.assert_close(denoised[:4], mu[:4], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("solver", "order"), [(euler_step, 1), (heun_step, 2)])
@pytest.mark.parametrize("process", [LINEAR_PROCESS, VP()])
def test_a_flow_has_the_order_of_its_solver(process, solver, order):
    times, noise = TimeSpan(1e-9, 0.999), seeded_noise(range(4), (3,)).double()

    def velocity(z, tau):
        mu = gaussian_mean(z / process.scale(per_item(tau, z)), process.sigma(tau))
        return process.velocity(z, per_item(tau, z), mu)

    counts, errors = [100, 200, 400], []
    for count in counts:
        low, high = times.descending(count, process.growth)[[-1, 0]]
        images = FixedSteps(solver)(velocity, noise, times, count, process)
        errors.append((images - end_of_flow(process, noise, low, high)).abs().max().item())
    assert slope(counts, errors) == pytest.approx(order, abs=0.25)
    # The steps are equal in the noise level near 0, where details are made.
    near_0 = process.sigma(torch.tensor([1e-9, 4e-9], dtype=torch.float64))
    assert near_0[1] / near_0[0] == pytest.approx(4**process.growth, rel=1e-3)


def test_the_times_of_a_flow_are_equal_steps_above_the_lowest():
    times = TimeSpan(0.05, 0.95)
    torch.testing.assert_close(times.descending(2), torch.tensor([0.95, 0.475]).double())
    assert times.descending(100).min() >= 0.05
    # The steps are 0.0095 long, so five times are below 0.05.
    assert len(times.descending(100)) == 95
    assert times.descending(1).tolist() == [0.95]
    with pytest.raises(InputError, match="num_steps must be at least 1, got 0"):
        times.descending(0)


# Training, files and bad input


def lit(process, output=VelocityOutput, **options):
    return LitFlow(
        UNet(1, channels=4, multipliers=(1,), blocks=1), Exact(), output, process=process, **options
    )


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


def test_a_file_and_a_checkpoint_of_a_flow_keep_the_process():
    model = lit(VP(10.0, 0.5), sampling_steps=3)
    model.image_shape = (1, 4, 4)
    assert model.level_range.noise_range()[1] == pytest.approx(
        VP(10.0, 0.5).sigma(torch.tensor(0.9999)).item(), rel=1e-4
    )
    made = model.generative_model()
    loaded = build(made.description(), made.net.state_dict())
    assert vars(loaded.network.process) == {"beta_d": 10.0, "beta_min": 0.5}
    assert torch.equal(loaded.sample(range(2)), model.sample(range(2)))
    for one, other in ((model, lit(None)), (lit(None), model), (lit(VP()), model)):
        with pytest.raises(InputError, match="another parameterisation"):
            one.check_checkpoint({"flow": other.flow.description()})


def test_flow_file_keeps_its_output_times_and_solver():
    net = UNet(1, channels=4, multipliers=(1,), blocks=1)
    torch.nn.init.normal_(net.conv_out.weight)
    made = FlowModel(
        EDMOutput(net, 0.3), (1, 4, 4), TimeSpan(0.1, 0.9), FixedSteps(euler_step), num_steps=3
    ).eval()
    loaded = build(made.description(), net.state_dict())
    assert torch.equal(loaded.sample(range(2)), made.sample(range(2)))
    with pytest.raises(InputError, match="the noise level must be above 0"):
        made(torch.zeros(1, 1, 4, 4), 1.0)  # The straight path has no finite noise level at 1.


def diffusion(process=None):
    torch.manual_seed(0)
    net = UNet(1, 8, (1, 2), 1)
    torch.nn.init.normal_(net.conv_out.weight, std=0.05)
    options = {} if process is None else {"process": process}
    return DiffusionModel(EDMPrecond(net, 0.5), (1, 8, 8), NoiseGrid(0.02, 10.0), **options).eval()


@cache
def usual(steps):
    return diffusion().sample([0, 1], steps)


def test_processes_agree_with_many_steps_and_files_name_theirs():
    own = diffusion(VP(10.0, 0.5))
    error = [(usual(steps) - own.sample([0, 1], steps)).abs().max().item() for steps in (4, 96)]
    assert error[1] < 2e-3
    assert error[0] > 3 * error[1]
    read = build(own.description(), dict(own.net.state_dict()))
    assert torch.equal(read.sample([3], 4), own.sample([3], 4))
    assert vars(read.process) == {"beta_d": 10.0, "beta_min": 0.5}
    assert "process" not in diffusion().options()


class Own(Process):
    """σ(t) = t²; a user's process, which no file can name."""

    def sigma(self, t):
        return t.square()

    def scale(self, t):
        return torch.ones_like(t)


class Bounded(Own):
    def sigma(self, t):
        return torch.tanh(t)


def test_a_process_of_ones_own_samples_but_no_file_can_make_it():
    own = diffusion(Own())
    torch.testing.assert_close(own.sample([0, 1], 96), usual(96), rtol=0, atol=2e-3)
    with pytest.raises(
        InputError, match="process must name one of EDM, VP, LinearInterpolant as its class"
    ):
        build(own.description(), dict(own.net.state_dict()))


def test_the_command_line_takes_a_process(tmp_path):
    run, _ = leave_run(
        tmp_path,
        "edm",
        "--model.process",
        "lit_knn.theory.noise.VP",
        "--model.process.beta_d",
        "10",
    )
    assert vars(lit_knn.load(run).process) == vars(VP(10.0))


def test_processes_that_do_not_fit_are_refused(tmp_path, monkeypatch, capsys):
    class OwnOutput(VelocityOutput):
        """An output of a user, which may be written for the straight path."""

    for make, message in (
        (
            lambda: lit(EDM()),
            r"LitFlow: process=EDM has the noise levels 0\.0001 to 0\.9999 at the times",
        ),
        (lambda: lit(VP(), OwnOutput), "LitFlow: process=VP needs an output of lit_knn"),
        (
            lambda: VP(beta_min=0.0),
            "VP: need beta_d >= 0 and beta_min > 0, got beta_d=19.9 and beta_min=0.0",
        ),
        (
            lambda: LitEstimator(process=Bounded()),
            r"LitEstimator: Bounded: no t has the noise level σ\(t\)=80",
        ),
        (
            lambda: LitEDM(UNet(1, 8, (1,)), OneSample(), process=Bounded()),
            "LitEDM: Bounded: no t has the noise level",
        ),
    ):
        with pytest.raises(InputError, match=message):
            make()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["fit", "--model", "LitFlow", "--model.process", "nonsense", "--data", "Digits"])
    assert "--model.process" in capsys.readouterr().err
