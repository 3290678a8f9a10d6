"""LitMeanFlow: its identity on closed forms, target and tangent, times, weights, guidance, sampling, two ranks."""

import math
from itertools import pairwise

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from scipy import special, stats
from torch import nn

from lit_knn.common.errors import InputError
from lit_knn.common.rng import keyed_default_rng
from lit_knn.estimators import Exact, OneSample
from lit_knn.modules import LitMeanFlow
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.modules.mean_flow_error import LabelledFlow
from lit_knn.modules.shared_dropout import SharedDropout
from lit_knn.modules.time_distributions import LogitNormalTimes, UniformTimes
from lit_knn.nets import ADM, DDPMpp, DiT, UNet
from lit_knn.nets.average_velocity import GAP_FEATURES, AverageVelocity
from lit_knn.nets.base import NO_CLASS
from lit_knn.sampling import MeanFlowModel
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.theory.posterior import posterior_mean
from tests.command_lines import ROOT, TINY
from tests.ranks import run_main
from tests.short_training import train
from tests.toys import rng
from tests.watched import Asked, Images, Tripled, WatchedNet

MEAN, STD = 0.4, 0.6  # of the Gaussian
SMALL = {
    "channels": 8,
    "multipliers": [1],
    "blocks": 1,
    "attention_at": [8],
    "augment_dim": GAP_FEATURES,
}


def unet(**options):
    return UNet(1, channels=8, multipliers=(1, 2), blocks=1, augment_dim=GAP_FEATURES, **options)


def times(size, seed=0):
    """Times r < t, (size,) float64."""
    pairs = 0.05 + 0.9 * torch.rand(2, size, generator=rng(seed), dtype=torch.float64)
    return pairs.amin(0), pairs.amax(0)


def column(t, z):
    return t.reshape(-1, *[1] * (z.ndim - 1)).to(z.dtype)


class Average(nn.Module):
    """A network that is the average velocity of a flow map (z, r, t) -> z_r; it reads the times from its labels."""

    augment_dim = GAP_FEATURES

    def __init__(self, flow_map):
        super().__init__()
        self.flow_map, self.unused = flow_map, nn.Parameter(torch.zeros(()))

    def forward(self, z, noise_label, class_label=None, augment_label=None):
        t = (noise_label + 2) / 4
        gap = torch.acos(augment_label[:, 0]) / math.pi
        t, gap = column(t, z), column(gap, z)
        return (z - self.flow_map(z, t - gap, t)) / gap + self.unused


def gaussian_map(z, r, t):
    """The probability flow keeps (z − E z)/std(z) of Gaussian data."""
    std_t, std_r = (((1 - s) ** 2 * STD**2 + s**2).sqrt() for s in (t, r))
    return (1 - r) * MEAN + (z - (1 - t) * MEAN) * std_r / std_t


def gaussian_mean(z, t):
    s = 1 - t
    return MEAN + s * STD**2 / (s**2 * STD**2 + t**2) * (z - s * MEAN)


def test_exact_average_velocity_has_no_loss_in_any_steps():
    module, (r, t) = LitMeanFlow(Average(gaussian_map), OneSample()), times(40)
    z = torch.randn(40, 1, generator=rng(), dtype=torch.float64)
    exact = gaussian_mean(z, column(t, z))
    assert module.errors(z, r, t, exact, exact).max() < 1e-12
    for wrong in ((exact + 0.1, exact), (exact, exact + 0.1), (0.9 * exact, 0.9 * exact)):
        assert module.errors(z, r, t, *wrong).mean() > 1e-5
    # Only the exact mean at the image of z under the flow has the same average velocity from there.
    model = MeanFlowModel(AverageVelocity(Average(gaussian_map)), (1,))
    once, often = model.sample(range(50)), model.sample(range(50), 7)
    torch.testing.assert_close(once, often, rtol=0, atol=1e-5)
    z = torch.randn(50, 1, generator=rng())
    torch.testing.assert_close(
        model.average_velocity(z, 0.2, 0.7),
        (z - gaussian_map(z, *map(torch.tensor, (0.2, 0.7)))) / 0.5,
    )
    whole = z - gaussian_map(z, *map(torch.tensor, (0.0, 1.0)))
    torch.testing.assert_close(model.average_velocity(z, 0.0, 1.0), whole, rtol=0, atol=1e-5)
    for t in (0.01, 0.99):  # float32 rounds one down and the other up
        assert model.average_velocity(z, t, t).shape == z.shape
    for r in (0.6, -0.1):
        with pytest.raises(InputError, match=f"r must be from 0 to t=0.5, got {r}"):
            model.average_velocity(z, r, 0.5)
    for evaluate in (model, lambda z, t: model.average_velocity(z, 0.0, t)):
        with pytest.raises(
            InputError, match=r"the noise level must be above 0 and from 0 to 1, got 1\.01"
        ):
            evaluate(z, 1.01)


@pytest.mark.parametrize(
    "net",
    [unet, lambda: DDPMpp(8, 1, **SMALL), lambda: ADM(8, 1, **SMALL, head_width=8)],
    ids=["UNet", "DDPM++", "ADM"],
)
def test_network_derivative_is_that_of_finite_differences(net):
    torch.manual_seed(0)
    net = net().double().eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    module = LitMeanFlow(net, OneSample())
    r, t = times(4)
    z, mean, direction = (
        torch.randn(4, 1, 8, 8, generator=rng(seed), dtype=torch.float64) for seed in (1, 2, 3)
    )
    found = module.errors(z, r, t, mean, direction)
    tangent, h = (z - direction) / column(t, z), 1e-5
    ahead, behind = (module.flow(z + step * tangent, t + step, r=r) for step in (h, -h))
    wanted = (z - mean) / column(t, z) - column(t - r, z) * (ahead - behind) / (2 * h)
    expected = (module.flow(z, t, r=r) - wanted).square().flatten(1).mean(1)
    # The central difference errs by h² times third derivatives, here about 1e-6.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    # One time alone is the velocity.
    velocity = module.flow(z, t, r=t)
    assert torch.equal(module.flow(z, t), velocity)
    torch.testing.assert_close(module.evaluate_network(z, t / (1 - t)), velocity)


# Without a tangent the target's one estimate, here a random one, is in both places.
@pytest.mark.parametrize(
    ("estimator", "tangent"),
    [(OneSample(), None), (OneSample(), Exact()), (Exact(), OneSample()), (Asked(), None)],
)
def test_estimator_is_in_target_and_another_in_tangent(estimator, tangent):
    data, seen = Images(60), {}
    module = LitMeanFlow(
        Tripled(), estimator, tangent, UniformTimes(0.2, 0.9), measure_target=False
    )

    def errors(z, r, t, *means, labelled, dropout):
        seen.update(args=(z, r, t), labels=labelled[1:])
        return LitMeanFlow.errors(module, z, r, t, *means, labelled, dropout)

    module.errors = errors
    module.objective = lambda loss, x: seen.update(loss=loss.detach()) or loss.mean()
    module.on_before_optimizer_step = lambda *_: seen.update(
        gradient=module.network.weight.grad.item()
    )
    logged = train(module, data, 1, log_every_n_steps=1).callback_metrics
    z, r, t = seen["args"]
    assert seen["labels"] == (None, None)

    def velocity(own):
        x = data.x.double()
        mean = x
        if isinstance(own, Asked):
            mean = own.drawn[0].double()
        if isinstance(own, Exact):
            mean = posterior_mean(z / column(1 - t, x), x, t / (1 - t))
        return (z - mean) / column(t, x)

    wanted = velocity(estimator) - column(t - r, z) * 3 * velocity(tangent or estimator)
    expected = (3 * z - wanted).square().flatten(1).mean(1)
    # At t = 0.2 a velocity is rounded to some 1e-6; Exact's means have errors of 1e-5.
    torch.testing.assert_close(seen["loss"].double(), expected, rtol=1e-3, atol=1e-4)
    # The target has no gradient.
    assert seen["gradient"] == pytest.approx(2 * ((3 * z - wanted) * z).mean().item(), rel=1e-3)
    # The loss is logged by t in four equal bands.
    for low, high in pairwise(torch.linspace(0.2, 0.9, 5).tolist()):
        band, name = (t > low) & (t <= high), f"train/loss_t_{low:.3g}_to_{high:.3g}"
        mean = seen["loss"][band].mean()
        assert logged[name].item() == pytest.approx(mean.item(), rel=1e-4)


def test_logged_error_is_of_the_target_not_the_tangent():
    def target_mse(estimator, tangent):
        module = LitMeanFlow(Tripled(), estimator, tangent, UniformTimes(0.2, 0.9))
        return train(module, Images(60), 1, limit_val_batches=1).callback_metrics["val/target_mse"]

    # The float32 targets of `Exact` are rounded.
    assert target_mse(Exact(), OneSample()) < 1e-9
    assert target_mse(OneSample(), Exact()) > 1e-3


def test_dropout_differs_in_each_step_and_repeats_with_the_run():
    def masks(seed):
        torch.manual_seed(seed)
        net = WatchedNet(dropout=0.5)
        net.augment_dim = GAP_FEATURES
        train(LitMeanFlow(net, OneSample()), Images(60), 2)
        return [output != 0 for *_, output in net.calls[-2:]]

    first, second = masks(0)
    assert not torch.equal(first, second)
    assert all(torch.equal(*pair) for pair in zip((first, second), masks(1), strict=True))


@pytest.mark.parametrize(
    "times", [None, UniformTimes(0.3, 0.8), LogitNormalTimes(-1.0, 1.5, 0.2, 0.5)]
)
def test_two_times_are_ordered_and_a_share_is_equal(times):
    module = LitMeanFlow(unet(), OneSample(), times=times, different=0.6)
    t = module.draw_times(20_000, rng())
    r = module.pairs.draw_lower(t, rng(1))
    assert (r <= t).all()
    assert (t.dtype, r.dtype) == (torch.float64, torch.float64)
    assert torch.equal(module.pairs.draw_lower(t, rng(1)), r)
    assert (r == t).double().mean().item() == pytest.approx(0.4, abs=5 * (0.24 / 20_000) ** 0.5)
    draws = module.pairs.times.draw(40_000, rng(2)).reshape(2, -1)
    assert stats.ks_2samp(t.numpy(), draws.amax(0).numpy()).pvalue > 0.01
    below, smaller = (r / t)[r < t].numpy(), (draws.amin(0) / draws.amax(0)).numpy()
    assert stats.ks_2samp(below, smaller).pvalue > 0.01
    assert torch.equal(LitMeanFlow(unet(), OneSample(), different=0).pairs.draw_lower(t, rng()), t)


def test_lower_times_are_cut_to_the_upper_ones():
    """The sampler "v1" of the authors: independent draws, r = t for a quarter, and then the smaller of r and t."""
    upper, lower = LogitNormalTimes(-0.6, 1.6), LogitNormalTimes(-4.0, 1.6)
    module = LitMeanFlow(unet(), OneSample(), times=upper, lower_times=lower)
    t = module.draw_times(20_000, rng())
    r = module.pairs.draw_lower(t, rng(1))
    assert (r <= t).all()

    # The logits of t and r are normal, so the one of r is the larger with this probability.
    above = stats.norm.sf((4.0 - 0.6) / (1.6 * 2**0.5))
    equal = 0.25 + 0.75 * above
    error = (equal * (1 - equal) / 20_000) ** 0.5
    assert (r == t).double().mean().item() == pytest.approx(equal, abs=5 * error)

    noise = np.random.default_rng(2).normal(size=(2, 40_000))
    logits = 1.6 * noise - [[0.6], [4.0]]
    below = special.expit(logits[1][logits[1] < logits[0]])
    assert stats.ks_2samp(t.numpy(), special.expit(logits[0])).pvalue > 0.01
    assert stats.ks_2samp(r[r < t].numpy(), below).pvalue > 0.01

    with pytest.raises(InputError, match=r"lower_times begin at 0\.5, and times end at 0\.4"):
        LitMeanFlow(
            unet(),
            OneSample(),
            times=UniformTimes(0.1, 0.4),
            lower_times=UniformTimes(0.5, 0.9),
        )


def gradient(module, *args):
    """The gradient of the mean of `errors`, one vector."""
    loss = module.errors(*args).mean()
    parts = torch.autograd.grad(loss, [*module.parameters()], allow_unused=True)
    return torch.cat([part.flatten() for part in parts if part is not None])


@pytest.mark.parametrize(
    "net",
    [
        lambda: unet(dropout=0.3),
        lambda: DDPMpp(8, 1, **SMALL, dropout=0.3),
        lambda: DiT(1, width=32, depth=2, heads=2, augment_dim=GAP_FEATURES),
    ],
    ids=["UNet", "DDPM++", "DiT"],
)
def test_a_separate_derivative_gives_the_same_gradient(net):
    torch.manual_seed(0)
    net = net()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    module, (r, t) = LitMeanFlow(net, OneSample()).train(), times(4)
    z, mean, direction = torch.randn(3, 4, 1, 8, 8, generator=rng())
    # The tangent is that of an estimator or, without one, the network's, which draws masks, too.
    for tangent in (direction, None):
        gradients = []
        for separate in (False, True):
            module.separate_tangent_pass = separate
            masks = SharedDropout(torch.device("cpu"), 5)
            with keyed_default_rng(torch.device("cpu"), 5):
                gradients.append(gradient(module, z, r, t, mean, tangent, None, masks))
        one, two = gradients
        torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-4 * one.abs().max().item())


@pytest.mark.parametrize("separate", [False, True])
def test_masks_differ_between_steps(separate):
    module = LitMeanFlow(unet(dropout=0.5), OneSample(), separate_tangent_pass=separate)
    seeds = []
    module.network.register_forward_hook(lambda *_: seeds.append(torch.initial_seed()))
    train(module, Images(), 2, limit_val_batches=0)
    passes = 1 + separate
    first, second = seeds[-2 * passes : -passes], seeds[-passes:]
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


class Waves(nn.Module):
    """u = tanh(w·z + t) + cos(π(t − r))·z, in float64."""

    augment_dim = GAP_FEATURES

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, z, noise_label, class_label=None, augment_label=None):
        t = column((noise_label + 2) / 4, z)
        return torch.tanh(self.weight * z + t) + column(augment_label[:, 0], z) * z


@pytest.mark.parametrize("separate", [False, True])
def test_the_networks_velocity_is_in_the_tangent(separate):
    options = {"tangent": "network", "separate_tangent_pass": separate}
    module, (r, t) = LitMeanFlow(Waves(), OneSample(), **options), times(40)
    z, x = torch.randn(2, 40, 3, generator=rng(), dtype=torch.float64)
    errors = module.errors(z, r, t, x, None)

    time, gap = column(t, z), column(t - r, z)
    tanh = torch.tanh(0.7 * z + time)
    slope = 1 - tanh**2
    velocity = tanh + z  # at r = t
    of_z = 0.7 * slope + torch.cos(math.pi * gap)
    of_t = slope - math.pi * torch.sin(math.pi * gap) * z
    u = tanh + torch.cos(math.pi * gap) * z
    difference = u - ((z - x) / time - gap * (of_z * velocity + of_t))
    # The network's labels are rounded to multiples of π in float32.
    torch.testing.assert_close(errors, difference.square().mean(1), rtol=1e-6, atol=1e-6)

    # Neither the target nor the velocity in it has a gradient.
    errors.mean().backward()
    expected = (2 * difference * slope * z).mean()
    assert module.network.weight.grad.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_network_tangent_trains_and_needs_no_estimator():
    net = Tripled()
    options = {"power": 0, "separate_tangent_pass": True, "lr_ramp_up_images": 0}
    module = LitMeanFlow(net, Asked(), "network", **options)
    assert list(module.estimators) == ["estimator"]
    train(module, Images(60), 2)
    assert len(module.estimator.drawn) == 2
    assert net.weight.item() != 3


def test_the_defaults_are_those_of_the_paper():
    module = LitMeanFlow(unet(), OneSample())
    # arXiv 2505.13447, CIFAR-10: 10,000 steps of warm-up with 1,024 images. 0.99995 is the decay
    # of such a step.
    assert module.lr_ramp_up_images == 10_000 * 1024
    assert 0.5 ** (1024 / module.ema_half_life_images) == pytest.approx(0.99995, abs=5e-8)
    assert (module.lr, module.pairs.different, module.power) == (6e-4, 0.75, 0.75)
    assert (module.pairs.times.mean, module.pairs.times.std) == (-2, 2)


@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
def test_the_weight_is_a_constant_power_of_the_squared_error(power):
    module = LitMeanFlow(unet(), OneSample(), power=power)
    x, loss = torch.zeros(3, 1, 2, 2), torch.tensor([0.1, 2.0, 0.0], requires_grad=True)
    objective = module.objective(loss, x)
    (gradient,) = torch.autograd.grad(objective, loss)
    # Four pixels; the gradient of ‖Δ‖²·w over three items with a constant w = (‖Δ‖² + 1e-3)^−power.
    expected = 4 / 3 / (4 * loss.detach() + 1e-3) ** power
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(objective.detach(), (expected * loss.detach()).sum())


def test_a_power_above_0_moves_the_optimum_with_the_noise():
    # One pixel, and velocities 0 and 1 with the posterior 4 : 1. Their mean is the optimum of the exact target.
    velocities, x = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]), torch.zeros(5, 1, 1, 1)

    def slope(power, u):
        u = torch.tensor(u, requires_grad=True)
        module = LitMeanFlow(unet(), OneSample(), power=power)
        (gradient,) = torch.autograd.grad(module.objective((u - velocities).square(), x), u)
        return gradient.item()

    assert slope(0.0, 0.2) == pytest.approx(0, abs=1e-6)
    assert slope(0.75, 0.2) > 0.1
    # 4u/(u² + c)^0.75 = (1 − u)/((1 − u)² + c)^0.75 has its root at u = 0.0014, near the most likely velocity.
    assert slope(0.75, 0.0005) < 0 < slope(0.75, 0.002)


class ByLabel(nn.Module):
    """u = c·z + the sum of the augmentation labels; c is 1 and 2 for the classes, and 5 for none."""

    augment_dim, num_classes = GAP_FEATURES + 9, 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, z, noise_label, class_label=None, augment_label=None):
        labels = torch.full((len(z),), NO_CLASS) if class_label is None else class_label
        value = torch.where(labels == NO_CLASS, 5, labels + 1)
        shift = augment_label[:, GAP_FEATURES:].sum(1)
        return self.weight * column(value, z) * z + column(shift, z)


@pytest.mark.parametrize(("guidance", "kappa"), [(1.5, 0.25), (1.0, 0.5), (2.0, 0.0)])
def test_guidance_mixes_both_velocities_with_the_networks_own(guidance, kappa):
    options = {"class_conditional": True, "label_dropout": 0.1}
    options |= {"augmentation": GeometricAugmentation(), "guidance": guidance, "kappa": kappa}
    module = LitMeanFlow(ByLabel(), OneSample(), **options)
    r, t = torch.tensor([[0.1, 0.5, 0.6], [0.3, 0.5, 0.9]], dtype=torch.float64)
    z, mean, direction = torch.randn(3, 3, 1, 2, 2, generator=rng(), dtype=torch.float64)
    labels = torch.tensor([0, 1, NO_CLASS])
    augment_label = torch.randn(3, 9, generator=rng(1), dtype=torch.float64)
    labelled = LabelledFlow(module.flow, labels, augment_label)
    errors = module.errors(z, r, t, mean, direction, labelled)

    factor, shift = column(torch.tensor([1.0, 2.0, 5.0]), z), column(augment_label.sum(1), z)
    conditional, unconditional = factor * z + shift, 5 * z + shift

    def guided(mean):
        velocity = (z - mean) / column(t, z)
        rest = kappa * conditional + (1 - guidance - kappa) * unconditional
        return torch.where(column(labels, z) == NO_CLASS, velocity, guidance * velocity + rest)

    # Along a velocity w, u = c·z changes by c·w.
    difference = conditional - guided(mean) + column(t - r, z) * factor * guided(direction)
    torch.testing.assert_close(errors, difference.square().flatten(1).mean(1))

    # The network's velocity is the guided one already.
    along_network = conditional - guided(mean) + column(t - r, z) * factor * conditional
    found = module.errors(z, r, t, mean, None, labelled)
    torch.testing.assert_close(found, along_network.square().flatten(1).mean(1))

    # The target has no gradient.
    errors.sum().backward()
    expected = (2 * difference * factor * z).flatten(1).mean(1).sum()
    assert module.network.weight.grad.item() == pytest.approx(expected.item(), rel=1e-5)


def test_guidance_needs_dropped_labels_and_is_only_trained():
    options = {"class_conditional": True, "augmentation": GeometricAugmentation()}
    with pytest.raises(
        InputError, match=r"guidance=2\.0 needs a network that was trained without classes"
    ):
        LitMeanFlow(ByLabel(), OneSample(), guidance=2.0, **options)
    # An effective weight of 1 needs none.
    LitMeanFlow(ByLabel(), OneSample(), guidance=0.75, kappa=0.25, **options)
    model = MeanFlowModel(AverageVelocity(ByLabel()), (1, 2, 2))
    noise = seeded_noise([3], (1, 2, 2))
    torch.testing.assert_close(model.sample([3], class_label=1), -noise)
    torch.testing.assert_close(
        model.average_velocity(noise, 0.0, 1.0, torch.tensor([1])), 2 * noise
    )
    with pytest.raises(InputError, match="guidance from training"):
        model.sample([0], guidance=2.0)


class KeptWeights(pl.Callback):
    """Keeps the weights of each rank in a file of the current folder."""

    def on_train_end(self, trainer, pl_module):
        torch.save([p.detach() for p in pl_module.parameters()], f"{trainer.global_rank}.pt")


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("meanflow", {"lr_ramp_up_images": 0}),
        (
            "meanflow",
            {"lr_ramp_up_images": 0, "tangent": "network", "separate_tangent_pass": "true"},
        ),
        ("sct", {"start": "null", "tangent_warmup_steps": 0}),
    ],
    ids=["mean flow", "separate derivative", "sCT"],
)
def test_two_ranks_average_their_gradients(name, options):
    config, kept = str(ROOT / "configs" / name / "digits.yaml"), f"{__name__}.KeptWeights"
    chosen = [f"--model.{option}={value}" for option, value in options.items()]
    run_main(["fit", "-c", config, *TINY, *chosen, "--trainer.callbacks+", kept], 2)
    # Each rank has items of its own, so their gradients alone would give it other weights.
    for ours, theirs in zip(torch.load("0.pt"), torch.load("1.pt"), strict=True):
        assert torch.equal(ours, theirs)
