"""LitSCT: its gradient, masks, levels, weight and start, and a bf16 run."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import lit_knn
from lit_knn.commands.export import export
from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, OneSample
from lit_knn.modules import LitSCT
from lit_knn.modules.adaptive_weight import AdaptiveWeight
from lit_knn.modules.shared_dropout import SharedDropout
from lit_knn.nets import UNet
from lit_knn.nets.precond import ConsistencyFunction
from lit_knn.sampling.noise_grid import karras_sigmas
from lit_knn.sampling.solvers import euler_step
from lit_knn.theory.posterior import posterior_mean
from main import main
from tests.command_lines import ROOT, TINY
from tests.gaussian_flow import slope
from tests.nets.test_trig_flow import Smooth
from tests.networks import write_own
from tests.short_training import train
from tests.toys import rng
from tests.trained_runs import last
from tests.watched import Images, WatchedNet, undone

SIGMA_DATA = 0.5
PLAIN = {"tangent_warmup_steps": 0, "tangent_floor": None, "adaptive_weight": False}


def unet(**options):
    return UNet(1, channels=8, multipliers=(1, 2), blocks=1, **options)


# The gradient


def gradient_of(loss, net):
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, [*net.parameters()])])


def test_discrete_training_approaches_the_gradient_to_first_order():
    data = torch.randn(12, 4, generator=rng(2)) * 0.6

    def mean(z, t):
        return posterior_mean(z, data.double(), t).to(z.dtype)

    def gradients(num_steps):
        """Of consistency matching with the squared distance, on iCT's grid, and of sCT at the same latents."""
        sigmas = karras_sigmas(num_steps, sigma_min=0.05, sigma_max=20.0)
        lower = torch.linspace(0, num_steps - 2, 64).long()
        t, r = sigmas[lower + 1], sigmas[lower]
        z = data[torch.arange(64) % 12] + t.float()[:, None] * torch.randn(64, 4, generator=rng(3))
        net = Smooth()

        function = ConsistencyFunction(net, SIGMA_DATA, 0.0)
        teacher = function(euler_step(z, t, r, mean), r).detach()
        distance = (function(z, t) - teacher).square().sum(1)
        # Equal to the continuous gradient's weight, with dσ/dt and the factor c_out of the student's output.
        weight = (t**2 + SIGMA_DATA**2) / (SIGMA_DATA * t * (t - r))
        discrete = gradient_of((weight * distance).mean(), net)

        module = LitSCT(OneSample(), net=net, **PLAIN)
        dropout = SharedDropout(torch.device("cpu"), 0)
        losses = module.item_losses(z, t, mean(z, t), 1.0, dropout)
        return discrete, gradient_of(4 * losses.mean(), net)

    counts, errors = [40, 80, 160, 320, 10_000], []
    for count in counts:
        discrete, continuous = gradients(count)
        errors.append(((discrete - continuous).norm() / continuous.norm()).item())
    assert slope(counts[:-1], errors[:-1]) == pytest.approx(1, abs=0.15)
    # float32 rounds the difference of neighbours, 1/10,000 apart.
    assert errors[-1] < 2e-3


@pytest.mark.parametrize("estimator", [OneSample(), Exact()])
@pytest.mark.parametrize("floor", [None, 0.3])
def test_training_step_has_the_loss_and_gradient_of_the_formulas(estimator, floor):
    net, data, seen = WatchedNet(dropout=0.5), Images(60), {}
    model = LitSCT(estimator, net=net, **(PLAIN | {"tangent_floor": floor}))
    model.log = lambda name, value, **_: seen.update({name: value.item()})
    model.on_before_optimizer_step = lambda *_: seen.update(gradient=net.value.grad.item())
    train(model, data, 1)

    z, sigma = undone(net.calls[-2])
    mask = 2.0 * (net.calls[-2][2] != 0)  # The output is the parameter, 0.3, through dropout.
    cos, sin = SIGMA_DATA / (sigma**2 + 0.25).sqrt(), sigma / (sigma**2 + 0.25).sqrt()
    x = data.x.double()
    mean = x if isinstance(estimator, OneSample) else posterior_mean(z, x, sigma)
    velocity = (cos**2 * z - mean) / sin
    # The output depends on neither z nor σ. Another mask in the tangent would give another g.
    g = -(cos**2) * (-SIGMA_DATA * 0.3 * mask - velocity) - cos * sin * cos * z
    assert seen["train/loss"] == pytest.approx(g.square().mean().item(), rel=1e-3)
    norm = g.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    direction = g if floor is None else g / (norm + floor)
    # F is minus the output.
    assert seen["gradient"] == pytest.approx((2 * direction * mask).mean().item(), rel=1e-3)


class Precisions(nn.Module):
    """Records whether autocast is on in each call, the types of its values, and what dropout leaves of ones."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Conv2d(1, 1, 3, padding=1), nn.Dropout(0.5)
        self.precisions, self.masks = [], []

    def forward(self, x_scaled, noise_label, class_label=None):
        out = self.layer(x_scaled)
        types = (out.dtype, x_scaled.dtype, noise_label.dtype)
        self.precisions.append((torch.is_autocast_enabled("cpu"), *types))
        self.masks.append(self.dropout(torch.ones(50, dtype=out.dtype)))
        return self.dropout(out)


def test_tangent_is_float32_under_bf16_with_the_same_mask():
    net = Precisions()
    model = LitSCT(OneSample(), net=net)
    train(model, Images(), 2, precision="bf16-mixed")
    single = (torch.float32, torch.float32)
    student, tangent = (True, torch.bfloat16, *single), (False, torch.float32, *single)
    assert net.precisions[-4:] == [student, tangent, student, tangent]
    for first, second in (net.masks[-4:-2], net.masks[-2:]):
        assert torch.equal(first.float(), second)
        assert set(first.tolist()) == {0.0, 2.0}
    assert not torch.equal(net.masks[-3], net.masks[-1])
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# Levels, warm-up and weight


def test_levels_are_log_normal_between_their_ends():
    module = LitSCT(
        OneSample(), net=unet(), P_mean=0.5, P_std=1.5, sigma_max=5.0, sampling_sigmas=[5.0]
    )
    log_sigma = module.draw_levels(5000, rng()).log().numpy()
    low, high = ((np.log(end) - 0.5) / 1.5 for end in (0.002, 5.0))
    expected = stats.truncnorm(low, high, loc=0.5, scale=1.5)
    assert stats.kstest(log_sigma, expected.cdf).pvalue > 0.01


def test_share_of_the_derivative_grows_and_validation_has_all_of_it():
    model, shares = LitSCT(OneSample(), net=WatchedNet(), tangent_warmup_steps=4), []
    losses = model.item_losses
    model.item_losses = lambda *args: shares.append((model.training, args[3])) or losses(*args)
    # The share grows with the optimiser's steps, of two batches each.
    train(model, Images(30), 6, limit_val_batches=1, accumulate_grad_batches=2)
    expected = np.repeat([0.0, 0.25, 0.5, 0.75, 1.0, 1.0], 2).tolist()
    assert [share for trains, share in shares if trains] == expected
    assert {share for trains, share in shares if not trains} == {1.0}


def test_learnt_weight_makes_the_losses_of_all_levels_equal():
    sigma = torch.logspace(-2, 1.5, 64)
    losses, weight = 1e-2 / (1 + sigma**2), AdaptiveWeight()
    optimiser = torch.optim.Adam(weight.parameters(), lr=0.1)
    for _ in range(300):
        optimiser.zero_grad()
        w = weight(sigma)
        (w.exp() * losses - w).mean().backward()
        optimiser.step()
    torch.testing.assert_close(weight(sigma).exp() * losses, torch.ones(64), rtol=0.25, atol=0)

    # In the module the weight multiplies the network's gradient, and is trained with the loss of the normalised g.
    module = LitSCT(OneSample(), net=unet())
    nn.init.constant_(module.adaptive_weight.offset, 2.0)
    student = torch.zeros(3, 1, 2, 2, requires_grad=True)
    tangent = torch.randn(3, 1, 2, 2, generator=rng())
    loss = module.published_losses(student, tangent, torch.ones(3)).sum()
    by_student, by_offset = torch.autograd.grad(loss, [student, module.adaptive_weight.offset])
    unit = tangent / (tangent.flatten(1).norm(dim=1).reshape(3, 1, 1, 1) + 0.1)
    factor = torch.tensor(2.0).exp()
    torch.testing.assert_close(by_student, -2 / 4 * factor * unit)
    torch.testing.assert_close(by_offset, (factor * unit.square().flatten(1).mean(1) - 1).sum())


def test_the_defaults_are_those_of_the_paper():
    module = LitSCT(OneSample(), net=unet())
    optimiser = module.configure_optimizers()
    # arXiv 2410.11081, Appendix G.2, CIFAR-10 and "all experiments".
    assert (optimiser.defaults["lr"], optimiser.defaults["betas"]) == (1e-4, (0.9, 0.99))
    assert isinstance(optimiser, torch.optim.RAdam)
    assert (module.P_mean, module.P_std, module.tangent_floor) == (-1.0, 1.4, 0.1)
    assert module.tangent_warmup_steps == 10_000
    # A half-life of 0.5 million images at a batch of 512; the second step is at t = 1.1.
    assert module.ema_decay == pytest.approx(0.5 ** (512 / 500_000), abs=2e-5)
    assert module.sampling_sigmas[1] == pytest.approx(0.5 * np.tan(1.1), abs=5e-4)


# The start, and a run


def test_start_is_an_edm_or_a_consistency_model(trained_run, tmp_path):
    starts = {"edm": write_own(tmp_path / "edm.ckpt"), "ict": last(trained_run("ict")[0])}
    for name, start in starts.items():
        trained = lit_knn.load(start)
        model = LitSCT(OneSample(), start, unet(dropout=0.4)).eval()
        state = trained.net.state_dict()
        assert all(
            torch.equal(value, state[key]) for key, value in model.network.state_dict().items()
        )
        model.image_shape = (1, 8, 8)
        if name == "edm":
            z = 80 * torch.randn(2, 1, 8, 8, generator=rng())
            denoised = trained.posterior_mean(z, 80.0)
            torch.testing.assert_close(model.evaluate_network(z, torch.full((2,), 80.0)), denoised)
        assert model.tunes
        assert LitSCT(OneSample(), start).network.channels == 8
    with pytest.raises(InputError, match=r"LitSCT: start=.* a flow model cannot be tuned"):
        LitSCT(OneSample(), last(trained_run("flow")[0]), unet())


@pytest.mark.usefixtures("own_folder")
def test_a_run_samples_the_same_after_loading_and_export():
    config = str(ROOT / "configs" / "sct" / "digits.yaml")
    main(["fit", "-c", config, *TINY, "--model.start", "null", "--trainer.logger.save_dir", "runs"])
    run = "runs/sct_digits/knn_0"
    export(run, "exported")
    net = UNet(1, channels=8, multipliers=(1, 2), blocks=1)
    path = f"{run}/checkpoints/last.ckpt"
    module = LitSCT.load_from_checkpoint(path, estimator=OneSample(), net=net).eval()
    for steps in (1, 2):
        expected = module.sample(range(3), steps)
        assert torch.equal(lit_knn.load(run).sample(range(3), steps), expected)
        assert torch.equal(lit_knn.load("exported").sample(range(3), steps), expected)
