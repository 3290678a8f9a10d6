"""Consistency tuning: its loss against the formulas in float64, its levels and its start."""

import pytest
import torch

from lit_knn.estimators import Exact, OneSample
from lit_knn.modules import LitECT
from lit_knn.nets import UNet
from lit_knn.sampling.distances import PseudoHuber, euclidean
from lit_knn.sampling.loading import load_network
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.sampling.schedules import TuningSchedule
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.posterior import posterior_mean
from tests.networks import write_own, write_published, write_start
from tests.short_training import train
from tests.watched import Images, WatchedNet, undone


def tiny_unet(**options):
    return UNet(1, channels=8, multipliers=(1, 2), blocks=1, **options)


def watched(folder, estimator, **options):
    """A LitECT whose network records its calls."""
    net = WatchedNet()
    return LitECT(estimator, write_start(folder / "start.ckpt", net), net, **options), net


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
def test_teacher_loss_and_gradient_are_those_of_the_formulas(
    estimator, solver, metric, stage, tmp_path
):
    schedule = {"q": 2.0**stage, "k": 3.0, "b": 0.7, "stages": 1}
    model, net = watched(tmp_path, estimator, solver=solver, metric=metric, P_mean=0.5, **schedule)
    data, logged, gradients = Images(60), {}, []
    model.log = lambda name, value, **_: logged.update({name: value.item()})
    model.on_before_optimizer_step = lambda *_: gradients.append(net.value.grad.item())
    train(model, data, 1)
    z, t = undone(net.calls[-2])
    # The label of level 0 is that of another level, so the teacher's point is found with the schedule's r.
    r = TuningSchedule(**schedule).teacher_level(t, 1)
    z_hat = net.calls[-1][0].double() * (r**2 + 0.25).sqrt()
    at_0 = r.flatten() == 0
    assert at_0.any() == (stage == 1)
    assert not at_0.all()

    def mean(z, t):
        return data.x if isinstance(estimator, OneSample) else posterior_mean(z, data.x.double(), t)

    euler, step = (each(z, t.flatten(), r.flatten(), mean) for each in (euler_step, solver))
    # Far below t the step is Euler's.
    torch.testing.assert_close(z_hat, torch.where(r < 0.4 * t, euler, step), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        z_hat[at_0], mean(z, t.flatten()).double()[at_0], rtol=1e-5, atol=1e-5
    )

    difference = consistency(z, t) - consistency(z_hat, r)
    c = getattr(metric, "c", 0.0)
    distance = (difference.square().sum(1) + c**2).sqrt()
    weight = 1 / (t - r).flatten()
    assert logged["train/loss"] == pytest.approx((weight * (distance - c)).mean().item(), rel=1e-3)
    # Only the student's output, c_skip·z + c_out·v, depends on the weight v.
    by_weight = (difference * (0.5 * t / (t**2 + 0.25).sqrt()).flatten(1)).sum(1)
    assert gradients[0] == pytest.approx((weight * by_weight / distance).mean().item(), rel=1e-3)


def test_levels_are_log_normal_and_the_stage_follows_the_steps(tmp_path):
    stages = []
    model, net = watched(tmp_path, OneSample(), stage_steps=3, stages=4, P_mean=0.6, P_std=0.7)
    model.on_train_batch_start = lambda *_: stages.append(model.interval_metrics()["train/stage"])
    train(model, Images(60), 20)
    assert stages == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 11
    log_t = torch.cat([4 * call[1] for call in net.calls[-40::2]])
    # 1,200 draws: the mean has the standard deviation 0.02.
    assert log_t.mean().item() == pytest.approx(0.6, abs=0.08)
    assert log_t.std().item() == pytest.approx(0.7, abs=0.06)
    (_, t), (_, r) = map(undone, net.calls[-2:])
    torch.testing.assert_close(r, TuningSchedule().teacher_level(t, 4), rtol=1e-5, atol=0)


# The start


@pytest.mark.parametrize("kind", [".pkl", ".ckpt"])
def test_the_first_step_starts_with_the_denoiser_of_the_file(kind, tmp_path):
    path, shape, net, architecture, frozen = tmp_path / f"start{kind}", (3, 32, 32), None, None, []
    if kind == ".ckpt":
        write_own(path, augment_dim=9)
        net, shape, architecture = tiny_unet(dropout=0.4), (1, 8, 8), tiny_unet(augment_dim=9)
        # What a given net freezes stays frozen.
        frozen = [next(iter(dict(net.named_parameters())))]
        net.get_parameter(*frozen).requires_grad_(False)
    else:
        write_published(path)
    model = LitECT(OneSample(), path, net).eval()
    model.image_shape = shape
    z = 80 * seeded_noise([3, 4], shape)
    denoised = load_network(path, architecture)(z, torch.tensor(80.0))
    torch.testing.assert_close(model.sample([3, 4]), denoised, rtol=1e-5, atol=1e-5)
    # exactly the identity at level 0
    assert torch.equal(model.evaluate_network(z, torch.zeros(2)), z)
    # A layer without gradients would stop a distributed run.
    assert [
        name for name, value in model.network.named_parameters() if not value.requires_grad
    ] == frozen
    assert not any("augment" in name for name, _ in model.named_parameters())
    assert all(module.training for module in model.train().modules())
    dropout = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert (0.4 in dropout) == (net is not None)
    assert net is None or model.network is net
