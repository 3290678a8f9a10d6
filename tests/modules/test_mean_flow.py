"""LitMeanFlow: its identity on closed forms, target and tangent, times, weights, guidance, sampling, two ranks."""

import math

import pytest
import pytorch_lightning as pl
import torch
from scipy import stats
from torch import nn

from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, OneSample
from lit_knn.modules import LitMeanFlow
from lit_knn.modules.time_distributions import UniformTimes
from lit_knn.nets import ADM, DDPMpp, UNet
from lit_knn.nets.average_velocity import GAP_FEATURES, AverageVelocity
from lit_knn.nets.base import NO_CLASS
from lit_knn.sampling import MeanFlowModel
from lit_knn.theory.posterior import posterior_mean
from tests.command_lines import ROOT, TINY
from tests.ranks import run_main
from tests.short_training import train
from tests.toys import rng
from tests.watched import Images

MEAN, STD = 0.4, 0.6  # of the Gaussian
SMALL = {"channels": 8, "multipliers": [1], "blocks": 1, "attention_at": [8], "augment_dim": GAP_FEATURES}


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


def test_the_exact_average_velocity_has_no_loss_and_samples_in_any_number_of_steps():
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
        model.average_velocity(z, 0.2, 0.7), (z - gaussian_map(z, *map(torch.tensor, (0.2, 0.7)))) / 0.5
    )
    for t in (0.01, 0.99):  # float32 rounds one down and the other up
        assert model.average_velocity(z, t, t).shape == z.shape
    with pytest.raises(InputError, match=r"r must be from 0 to t=0.5, got 0.6"):
        model.average_velocity(z, 0.6, 0.5)


@pytest.mark.parametrize(
    "net",
    [unet, lambda: DDPMpp(8, 1, **SMALL), lambda: ADM(8, 1, **SMALL, head_width=8)],
    ids=["UNet", "DDPM++", "ADM"],
)
def test_the_derivative_of_our_networks_is_that_of_finite_differences(net):
    torch.manual_seed(0)
    net = net().double().eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    module = LitMeanFlow(net, OneSample())
    r, t = times(4)
    z, mean, direction = (torch.randn(4, 1, 8, 8, generator=rng(seed), dtype=torch.float64) for seed in (1, 2, 3))
    found = module.errors(z, r, t, mean, direction)
    tangent, h = (z - direction) / column(t, z), 1e-5
    ahead, behind = (module.flow(z + step * tangent, t + step, r=r) for step in (h, -h))
    wanted = (z - mean) / column(t, z) - column(t - r, z) * (ahead - behind) / (2 * h)
    expected = (module.flow(z, t, r=r) - wanted).square().flatten(1).mean(1)
    # The central difference errs by h² times third derivatives, here about 1e-6.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    # One time alone is the velocity.
    assert torch.equal(module.flow(z, t), module.flow(z, t, r=t))


class Tripled(nn.Module):
    """u = 3z, so that du/dt along a velocity is three times that velocity."""

    augment_dim = GAP_FEATURES

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, z, noise_label, class_label=None, augment_label=None):
        return self.weight * z


@pytest.mark.parametrize(
    ("estimator", "tangent"), [(OneSample(), None), (OneSample(), Exact()), (Exact(), OneSample())]
)
def test_the_estimator_is_in_the_target_and_the_other_one_in_the_tangent(estimator, tangent):
    data, seen = Images(60), {}
    module = LitMeanFlow(Tripled(), estimator, tangent, UniformTimes(0.2, 0.9), measure_target=False)
    module.errors = lambda *args: seen.update(args=args) or LitMeanFlow.errors(module, *args)
    module.objective = lambda loss, x: seen.update(loss=loss.detach()) or loss.mean()
    module.on_before_optimizer_step = lambda *_: seen.update(gradient=module.network.weight.grad.item())
    train(module, data, 1)
    z, r, t, *_, class_label, augment_label = seen["args"]
    assert (class_label, augment_label) == (None, None)

    def velocity(own):
        x = data.x.double()
        mean = posterior_mean(z / column(1 - t, x), x, t / (1 - t)) if isinstance(own, Exact) else x
        return (z - mean) / column(t, x)

    wanted = velocity(estimator) - column(t - r, z) * 3 * velocity(tangent or estimator)
    expected = (3 * z - wanted).square().flatten(1).mean(1)
    # At t = 0.2 a velocity is rounded to some 1e-6; Exact's means have errors of 1e-5.
    torch.testing.assert_close(seen["loss"].double(), expected, rtol=1e-3, atol=1e-4)
    # The target has no gradient.
    assert seen["gradient"] == pytest.approx(2 * ((3 * z - wanted) * z).mean().item(), rel=1e-3)


def test_the_two_times_are_two_draws_in_order_and_a_share_of_them_is_equal():
    module = LitMeanFlow(unet(), OneSample(), different=0.6)
    t = module.draw_times(20_000, rng())
    r = module.draw_lower(t, rng(1))
    assert (r <= t).all()
    assert (r == t).double().mean().item() == pytest.approx(0.4, abs=5 * (0.24 / 20_000) ** 0.5)
    draws = module.grid.draw(40_000, rng(2)).reshape(2, -1)
    assert stats.ks_2samp(t.numpy(), draws.amax(0).numpy()).pvalue > 0.01
    below, smaller = (r / t)[r < t].numpy(), (draws.amin(0) / draws.amax(0)).numpy()
    assert stats.ks_2samp(below, smaller).pvalue > 0.01
    assert torch.equal(LitMeanFlow(unet(), OneSample(), different=0).draw_lower(t, rng()), t)


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


class ByLabel(nn.Module):
    """u = 1, 2, … for the classes 0, 1, …, and 5 without a class."""

    augment_dim, num_classes = GAP_FEATURES, 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, z, noise_label, class_label=None, augment_label=None):
        labels = torch.full((len(z),), NO_CLASS) if class_label is None else class_label
        value = torch.where(labels == NO_CLASS, 5, labels + 1)
        return self.weight * column(value, z) + 0 * z


def test_guidance_mixes_the_velocity_with_the_networks_own():
    options = {"class_conditional": True, "label_dropout": 0.1}
    module = LitMeanFlow(ByLabel(), OneSample(), guidance=1.5, kappa=0.25, **options)
    z, t = torch.randn(3, 1, 2, 2, generator=rng()), torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64)
    labels, mean = torch.tensor([0, 1, NO_CLASS]), torch.zeros(3, 1, 2, 2)
    found = module.errors(z, t, t, mean, mean, labels)
    velocity, own = z / column(t, z), column(torch.tensor([1.0, 2.0, 5.0]), z)
    wanted = torch.where(column(labels, z) == NO_CLASS, velocity, 1.5 * velocity + 0.25 * own - 0.75 * 5)
    torch.testing.assert_close(found, (own - wanted).square().flatten(1).mean(1))
    with pytest.raises(InputError, match=r"guidance=2\.0 needs a network that was trained without classes"):
        LitMeanFlow(ByLabel(), OneSample(), guidance=2.0, class_conditional=True)
    model = MeanFlowModel(AverageVelocity(ByLabel()), (1, 2, 2))
    torch.testing.assert_close(model.sample([3], class_label=1), model.sample([3], class_label=0) - 1)
    with pytest.raises(InputError, match="guidance from training"):
        model.sample([0], guidance=2.0)


class KeptWeights(pl.Callback):
    """Keeps the weights of each rank in a file of the current folder."""

    def on_train_end(self, trainer, pl_module):
        torch.save([p.detach() for p in pl_module.parameters()], f"{trainer.global_rank}.pt")


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_two_ranks_average_their_gradients():
    config, kept = str(ROOT / "configs" / "meanflow" / "digits.yaml"), f"{__name__}.KeptWeights"
    run_main(["fit", "-c", config, *TINY, "--model.lr_ramp_up_images", "0", "--trainer.callbacks+", kept], 2)
    # Each rank has items of its own, so their gradients alone would give it other weights.
    for ours, theirs in zip(torch.load("0.pt"), torch.load("1.pt"), strict=True):
        assert torch.equal(ours, theirs)
