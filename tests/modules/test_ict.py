"""LitICT: student, teacher and loss by the formulas, noise levels, dropout masks, preconditioning and sampling."""

import math

import pytest
import torch

from lit_knn.estimators import Exact, Network, OneSample
from lit_knn.modules import LitICT
from lit_knn.sampling.loading import load_network
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.sampling.schedules import lognormal_step_probs
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.posterior import posterior_mean
from tests.networks import write_own
from tests.short_training import train
from tests.watched import Images, WatchedNet, karras, undone


@pytest.mark.parametrize(
    ("kind", "huber_c", "solver", "sigma_data", "sigma_min"),
    [
        (OneSample, None, euler_step, 0.5, 0.002),
        (Exact, 0.7, euler_step, 0.2, 0.3),
        (Network, None, heun_step, 0.5, 0.002),
    ],
)
def test_student_sees_z_and_teacher_the_point_one_ode_step_below(
    kind, huber_c, solver, sigma_data, sigma_min, tmp_path
):
    data, net, with_gradients, logged = Images(60), WatchedNet(), [], {}
    estimator = kind(write_own(tmp_path / "net.ckpt")) if kind is Network else kind()
    net.register_forward_hook(lambda *_: with_gradients.append(torch.is_grad_enabled()))
    scale = {"sigma_data": sigma_data, "sigma_min": sigma_min}
    model = LitICT(
        net,
        estimator,
        solver=solver,
        sigma_max=20.0,
        huber_c=huber_c,
        sampling_sigmas=[20.0],
        **scale,
    )
    model.log = lambda name, value, **_: logged.update({name: value.item()})
    train(model, data, 1)
    assert with_gradients[-2:] == [True, False]
    (z, t), (z_hat, t_prev) = (undone(call, sigma_data) for call in net.calls[-2:])
    assert (t_prev < t).all()
    # z is noisy data. The deviation of 960 numbers has the standard deviation 0.023.
    assert ((z - data.x) / t).std().item() == pytest.approx(1, abs=0.12)

    means = {
        OneSample: lambda *_: data.x,
        Exact: lambda z, t: posterior_mean(z, data.x.double(), t),
    }
    expected = solver(z, t.flatten(), t_prev.flatten(), means.get(kind, estimator.posterior_mean))
    # float32 rounds z by 1e-7 of up to 80.
    torch.testing.assert_close(z_hat, expected, rtol=1e-4, atol=1e-4)

    def consistency(z, t):
        above, data_sq = t - sigma_min, sigma_data**2
        return (
            data_sq / (above**2 + data_sq) * z + sigma_data * above / (t**2 + data_sq).sqrt() * 0.3
        ).flatten(1)

    # The metric is of the whole vector.
    c = 0.00054 * math.sqrt(16) if huber_c is None else huber_c
    huber = ((consistency(z, t) - consistency(z_hat, t_prev)).square().sum(1) + c**2).sqrt() - c
    expected = (huber / (t - t_prev).flatten()).mean().item()
    assert logged["train/loss"] == pytest.approx(expected, rel=1e-3)
    # Distillation leaves the network of its estimator as it is.
    assert len(list(model.parameters())) == 1
    if kind is Network:
        of_file = load_network(tmp_path / "net.ckpt").state_dict()
        assert all(
            torch.equal(value, of_file[name])
            for name, value in estimator.denoiser.state_dict().items()
        )


def test_student_and_teacher_share_dropout_and_steps_do_not():
    net = WatchedNet(dropout=0.5)
    train(LitICT(net, OneSample()), Images(60), 2)
    masks = [output != 0 for *_, output in net.calls[-4:]]
    assert masks[0].any()
    assert not masks[0].all()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def test_level_pairs_are_neighbours_with_log_normal_probability():
    net = WatchedNet()
    grid = {"sigma_min": 0.05, "sigma_max": 20.0, "rho": 3.0}
    model = LitICT(
        net, OneSample(), s0=4, s1=4, P_mean=0.6, P_std=1.3, sampling_sigmas=[20.0], **grid
    )
    train(model, Images(batch_size=60), 40)
    levels = karras(5, **grid).flip(0)
    t, t_prev = (
        torch.cat([undone(call)[1].flatten() for call in net.calls[-80 + i :: 2]]) for i in (0, 1)
    )
    upper, lower = (torch.cdist(s[:, None], levels[:, None]).min(1) for s in (t, t_prev))
    assert upper.values.max() < 1e-4
    assert torch.equal(upper.indices, lower.indices + 1)
    share = torch.bincount(lower.indices, minlength=4) / len(t)
    # 2,400 draws: a share of 1/2 has the standard deviation 0.01.
    torch.testing.assert_close(
        share.double(), lognormal_step_probs(levels, 0.6, 1.3), rtol=0, atol=0.05
    )


def test_number_of_levels_doubles_from_s0_to_s1():
    seen, net = [], WatchedNet()
    model = LitICT(net, OneSample(), total_steps=9, s0=2, s1=8)
    model.on_train_batch_start = lambda *_: seen.append(model.num_steps)
    train(model, Images(), 10)
    # log2(8 / 2) + 1 = 3 values, each for 9 / 3 steps; N is one more than the number of intervals.
    assert seen == [3] * 3 + [5] * 3 + [9] * 4
    per_step = [
        {round(t.item(), 6) for t in undone(net.calls[-20 + 2 * step + 1])[1].flatten()}
        for step in range(10)
    ]
    assert max(map(len, per_step[:3])) <= 2
    assert max(map(len, per_step[6:])) > 4


def test_samples_go_through_option_levels_to_sigma_min():
    net = WatchedNet()
    options = {
        "sigma_min": 1.6,
        "sigma_max": 30.0,
        "sampling_sigmas": (20.0, 2.0, 1.8),
        "predict_steps": 2,
    }
    model = LitICT(net, OneSample(), **options)
    model.image_shape = (1, 4, 4)
    for steps, levels in ((1, [20.0]), (3, [20.0, 2.0, 1.8]), (None, [20.0, 2.0])):
        net.calls.clear()
        model.sample([4], steps)
        assert [undone(call)[1].item() for call in net.calls] == pytest.approx(levels)
    # The second step adds new noise, up to the level 2.
    noise, noise_2 = (seeded_noise([4], (1, 4, 4), draw) for draw in (0, 1))
    expected = (
        model.evaluate_network(20 * noise, torch.tensor([20.0]))
        + math.sqrt(2.0**2 - 1.6**2) * noise_2
    )
    torch.testing.assert_close(undone(net.calls[1])[0], expected.double(), rtol=1e-4, atol=1e-4)
