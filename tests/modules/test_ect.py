"""Consistency tuning: its loss against the formulas in float64, its levels, its start and bad input."""

import math

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.data import Digits
from lit_knn.estimators import Exact, OneSample
from lit_knn.modules import LitECT
from lit_knn.nets import DDPMpp, UNet
from lit_knn.sampling.loading import convert, load_network
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.sampling.schedules import PseudoHuber, euclidean
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.posterior import posterior_mean
from tests import ROOT
from tests.networks import write_own, write_published, write_start
from tests.short_training import train
from tests.toys import noisy
from tests.trained_runs import last
from tests.watched import Images, WatchedNet, undone

GENUINE = ROOT.parent / "shared" / "data" / "edm-pickles"


def tiny_unet(**options):
    return UNet(1, channels=8, multipliers=(1, 2), blocks=1, **options)


def watched(folder, estimator, **options):
    """A LitECT whose network records its calls."""
    net = WatchedNet()
    start = write_start(folder / "start.ckpt", net)
    return LitECT(estimator, start, net, **options), net


def paper_level(t, stage, q=2.0, k=8.0, b=1.0):
    """r of arXiv 2406.14548, one number at a time."""
    n = 1 + k / (1 + math.exp(min(b * t, 700.0)))
    return max(0.0, t * (1 - n / q**stage))


def consistency(z, t):
    """EDM's preconditioning of a constant network, (B, d)."""
    return (0.25 / (t**2 + 0.25) * z + 0.5 * t / (t**2 + 0.25).sqrt() * 0.3).flatten(1)


# The loss


@pytest.mark.parametrize(
    ("estimator", "solver", "metric", "stage"),
    [
        (Exact(), euler_step, PseudoHuber(0.7), 1),
        (Exact(), heun_step, euclidean, 1),
        (Exact(), heun_step, euclidean, 3),
        (OneSample(), heun_step, PseudoHuber(0.7), 1),
    ],
)
def test_teacher_loss_and_gradient_are_those_of_the_formulas(estimator, solver, metric, stage, tmp_path):
    schedule = {"q": 2.0**stage, "k": 3.0, "b": 0.7}
    model, net = watched(tmp_path, estimator, solver=solver, metric=metric, stages=1, P_mean=0.5, **schedule)
    data, logged, gradients = Images(60), {}, []
    model.log = lambda name, value, **_: logged.update({name: value.item()})
    model.on_before_optimizer_step = lambda *_: gradients.append(net.value.grad.item())
    train(model, data, 1)
    z, t = undone(net.calls[-2])
    r = torch.tensor([paper_level(level, 1, **schedule) for level in t.flatten().tolist()]).double().reshape(t.shape)
    # The label of level 0 is that of another level, so the teacher's point is found with the paper's r.
    z_hat = net.calls[-1][0].double() * (r**2 + 0.25).sqrt()
    at_0 = r.flatten() == 0
    assert at_0.any() == (stage == 1)
    assert not at_0.all()

    x, plain = data.x.double(), isinstance(estimator, OneSample)
    mu = x if plain else posterior_mean(z, x, t.flatten())
    expected = euler = z + (r - t) / t * (z - mu)
    if solver is heun_step and not plain:
        below = torch.where(r > 0, r, t)
        slope = (euler - posterior_mean(euler, x, below.flatten())) / below
        # Far below t the step is Euler's.
        expected = torch.where(r < 0.4 * t, euler, z + (r - t) * ((z - mu) / t + slope) / 2)
    torch.testing.assert_close(z_hat, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(z_hat[at_0], mu[at_0], rtol=1e-5, atol=1e-5)

    difference = consistency(z, t) - consistency(z_hat, r)
    c = getattr(metric, "c", 0.0)
    distance = (difference.square().sum(1) + c**2).sqrt()
    weight = 1 / (t - r).flatten()
    assert logged["train/loss"] == pytest.approx((weight * (distance - c)).mean().item(), rel=1e-3)
    # Only the student's output, c_skip·z + c_out·v, depends on the weight v.
    by_weight = (difference * (0.5 * t / (t**2 + 0.25).sqrt()).flatten(1)).sum(1)
    assert gradients[0] == pytest.approx((weight * by_weight / distance).mean().item(), rel=1e-3)


def test_the_teacher_stays_near_the_trajectory_however_far_the_step_goes_down(tmp_path):
    model, _ = watched(tmp_path, Exact(), solver=heun_step)
    x = Images(60).x.double().flatten(1)

    def mean(z, t):
        return posterior_mean(z, x, t)

    ratio = torch.logspace(-3, -0.05, 400, dtype=torch.float64)
    t = torch.logspace(-0.5, 0.5, 400, dtype=torch.float64)
    z = noisy(x[torch.arange(400) % len(x)], t)
    # The probability flow in 400 Heun steps with one ratio of levels.
    flow = z
    for step in range(400):
        flow = heun_step(flow, t * ratio ** (step / 400), t * ratio ** ((step + 1) / 400), mean)
    error = (model.step_down(z, t, ratio * t, mean) - flow).square().mean(1).sqrt()
    plain = (heun_step(z, t, ratio * t, mean) - flow).square().mean(1).sqrt()
    # One step is never off by more than the data are spread; Heun's alone is. Where the levels are near, they agree.
    assert error.max() < x.std()
    assert plain.max() > 10 * x.std()
    assert torch.equal(error[ratio > 0.4], plain[ratio > 0.4])


def test_levels_are_log_normal_and_the_stage_follows_the_steps(tmp_path):
    stages = []
    model, net = watched(tmp_path, OneSample(), stage_steps=3, stages=4, P_mean=0.6, P_std=0.7)
    model.on_train_batch_start = lambda *_: stages.append(model.stage)
    train(model, Images(60), 20)
    assert stages == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 11
    log_t = torch.cat([4 * call[1] for call in net.calls[-40::2]])
    # 1,200 draws: the mean has the standard deviation 0.02.
    assert log_t.mean().item() == pytest.approx(0.6, abs=0.08)
    assert log_t.std().item() == pytest.approx(0.7, abs=0.06)
    (_, t), (_, r) = map(undone, net.calls[-2:])
    assert r.flatten().tolist() == pytest.approx([paper_level(level, 4) for level in t.flatten().tolist()], rel=1e-5)


# The start


@pytest.mark.parametrize(
    ("kind", "given"),
    [(".pkl", False), (".pkl", True), (".safetensors", False), (".safetensors", True), (".ckpt", True)],
)
def test_the_first_step_starts_with_the_denoiser_of_the_file(kind, given, tmp_path):
    path, shape, net, architecture = tmp_path / f"start{kind}", (3, 32, 32), None, None
    if kind == ".ckpt":
        write_own(path, augment_dim=9)
        net, shape, architecture = tiny_unet(dropout=0.4), (1, 8, 8), tiny_unet(augment_dim=9)
    else:
        pickled = write_published(tmp_path / "start.pkl")
        if kind == ".safetensors":
            convert(pickled, path)
        if given:
            net = DDPMpp(32, 3, 8, multipliers=[1, 1], blocks=1, attention_at=[16], dropout=0.4)
    model = LitECT(OneSample(), path, net).eval()
    assert net is None or model.network is net
    model.image_shape = shape
    z = 80 * seeded_noise([3, 4], shape)
    denoised = load_network(path, architecture)(z, torch.tensor(80.0))
    torch.testing.assert_close(model.sample([3, 4]), denoised, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.evaluate_network(z, torch.zeros(2)), z)  # exactly the identity at level 0
    # A layer without gradients would stop a distributed run.
    assert all(value.requires_grad for value in model.parameters())
    assert not any("augment" in name for name, _ in model.named_parameters())
    assert all(module.training for module in model.train().modules())
    dropout = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert dropout <= {0.0, 0.4}
    assert kind != ".ckpt" or 0.4 in dropout


def test_what_a_given_net_freezes_stays_frozen(tmp_path):
    write_own(tmp_path / "start.ckpt", augment_dim=9)
    net = tiny_unet()
    frozen = next(iter(dict(net.named_parameters())))
    net.get_parameter(frozen).requires_grad_(False)
    model = LitECT(OneSample(), tmp_path / "start.ckpt", net)
    assert [name for name, value in model.network.named_parameters() if not value.requires_grad] == [frozen]


@pytest.mark.skipif(not GENUINE.is_dir(), reason="no ../shared/data/edm-pickles with networks pickled by NVIDIA's code")
@pytest.mark.parametrize("name", ["uncond_vp", "cond_adm"])
def test_a_network_that_nvidia_pickled_is_tuned(name):
    record = torch.load(GENUINE / f"{name}.pt", weights_only=True)
    labels = record["labels"]
    model = LitECT(OneSample(), GENUINE / f"{name}.pkl", class_conditional=labels is not None).eval()
    output = model.consistency_function(record["z"], record["sigma"].double(), labels)
    error = (output - record["denoised"]).flatten(1).norm(dim=1) / record["denoised"].flatten(1).norm(dim=1)
    assert error.max() <= 1e-5
    output.square().sum().backward()
    gradients = [value.grad for value in model.parameters()]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert sum(bool(gradient.any()) for gradient in gradients) > 0.9 * len(gradients)


# Bad input


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("q", 1.0, "q must be above 1 and finite, because the gap shrinks"),
        ("q", math.nan, "q must be above 1"),
        ("k", -1.0, "k must be at least 0"),
        ("b", math.inf, "b must be at least 0 and finite"),
        ("stage_steps", 0, "stage_steps and stages must be at least 1, got 0"),
        ("stages", 24, "q=2.0 and stages=24 leave r within float32's rounding of t"),
        ("k", 1e300, "k=1e[+]300, .* leave r = 0 at all t up to 80 in the last stage, so r never approaches t"),
        ("P_mean", 1000.0, "P_mean=1000.0 and P_std=2.0 draw noise levels beyond the range of float32"),
        ("P_std", -1.0, "P_std must be above 0"),
        ("sampling_sigmas", (80.0, 0.0), r"sampling_sigmas=.* must descend and stay above sigma_min=0"),
        ("sigma_data", 0.3, r"start=.*a\.ckpt was trained with sigma_data=0.5, not 0.3"),
        ("class_conditional", True, "num_classes=0"),
        ("metric", torch.nn.functional.mse_loss, r"mse_loss must return a finite distance of each item.* got \(\)"),
        ("metric", abs, "metric=abs does not take the arguments student, teacher"),
        ("solver", math.sqrt, "solver=sqrt does not take"),
    ],
)
def test_an_option_out_of_range_is_named(option, value, message, tmp_path):
    net = WatchedNet()
    with pytest.raises(InputError, match=f"^LitECT: .*{message}|^LitECT: {message}") as caught:
        LitECT(OneSample(), write_start(tmp_path / "a.ckpt", net), net, **{option: value})
    assert "\n" not in str(caught.value)


def test_a_start_that_is_no_denoiser_of_the_architecture_is_refused(trained_run, tmp_path):
    own = write_own(tmp_path / "own.ckpt")
    published = write_published(tmp_path / "published.pkl")
    foreign = write_start(tmp_path / "foreign.ckpt", WatchedNet())
    for start, net, message in [
        (tmp_path / "none.pkl", None, r"none\.pkl: no such file"),
        (last(trained_run("ict")[0]), tiny_unet(), r"last\.ckpt: a consistency model has no denoiser"),
        (foreign, None, r"foreign\.ckpt: the file does not tell the architecture .*: give net"),
        (own, UNet(1, channels=16, multipliers=(1, 2), blocks=1), r"own\.ckpt: the weights do not fit the arch"),
        (own, tiny_unet(num_classes=10), r"own\.ckpt: the weights do not fit the architecture"),
        (published, tiny_unet(), r"published\.pkl: the weights do not fit the architecture"),
    ]:
        with pytest.raises(InputError, match=f"^LitECT: start=.*{message}") as caught:
            LitECT(OneSample(), start, net)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"^LitECT: the net has augment_dim=9, but tuning has no augmentation"):
        LitECT(OneSample(), own, tiny_unet(augment_dim=9))
    with pytest.raises(InputError, match="start=null needs net"):
        LitECT(OneSample(), None)
    with pytest.raises(InputError, match="in_channels=3, but the images have the shape"):
        train(LitECT(OneSample(), published), Digits(batch_size=64), 1)
