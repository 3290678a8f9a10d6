"""LitICT: student, teacher and loss by the formulas, dropout masks, the average, and bad input."""

import math

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.callbacks import LastCheckpoint
from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, Network, OneSample
from lit_knn.modules import LitICT
from lit_knn.sampling.loading import load_network
from lit_knn.sampling.solvers import euler_step
from lit_knn.theory.posterior import posterior_mean
from tests.networks import write_own
from tests.short_training import TRAINER, train
from tests.watched import Images, WatchedNet, undone


@pytest.mark.parametrize(("estimator", "huber_c"), [(OneSample(), None), (Exact(), 0.7)])
def test_student_sees_z_and_teacher_the_point_one_ode_step_below(estimator, huber_c):
    data, net, with_gradients, logged = Images(60), WatchedNet(), [], {}
    net.register_forward_hook(lambda *_: with_gradients.append(torch.is_grad_enabled()))
    model = LitICT(net, estimator, solver=euler_step, sigma_max=20.0, huber_c=huber_c)
    model.log = lambda name, value, **_: logged.update({name: value.item()})
    train(model, data, 1)
    assert with_gradients[-2:] == [True, False]
    (z, t), (z_hat, t_prev) = map(undone, net.calls[-2:])
    assert (t_prev < t).all()
    # z is noisy data. The deviation of 960 numbers has the standard deviation 0.023.
    assert ((z - data.x) / t).std().item() == pytest.approx(1, abs=0.12)
    x = data.x.double()
    mu = x if isinstance(estimator, OneSample) else posterior_mean(z, x, t.flatten())
    torch.testing.assert_close(z_hat, z + (t_prev - t) / t * (z - mu), rtol=1e-4, atol=1e-4)

    def consistency(z, t):
        above = t - 0.002
        return (0.25 / (above**2 + 0.25) * z + 0.5 * above / (t**2 + 0.25).sqrt() * 0.3).flatten(1)

    # The metric is of the whole vector.
    c = 0.00054 * math.sqrt(16) if huber_c is None else huber_c
    huber = ((consistency(z, t) - consistency(z_hat, t_prev)).square().sum(1) + c**2).sqrt() - c
    expected = (huber / (t - t_prev).flatten()).mean().item()
    assert logged["train/loss"] == pytest.approx(expected, rel=1e-3)


def test_distillation_follows_the_flow_of_a_trained_network_and_leaves_the_network_as_it_is(tmp_path):
    data, net = Images(60), WatchedNet()
    teacher = Network(write_own(tmp_path / "net.ckpt"))
    model = LitICT(net, teacher, sigma_max=20.0)
    train(model, data, 1)
    (z, t), (z_hat, t_prev) = map(undone, net.calls[-2:])

    def slope(z, t):
        return (z - teacher.posterior_mean(z, t.flatten())) / t

    below = z + (t_prev - t) * slope(z, t)
    expected = z + (t_prev - t) * (slope(z, t) + slope(below, t_prev)) / 2
    # float32 rounds z by 1e-7 of up to 80.
    torch.testing.assert_close(z_hat, expected, rtol=1e-4, atol=1e-4)
    of_file = load_network(tmp_path / "net.ckpt").state_dict()
    assert all(torch.equal(value, of_file[name]) for name, value in teacher.denoiser.state_dict().items())
    assert len(list(model.parameters())) == len(list(net.parameters()))


def test_student_and_teacher_share_dropout_masks_and_steps_do_not():
    net = WatchedNet(dropout=0.5)
    train(LitICT(net, OneSample()), Images(60), 2)
    masks = [output != 0 for *_, output in net.calls[-4:]]
    assert masks[0].any()
    assert not masks[0].all()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def test_checkpoint_holds_the_moving_average_from_a_first_step_with_the_full_learning_rate(tmp_path):
    values, rates = [], []

    class History(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            values.append(pl_module.network.value.item())
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    model = LitICT(WatchedNet(), OneSample(), lr=0.1, ema_decay=0.8)
    trainer = pl.Trainer(max_steps=5, **TRAINER, callbacks=[History(), LastCheckpoint(dirpath=str(tmp_path))])
    trainer.fit(model, Images(60))
    assert rates == [0.1] * 5
    assert len({0.3, *values}) == 6
    average = values[0]
    for value in values[1:]:
        average = 0.8 * average + 0.2 * value
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]["consistency_function.net.value"]
    assert float(saved) == pytest.approx(average, rel=1e-5)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", math.nan),
        ("ema_decay", 1.0),
        ("s0", 0),
        ("total_steps", 0),
        ("sigma_min", 100.0),
        ("P_std", 0.0),
        ("sigma_data", -1.0),
        ("predict_steps", 3),
        ("huber_c", 0.0),
        ("sampling_sigmas", (1.0, 2.0)),
        ("sampling_sigmas", (80.0, 0.002)),
    ],
)
def test_option_out_of_range_is_named(option, value):
    with pytest.raises(InputError, match=option):
        LitICT(WatchedNet(), OneSample(), **{option: value})
