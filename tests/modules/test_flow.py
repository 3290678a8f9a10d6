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
from lit_knn.estimators import Exact, Network, OneSample
from lit_knn.modules import LitEDM, LitFlow
from lit_knn.modules.time_distributions import LogitNormalTimes, UniformTimes
from lit_knn.nets import DDPMpp, UNet
from lit_knn.nets.flow import DataOutput, EDMOutput, NoiseOutput, VelocityOutput
from lit_knn.sampling.flow_times import FixedSteps
from lit_knn.sampling.solvers import euler_step
from lit_knn.theory.noise import LINEAR_PROCESS, per_item
from tests.flows import log_density_of_points, of_items, velocity_by_autograd
from tests.short_training import TRAINER, train
from tests.toys import all_warped
from tests.trained_runs import last
from tests.watched import Images, WatchedNet


def unet():
    return UNet(1, channels=4, multipliers=(1,), blocks=1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def velocity_of_points(z, tau, points):
    """The mean velocity of a finite set (N, *shape) at one latent, by autograd."""
    flat = points.double().flatten(1)
    return velocity_by_autograd(lambda z, t: log_density_of_points(z, t, flat), z.flatten(), tau).reshape(z.shape)


@pytest.mark.parametrize("kind", [VelocityOutput, DataOutput, NoiseOutput, EDMOutput])
def test_all_labels_reach_the_network(kind):
    net, seen = WatchedNet(), []
    net.register_forward_pre_hook(lambda net, inputs: seen.append(inputs))
    labels = torch.tensor([1, 2]), torch.ones(2, 9)
    velocity = kind(net)(torch.zeros(2, 1, 2, 2), torch.tensor([0.25, 0.75]), *labels)
    assert velocity.dtype == torch.float32
    _, noise_label, *given = seen[0]
    torch.testing.assert_close(noise_label, torch.tensor([1 / 3, 3.0]).log() / 4)
    assert all(a is b for a, b in zip(given, labels, strict=True))


# Times


@pytest.mark.parametrize("low", [1e-4, 0.3])
def test_times_follow_their_distribution_between_the_ends(low):
    uniform = UniformTimes(low, 0.8).draw(4000, generator())
    assert stats.kstest(uniform.numpy(), "uniform", args=(low, 0.8 - low)).pvalue > 0.01
    times = LogitNormalTimes(0.5, 1.5, low, 0.8).draw(4000, generator())
    # ln σ = logit τ is normal, as in EDM, and cut at the ends.
    a, b = ((torch.tensor(end).double().logit().item() - 0.5) / 1.5 for end in (low, 0.8))
    assert stats.kstest(torch.special.logit(times).numpy(), "truncnorm", args=(a, b, 0.5, 1.5)).pvalue > 0.01
    for drawn in (uniform, times):
        assert low - 1e-12 <= drawn.min()
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


@pytest.mark.parametrize(
    ("estimator", "times", "warped"),
    [
        (OneSample(), UniformTimes(0.05, 0.95), False),
        (Exact(), LogitNormalTimes(-0.5, 0.8), False),
        (Exact(), UniformTimes(0.3, 0.7), True),
    ],
)
def test_the_loss_is_the_squared_distance_to_the_velocity_of_the_set(estimator, times, warped):
    data, net, logged = Images(60), WatchedNet(), {}
    model = LitFlow(net, estimator, times=times)
    # The set is warped like the item.
    warp = all_warped(data.x).warp
    if warped:
        model.augmentation = lambda images, generator: all_warped(images)
    model.log = lambda name, value, **_: logged.update({name: value.item()})
    train(model, data, 1)
    z, noise_label, _ = net.calls[-1]
    z, tau, losses = z.double(), torch.sigmoid(4 * noise_label.double()), []
    for item in range(60):
        points = warp.rows(slice(item, item + 1)).apply(data.x.unsqueeze(0))[0] if warped else data.x
        own = isinstance(estimator, OneSample)
        target = (z[item] - data.x[item]) / tau[item] if own else velocity_of_points(z[item], tau[item], points)
        losses.append((0.3 - target).square().mean())
    assert logged["train/loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-3)
    assert logged.get("train/augmented") == (1 if warped else None)


def test_sampling_has_the_class_and_the_solver_of_the_options():
    net, sampler = WatchedNet(num_classes=10), FixedSteps(euler_step)
    options = {"class_conditional": True, "sampling_class": 3, "sampler": sampler, "sampling_steps": 7}
    model = LitFlow(net, Exact(), **options)
    train(model, Digits(batch_size=64), 1)
    assert net.labels[-1].dtype == torch.int64
    net.labels.clear()
    model.sample([5, 6])
    assert [labels.tolist() for labels in net.labels] == [[3, 3]] * 7


# Checkpoints


def test_a_checkpoint_is_an_estimator_and_a_flow_and_not_of_another_parameterisation(trained_run, tmp_path):
    net = DDPMpp(image_size=8, in_channels=1, channels=16, multipliers=[1], blocks=1, attention_at=[])
    model, path = LitFlow(net, OneSample(), output=DataOutput, lr=1e-2, lr_ramp_up_images=0), tmp_path / "last.ckpt"
    trainer = pl.Trainer(max_steps=5, callbacks=[LastCheckpoint(dirpath=str(tmp_path))], **TRAINER)
    trainer.fit(model, Digits(batch_size=64))
    z, sigma = torch.randn(3, 1, 8, 8), torch.tensor([0.1, 1.0, 20.0])
    tau = (sigma / (1 + sigma)).double()
    scaled = ((1 - of_items(tau, z)) * z).float()
    with torch.no_grad():
        velocity = model.eval().flow(scaled, tau)
    torch.testing.assert_close(lit_knn.load(path)(scaled, tau), velocity)
    mean = scaled - of_items(tau, z).float() * velocity
    torch.testing.assert_close(Network(path).posterior_mean(z, sigma), mean, rtol=1e-4, atol=1e-4)
    assert Network(path, fp16=True).posterior_mean(z, sigma).dtype == torch.float32

    validation = pl.Trainer(**{**TRAINER, "limit_val_batches": 1})
    for checkpoint, other, message in [
        (path, LitFlow(net, OneSample()), r"another parameterisation: {'output': 'DataOutput'}, but the model has"),
        (last(trained_run("edm")[0]), LitFlow(unet(), OneSample()), "the checkpoint is not of LitFlow"),
        (path, LitEDM(unet(), OneSample()), "the checkpoint is of another architecture"),
    ]:
        with pytest.raises(InputError, match=message):
            validation.validate(other, Digits(batch_size=32), checkpoint, verbose=False)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"sampling_steps": 0}, "sampling_steps must be above 0, got 0"),
        ({"sampler": FixedSteps(max)}, "LitFlow: solver=max does not take the arguments z, t, t_next, "),
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
