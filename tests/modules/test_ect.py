"""Consistency tuning: its loss against the formulas in float64, its start, its sampler, resuming and bad input."""

import math

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.callbacks import LastCheckpoint
from lit_knn.common.errors import InputError
from lit_knn.data import Digits
from lit_knn.estimators import KNN, Exact, OneSample
from lit_knn.modules import LitECT, LitICT
from lit_knn.nets import ADM, DDPMpp, NCSNpp, UNet
from lit_knn.nets.precond import ConsistencyFunction, EDMPrecond
from lit_knn.sampling.loading import convert, load_network
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.sampling.schedules import PseudoHuber, euclidean
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.posterior import posterior_mean
from tests import ROOT
from tests.networks import small_published, write_own, write_published, write_start
from tests.short_training import TRAINER, train
from tests.toys import noisy
from tests.watched import Images, WatchedNet

GENUINE = ROOT.parent / "shared" / "data" / "edm-pickles"
ALL = 60  # images in one batch


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


def levels_and_points(net, stage, **schedule):
    """Levels t and r, (B, 1, 1, 1), and points z and ẑ of the last step, in float64."""
    (student, label, _), (teacher, _, _) = net.calls[-2:]
    t = torch.exp(4 * label.double()).reshape(-1, 1, 1, 1)
    r = torch.tensor([paper_level(level, stage, **schedule) for level in t.flatten().tolist()])
    r = r.double().reshape(t.shape)
    return t, r, student.double() * (t**2 + 0.25).sqrt(), teacher.double() * (r**2 + 0.25).sqrt()


def consistency(z, t, output=0.3):
    """EDM's preconditioning of a constant network."""
    return 0.25 / (t**2 + 0.25) * z + 0.5 * t / (t**2 + 0.25).sqrt() * output


# The loss


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("metric", [euclidean, PseudoHuber(0.7)])
def test_loss_and_gradient_are_those_of_the_formulas(stage, metric, tmp_path):
    model, net = watched(
        tmp_path, Exact(), solver=euler_step, metric=metric, q=2.0**stage, stages=1, k=3.0, b=0.7, P_mean=0.5, lr=1e-2
    )
    data, logged, gradients = Images(ALL), {}, []
    model.log = lambda name, value, **_: logged.update({name: value.detach()})
    model.on_before_optimizer_step = lambda *_: gradients.append(net.value.grad.item())
    train(model, data, 1)
    t, r, z, z_hat = levels_and_points(net, 1, q=2.0**stage, k=3.0, b=0.7)
    assert (r == 0).any() == (stage == 1)
    assert (r > 0).any()
    mu = posterior_mean(z, data.x.double(), t.flatten())
    torch.testing.assert_close(z_hat, z + (r - t) / t * (z - mu), rtol=1e-4, atol=1e-4)

    difference = (consistency(z, t) - consistency(z_hat, r)).flatten(1)
    c = getattr(metric, "c", 0.0)
    distance = (difference.square().sum(1) + c**2).sqrt()
    weight = 1 / (t - r).flatten()
    assert logged["train/loss"].item() == pytest.approx((weight * (distance - c)).mean().item(), rel=1e-3)
    # Only the student's output, c_skip·z + c_out·v, depends on the weight v.
    by_weight = (difference * (0.5 * t / (t**2 + 0.25).sqrt()).flatten(1)).sum(1)
    assert gradients[0] == pytest.approx((weight * by_weight / distance).mean().item(), rel=1e-3)


def test_with_one_sample_the_teacher_is_at_x_plus_r_times_the_same_noise(tmp_path):
    for solver in (euler_step, heun_step):
        model, net = watched(tmp_path, OneSample(), solver=solver, P_mean=0.5)
        data = Images(ALL)
        train(model, data, 1)
        t, r, z, z_hat = levels_and_points(net, 1)
        x = data.x.double()
        assert (r == 0).any()
        assert (r > 0).any()
        torch.testing.assert_close(z_hat, x + r * (z - x) / t, rtol=1e-5, atol=1e-6)
        assert torch.equal(net.calls[-1][0][r.flatten() == 0] / 2, data.x[r.flatten() == 0])  # c_in is 2 at t = 0


def test_a_heun_step_to_level_0_is_the_posterior_mean_and_the_others_have_order_2(tmp_path):
    model, net = watched(tmp_path, Exact(), solver=heun_step, P_mean=0.5)
    data = Images(ALL)
    train(model, data, 1)
    t, r, z, z_hat = levels_and_points(net, 1)
    x, at_0 = data.x.double(), r.flatten() == 0
    mu = posterior_mean(z, x, t.flatten())
    torch.testing.assert_close(z_hat[at_0], mu[at_0], rtol=1e-5, atol=1e-5)
    euler = z + (r - t) / t * (z - mu)
    below = torch.where(r > 0, r, t)
    slope = (euler - posterior_mean(euler, x, below.flatten())) / below
    heun = z + (r - t) * ((z - mu) / t + slope) / 2
    # Far below t the step is Euler's.
    expected = torch.where(r < 0.4 * t, euler, heun)
    assert not at_0.all()
    torch.testing.assert_close(z_hat[~at_0], expected[~at_0], rtol=1e-4, atol=1e-4)


def test_the_teacher_stays_near_the_trajectory_however_far_the_step_goes_down(tmp_path):
    model, _ = watched(tmp_path, Exact(), solver=heun_step)
    x = Images(ALL).x.double().flatten(1)

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

    class Stages(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            stages.append(pl_module.stage)

    model, net = watched(tmp_path, OneSample(), stage_steps=3, stages=4, P_mean=0.6, P_std=0.7)
    train(model, Images(ALL), 20, callbacks=[Stages()], accumulate_grad_batches=1)
    assert stages == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 11
    log_t = torch.cat([4 * call[1] for call in net.calls[-40::2]])
    # 1,200 draws: the mean has the standard deviation 0.02.
    assert log_t.mean().item() == pytest.approx(0.6, abs=0.08)
    assert log_t.std().item() == pytest.approx(0.7, abs=0.06)
    _, r, *_ = levels_and_points(net, 4)
    torch.testing.assert_close(torch.exp(4 * net.calls[-1][1].double()), r.flatten(), rtol=1e-5, atol=0)


def test_classes_reach_student_and_teacher(tmp_path):
    net = WatchedNet(num_classes=10)
    start = write_start(tmp_path / "a.ckpt", net)
    train(LitECT(Exact(), start, net, class_conditional=True), Digits(batch_size=50), 1)
    student, teacher = net.labels[-2:]
    assert torch.equal(student, teacher)
    assert len(student.unique()) > 5


# The preconditioning


@pytest.mark.parametrize("family", [UNet, DDPMpp, NCSNpp, ADM])
def test_at_level_0_the_function_is_exactly_the_identity_and_above_it_the_denoiser(family):
    channels = 64 if family is ADM else 8  # the width of its attention heads
    net = (UNet(3, 8, (1,)) if family is UNet else small_published(family, 16, channels=channels)).eval()
    function, denoiser = ConsistencyFunction(net, sigma_min=0.0), EDMPrecond(net)
    z, t = torch.randn(4, 3, 16, 16), torch.tensor([0.0, 1e-5, 0.9, 80.0], dtype=torch.float64)
    with torch.no_grad():
        output = function(z, t)
        assert torch.equal(output[0], z[0])
        torch.testing.assert_close(output[1:], denoiser(z[1:], t[1:]), rtol=1e-5, atol=1e-5)
        assert torch.equal(function(z, torch.zeros(4)), z)


# The start


@pytest.mark.parametrize("kind", [".pkl", ".safetensors", ".ckpt"])
@pytest.mark.parametrize("given", [False, True])
def test_the_first_step_starts_with_the_denoiser_of_the_file(kind, given, tmp_path):
    family = {"multipliers": [1, 1], "blocks": 1, "attention_at": [16]}
    net = DDPMpp(32, 3, 8, **family, dropout=0.4) if given else None
    path, shape = tmp_path / f"start{kind}", (3, 32, 32)
    if kind == ".ckpt":
        write_own(path, augment_dim=9)
        net, shape = tiny_unet(dropout=0.4), (1, 8, 8)
    else:
        pickled = write_published(tmp_path / "start.pkl")
        if kind == ".safetensors":
            convert(pickled, path)
    model = LitECT(OneSample(), path, net).eval()
    assert net is None or model.consistency_function.net is net
    model.image_shape = shape
    architecture = tiny_unet(augment_dim=9) if kind == ".ckpt" else None
    denoised = load_network(path, architecture)(80 * seeded_noise([3, 4], shape), torch.tensor(80.0))
    torch.testing.assert_close(model.sample([3, 4]), denoised, rtol=1e-5, atol=1e-5)
    # A layer without gradients would stop a distributed run.
    assert all(value.requires_grad for value in model.parameters())
    assert not any("augment" in name for name, _ in model.named_parameters())
    assert {module.p for module in model.train().modules() if isinstance(module, torch.nn.Dropout)} <= {0.0, 0.4}
    assert all(module.training for module in model.modules())


@pytest.mark.skipif(not GENUINE.is_dir(), reason="no ../shared/data/edm-pickles with networks pickled by NVIDIA's code")
@pytest.mark.parametrize("name", ["uncond_vp", "cond_adm"])
def test_a_network_that_nvidia_pickled_is_tuned(name):
    record = torch.load(GENUINE / f"{name}.pt", weights_only=True)
    conditional = record["labels"] is not None
    model = LitECT(OneSample(), GENUINE / f"{name}.pkl", class_conditional=conditional, lr=1e-3).eval()
    with torch.no_grad():
        output = model.consistency_function(record["z"], record["sigma"].double(), record["labels"])
    error = (output - record["denoised"]).flatten(1).norm(dim=1) / record["denoised"].flatten(1).norm(dim=1)
    assert error.max() <= 1e-5
    before = [value.detach().clone() for value in model.parameters()]
    shape = record["z"].shape[1:]

    class Data(Images):
        def __init__(self):
            super().__init__(batch_size=4)
            self.x = torch.rand(4, *shape) * 2 - 1
            self.reference = None

        def train_dataloader(self):
            labels = torch.arange(4) % max(model.conditioning.num_classes, 1)
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(self.x, labels), batch_size=4)

    train(model.train(), Data(), 1)
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert sum(changed) > 0.9 * len(changed)
    assert all(value.isfinite().all() for value in model.parameters())


# Sampling and resuming


def test_a_second_step_adds_noise_of_its_level_to_the_first_sample(tmp_path):
    model, net = watched(tmp_path, OneSample(), sampling_sigmas=(30.0, 0.5), predict_steps=2)
    model.image_shape = (1, 4, 4)
    samples = model.sample([5, 6])
    first, second = (seeded_noise([5, 6], (1, 4, 4), draw).double() for draw in (0, 1))
    high, low = torch.tensor(30.0).double(), torch.tensor(0.5).double()
    expected = consistency(consistency(30 * first, high) + 0.5 * second, low)
    torch.testing.assert_close(samples.double(), expected, rtol=1e-4, atol=1e-5)
    assert len(net.calls) == 2


def test_a_resumed_run_repeats_the_uninterrupted_one_without_its_start(tmp_path):
    start = write_own(tmp_path / "start.ckpt")

    def run(steps, start, ckpt_path=None, callbacks=()):
        torch.manual_seed(1)
        options = {"lr": 1e-2, "ema_decay": 0.5, "stage_steps": 2, "stages": 3}
        model = LitECT(KNN(k=32, n=8), start, tiny_unet(dropout=0.3), **options)
        # The default generator must not matter, because a resumed process does not have its state.
        torch.manual_seed(steps)
        options = {**TRAINER, "limit_train_batches": 2, "enable_checkpointing": bool(callbacks)}
        trainer = pl.Trainer(max_steps=steps, callbacks=callbacks, **options)
        trainer.fit(model, Digits(batch_size=60), ckpt_path=ckpt_path)
        return model

    run(3, start, callbacks=[LastCheckpoint(dirpath=str(tmp_path))])
    resumed = run(7, None, ckpt_path=tmp_path / "last.ckpt")
    whole = run(7, start)
    assert resumed.images_seen == 7 * 60
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


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
        ("lr", 0.0, "lr must be above 0"),
        ("P_std", -1.0, "P_std must be above 0"),
        ("ema_decay", 1.0, r"ema_decay must be in \[0, 1\)"),
        ("predict_steps", 3, "predict_steps=3"),
        ("sampling_sigmas", (0.8, 80.0), "sampling_sigmas=.* must descend"),
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


def ict_checkpoint(path):
    trainer = train(LitICT(tiny_unet(), OneSample()), Digits(batch_size=64), 1)
    trainer.save_checkpoint(path)
    return path


def test_a_start_that_is_no_denoiser_of_the_architecture_is_refused(tmp_path):
    own = write_own(tmp_path / "own.ckpt")
    published = write_published(tmp_path / "published.pkl")
    foreign = write_start(tmp_path / "foreign.ckpt", WatchedNet())
    for start, net, message in [
        (tmp_path / "none.pkl", None, r"none\.pkl: no such file"),
        (ict_checkpoint(tmp_path / "ict.ckpt"), tiny_unet(), r"ict\.ckpt: a consistency model has no denoiser"),
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
