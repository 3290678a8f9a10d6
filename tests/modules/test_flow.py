"""LitFlow: target velocities, parameterisations, the loss, training from end to end, and what it refuses."""

import pytest
import pytorch_lightning as pl
import torch
from scipy import stats
from torch import nn

import lit_knn
from lit_knn.callbacks import LastCheckpoint, SampleGrid
from lit_knn.common.errors import InputError
from lit_knn.data import Digits
from lit_knn.estimators import Estimator, Exact, Network, OneSample
from lit_knn.modules import LitEDM, LitFlow
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.modules.time_distributions import LogitNormalTimes, UniformTimes
from lit_knn.nets import DDPMpp, UNet
from lit_knn.nets.flow import DataOutput, EDMOutput, NoiseOutput, VelocityOutput
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.flow_times import FixedSteps
from lit_knn.sampling.solvers import euler_step
from lit_knn.theory.noise import LINEAR_PROCESS, per_item, under_process
from tests.flows import (
    gaussian_velocity,
    log_density_of_gaussian,
    log_density_of_points,
    of_items,
    velocity_by_autograd,
)
from tests.gaussian_flow import gaussian_mean
from tests.short_training import TRAINER, train
from tests.toys import all_warped
from tests.watched import Images, WatchedNet

OUTPUTS = [VelocityOutput, DataOutput, NoiseOutput, EDMOutput]
LEVELS = torch.tensor([1e-4, 0.1, 0.5, 0.9, 0.9999], dtype=torch.float64)


def unet(channels=4, **options):
    return UNet(1, channels=channels, multipliers=(1,), blocks=1, **options)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_velocity_of_two_points_is_that_of_autograd():
    points = torch.randn(2, 3, dtype=torch.float64, generator=generator())
    reference = ReferenceSet(points.float())
    points = reference.gather(torch.arange(2)).double()
    x = points[torch.tensor([0, 1, 0, 1, 0])]
    z = (1 - of_items(LEVELS, x)) * x + of_items(LEVELS, x) * torch.randn(5, 3, generator=generator(1)).double()
    mean = under_process(Exact().bind(reference).posterior_mean, LINEAR_PROCESS)(z, LEVELS)
    velocity = LINEAR_PROCESS.velocity(z, per_item(LEVELS, z), mean.double())
    for row, tau in enumerate(LEVELS.tolist()):
        expected = velocity_by_autograd(lambda z, t: log_density_of_points(z, t, points), z[row], tau)
        torch.testing.assert_close(velocity[row], expected, rtol=1e-4, atol=1e-4)


def test_the_velocity_of_a_gaussian_is_that_of_autograd_and_the_closed_form():
    z = torch.randn(5, 3, dtype=torch.float64, generator=generator())
    mean = under_process(gaussian_mean, LINEAR_PROCESS)(z, LEVELS)
    velocity = LINEAR_PROCESS.velocity(z, per_item(LEVELS, z), mean)
    torch.testing.assert_close(velocity, gaussian_velocity(z, LEVELS), rtol=1e-8, atol=1e-8)
    for row, tau in enumerate(LEVELS.tolist()):
        expected = velocity_by_autograd(log_density_of_gaussian, z[row], tau)
        torch.testing.assert_close(velocity[row], expected, rtol=1e-8, atol=1e-8)


class Posterior(nn.Module):
    """A network that knows the posterior of data N(M, S²), and puts out what its kind of flow expects."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, z, noise_label, class_label=None, augment_label=None):
        sigma = torch.exp(4 * noise_label.double())
        if self.kind is EDMOutput:  # EDM's network sees z/sqrt(σ² + 1/4) and must give the rest of the mean.
            shaped = of_items(sigma, z)
            norm = (shaped**2 + 0.25).sqrt()
            y = z.double() * norm
            return ((gaussian_mean(y, sigma) - 0.25 / norm**2 * y) / (0.5 * shaped / norm)).float()
        tau = sigma / (1 + sigma)
        t, z = of_items(tau, z), z.double()
        mean = gaussian_mean(z / (1 - t), sigma)
        noise = (z - (1 - t) * mean) / t
        return {DataOutput: mean, NoiseOutput: noise, VelocityOutput: noise - mean}[self.kind].float()


@pytest.mark.parametrize("kind", OUTPUTS)
def test_consistent_outputs_give_the_same_velocity(kind):
    tau = torch.tensor([0.02, 0.3, 0.5, 0.7, 0.98], dtype=torch.float64)
    z = torch.randn(5, 1, 4, 4, generator=generator())
    velocity = kind(Posterior(kind))(z, tau)
    assert velocity.dtype == torch.float32
    torch.testing.assert_close(velocity.double(), gaussian_velocity(z, tau), rtol=1e-4, atol=1e-4)
    denoised = kind(Posterior(kind)).denoised(z, tau).double()
    mean = under_process(gaussian_mean, LINEAR_PROCESS)(z.double(), tau)
    torch.testing.assert_close(denoised, mean, rtol=1e-4, atol=1e-4)


def test_all_labels_reach_the_network():
    seen = []

    class Net(nn.Module):
        def forward(self, z, noise_label, class_label=None, augment_label=None):
            seen.append((noise_label, class_label, augment_label))
            return z

    z, tau, labels = torch.zeros(2, 1, 2, 2), torch.tensor([0.25, 0.75]), (torch.tensor([1, 2]), torch.ones(2, 9))
    for kind in OUTPUTS:
        kind(Net())(z, tau, *labels)
        noise_label, *given = seen.pop()
        torch.testing.assert_close(noise_label, torch.tensor([1 / 3, 3.0]).log() / 4)
        assert all(a is b for a, b in zip(given, labels, strict=True))


# Times


def test_edms_noise_levels_are_logit_normal_times():
    drawn = LogitNormalTimes(-1.2, 1.2, 1e-6, 1 - 1e-6).draw(4000, generator())
    log_sigma = (drawn / (1 - drawn)).log()
    assert stats.kstest(log_sigma.numpy(), "norm", args=(-1.2, 1.2)).pvalue > 0.01


@pytest.mark.parametrize("low", [1e-4, 0.3])
def test_times_follow_their_distribution_between_the_ends(low):
    uniform = UniformTimes(low, 0.8).draw(4000, generator())
    assert stats.kstest(uniform.numpy(), "uniform", args=(low, 0.8 - low)).pvalue > 0.01
    logit = torch.special.logit(LogitNormalTimes(0.5, 1.5, low, 0.8).draw(4000, generator())).numpy()
    ends = [torch.tensor(end).double().logit().item() for end in (low, 0.8)]
    a, b = ((end - 0.5) / 1.5 for end in ends)
    assert stats.kstest(logit, "truncnorm", args=(a, b, 0.5, 1.5)).pvalue > 0.01
    for drawn in (uniform, torch.tensor(logit).sigmoid()):
        assert drawn.min() >= low - 1e-12
        assert drawn.max() <= 0.8 + 1e-12


def test_the_target_keeps_its_digits_at_the_ends():
    # With one sample the target is ε − x, which is known.
    x = torch.rand(2, 1000, generator=generator()) * 2 - 1
    noise = torch.randn(2, 1000, generator=generator(1))
    tau = torch.tensor([UniformTimes().low, UniformTimes().high], dtype=torch.float64)
    z = ((1 - of_items(tau, x)) * x + of_items(tau, x) * noise).float()
    target = LINEAR_PROCESS.velocity(z, per_item(tau, z), x)
    assert (target - (noise - x)).abs().max() < 1.5e-3


# Training


def seen_by(net):
    """The network's last input and its time, in float64."""
    z, noise_label, _ = net.calls[-1]
    return z.double(), torch.sigmoid(4 * noise_label.double())


@pytest.mark.parametrize("estimator", [OneSample(), Exact()])
@pytest.mark.parametrize("times", [UniformTimes(0.05, 0.95), LogitNormalTimes(-0.5, 0.8)])
def test_the_loss_is_the_squared_distance_to_the_estimated_velocity(estimator, times):
    data, net = Images(60), WatchedNet()
    model, logged = LitFlow(net, estimator, times=times), {}
    model.log = lambda name, value, **_: logged.update({name: value})
    train(model, data, 1)
    z, tau = seen_by(net)
    points = data.x.double().flatten(1)
    if isinstance(estimator, OneSample):
        target = (z - data.x) / of_items(tau, z)
    else:
        rows = [
            velocity_by_autograd(lambda z, t: log_density_of_points(z, t, points), row.flatten(), level)
            for row, level in zip(z, tau.tolist(), strict=True)
        ]
        target = torch.stack(rows).reshape(z.shape)
    assert logged["train/loss"].item() == pytest.approx((0.3 - target).square().mean().item(), rel=1e-3)


def test_the_minimiser_of_the_loss_is_the_mean_velocity():
    # A constant network learns the mean target. At τ = 1/2 it is E[ε − x] = −E[x].
    data = Images(60)
    data.x += 0.8
    data.reference = ReferenceSet(data.x)
    net = WatchedNet(0.0)
    model = LitFlow(net, Exact(), times=UniformTimes(0.4, 0.6), lr=0.03, lr_ramp_up_images=0)
    train(model, data, 100)
    assert net.value.item() == pytest.approx(-data.x.mean().item(), abs=0.1)


def test_every_estimator_is_asked_at_the_noise_level_of_the_edm_process():
    class Asked(Estimator):
        needs_reference = False
        uses_source = True

        def _posterior_mean(self, z, t, x_source, generator):
            self.z, self.t = z, t
            return x_source

    net, asked = WatchedNet(), Asked()
    train(LitFlow(net, asked, measure_target=False), Images(60), 1)
    z, tau = seen_by(net)
    torch.testing.assert_close(asked.t.flatten(), tau / (1 - tau), rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(asked.z.double(), z / (1 - of_items(tau, z)), rtol=1e-4, atol=1e-5)


def test_warped_items_have_the_velocity_of_the_set_warped_alike(monkeypatch):
    data, net = Images(60), WatchedNet()
    net.augment_dim = 9
    augmentation = GeometricAugmentation(1.0)
    monkeypatch.setattr(augmentation, "p", 1.0)
    augmented = all_warped(data.x)
    model = LitFlow(net, Exact(), augmentation=augmentation, times=UniformTimes(0.3, 0.7))
    model.augmentation = type("Fixed", (), {"__call__": lambda self, images, generator: augmented})()
    logged = {}
    model.log = lambda name, value, **_: logged.update({name: value})
    train(model, data, 1)
    z, tau = seen_by(net)
    losses = []
    for item in range(60):
        points = augmented.warp.rows(slice(item, item + 1)).apply(data.x.unsqueeze(0))[0].double().flatten(1)
        target = velocity_by_autograd(
            lambda z, t, points=points: log_density_of_points(z, t, points), z[item].flatten(), tau[item]
        )
        losses.append((0.3 - target).square().mean())
    assert logged["train/loss"].item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-3)
    assert logged["train/augmented"] == 1


def test_a_class_conditional_flow_has_the_labels_in_training_and_sampling():
    net = WatchedNet(num_classes=10)
    model = LitFlow(net, Exact(), class_conditional=True, sampling_class=3)
    train(model, Digits(batch_size=64), 1)
    assert net.labels[-1].dtype == torch.int64
    model.sample([5, 6], num_steps=2)
    assert net.labels[-1].tolist() == [3, 3]


# Checkpoints


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A flow of DDPM++, and its checkpoint."""
    folder = tmp_path_factory.mktemp("flow")
    torch.manual_seed(0)
    net = DDPMpp(image_size=8, in_channels=1, channels=16, multipliers=[1], blocks=1, attention_at=[])
    model = LitFlow(net, OneSample(), output=DataOutput, lr=1e-2, lr_ramp_up_images=0)
    trainer = pl.Trainer(max_steps=5, callbacks=[LastCheckpoint(dirpath=str(folder))], **TRAINER)
    trainer.fit(model, Digits(batch_size=64))
    return model.eval(), folder / "last.ckpt"


def test_a_checkpoint_is_an_estimator_and_a_flow(trained):
    model, path = trained
    z, sigma = torch.randn(3, 1, 8, 8), torch.tensor([0.1, 1.0, 20.0])
    tau = (sigma / (1 + sigma)).double()
    scaled = ((1 - of_items(tau, z)) * z).float()
    with torch.no_grad():
        velocity = model.flow(scaled, tau)
    torch.testing.assert_close(lit_knn.load(path)(scaled, tau), velocity)
    mean = scaled - of_items(tau, z).float() * velocity
    torch.testing.assert_close(Network(path).posterior_mean(z, sigma), mean, rtol=1e-4, atol=1e-4)
    assert Network(path, fp16=True).posterior_mean(z, sigma).dtype == torch.float32


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"ema_half_life_images": 0}, "ema_half_life_images must be above 0"),
        ({"lr_ramp_up_images": -1}, "lr_ramp_up_images must be at least 0"),
        ({"sampling_steps": 0}, "sampling_steps must be above 0, got 0"),
        (
            {"sampler": FixedSteps(max)},
            "LitFlow: solver=max does not take the arguments z, t, t_next, ",
        ),
        ({"output": nn.Identity}, "output=Identity makes Identity, not a FlowNetwork"),
        ({"warped": "no"}, "warped='no' must be posterior or source"),
        ({"class_conditional": True}, "class_conditional=True, but the net has num_classes=0"),
    ],
)
def test_an_option_out_of_range_is_named(options, message):
    with pytest.raises(InputError, match=message):
        LitFlow(unet(), OneSample(), **options)


def test_a_grid_of_steps_that_the_sampler_does_not_take_is_refused_before_the_first_step():
    model = LitFlow(unet(), OneSample())
    with pytest.raises(InputError, match="SampleGrid: num_steps must be an integer from 1 to"):
        train(model, Digits(batch_size=32), 1, callbacks=[SampleGrid(4, (2**25,))])
    assert model.images_seen == 0


def test_the_solver_of_the_sampler_is_used():
    model = LitFlow(WatchedNet(), OneSample(), sampler=FixedSteps(euler_step), sampling_steps=7)
    model.image_shape = (1, 4, 4)
    model.sample([1])
    assert len(model.network.calls) == 7


def load(path, model):
    pl.Trainer(**{**TRAINER, "limit_val_batches": 1}).validate(model, Digits(batch_size=32), path, verbose=False)


def test_a_checkpoint_of_another_parameterisation_is_refused(trained, tmp_path):
    model, path = trained
    with pytest.raises(InputError, match=r"another parameterisation: {'output': 'DataOutput'}, but the model has"):
        load(path, LitFlow(model.network, OneSample()))
    edm = LitEDM(unet(), OneSample())
    trainer = pl.Trainer(max_steps=1, callbacks=[LastCheckpoint(dirpath=str(tmp_path))], **TRAINER)
    trainer.fit(edm, Digits(batch_size=32))
    with pytest.raises(InputError, match="the checkpoint is not of LitFlow"):
        load(tmp_path / "last.ckpt", LitFlow(unet(), OneSample()))
    with pytest.raises(InputError, match="the checkpoint is of another architecture"):
        load(path, LitEDM(unet(), OneSample()))
