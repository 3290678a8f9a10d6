import math

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.callbacks import LastCheckpoint
from lit_knn.common.errors import InputError
from lit_knn.data import Digits
from lit_knn.estimators import KNN, Exact, OneSample
from lit_knn.modules import LitICT
from lit_knn.nets import UNet
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.posterior import posterior_mean
from tests.short_training import TRAINER, train


class RecordingNet(nn.Module):
    """Records its inputs; its output is a dropout mask scaled by a parameter."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.dropout = nn.Dropout(dropout)
        self.calls = []

    def forward(self, z_scaled, noise_label, class_label=None):
        output = self.scale * self.dropout(torch.ones_like(z_scaled))
        self.calls.append((z_scaled, noise_label, torch.is_grad_enabled(), output.detach()))
        return output


class Points(pl.LightningDataModule):
    """Forty points in the plane; every batch has all of them."""

    def __init__(self):
        super().__init__()
        self.x = torch.randn(40, 2, generator=torch.Generator().manual_seed(3)) * 0.5
        self.reference = ReferenceSet(self.x)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.x, batch_size=40)


def tiny_unet(dropout=0.0):
    return UNet(1, channels=8, multipliers=(1, 2), blocks=1, dropout=dropout)


def test_student_sees_z_and_teacher_the_point_one_ode_step_below():
    data, net = Points(), RecordingNet()
    model = LitICT(net, Exact(), solver=euler_step, sigma_max=20.0)
    train(model, data, 1)
    (student, student_noise, student_grad, _), (teacher, teacher_noise, teacher_grad, _) = net.calls[-2:]
    assert student_grad
    assert not teacher_grad
    # Undo c_in and c_noise of the preconditioning to get the points themselves back.
    t, t_prev = (torch.exp(4 * noise.double()) for noise in (student_noise, teacher_noise))
    z = student.double() * (t[:, None] ** 2 + 0.25).sqrt()
    z_hat = teacher.double() * (t_prev[:, None] ** 2 + 0.25).sqrt()
    assert (t_prev < t).all()
    # z is noisy data; the clean x would be near the origin.
    assert (z - data.x).flatten(1).norm(dim=1).div(t).mean() == pytest.approx(math.sqrt(math.pi / 2), rel=0.3)
    mu = posterior_mean(z, data.x.double(), t)
    expected = z + ((t_prev - t) / t)[:, None] * (z - mu)
    torch.testing.assert_close(z_hat, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("huber_c", [None, 0.7])
def test_loss_is_the_weighted_vector_pseudo_huber_of_student_and_teacher(huber_c):
    data, net = Points(), RecordingNet()
    model = LitICT(net, OneSample(), solver=euler_step, huber_c=huber_c)
    losses = []
    model.log = lambda name, value, **_: losses.append(value.detach()) if name == "train/loss" else None
    train(model, data, 1)
    points, times = [], []
    for z_scaled, noise, _, output in net.calls[-2:]:
        t = torch.exp(4 * noise.double())[:, None]
        z = z_scaled.double() * (t**2 + 0.25).sqrt()
        above = t - 0.002
        points.append(0.25 / (above**2 + 0.25) * z + 0.5 * above / (t**2 + 0.25).sqrt() * output.double())
        times.append(t[:, 0])
    c = 0.00054 * math.sqrt(2) if huber_c is None else huber_c
    huber = (((points[0] - points[1]) ** 2).sum(1) + c**2).sqrt() - c
    assert losses[0].item() == pytest.approx(float((huber / (times[0] - times[1])).mean()), rel=1e-3)


def test_student_and_teacher_share_dropout_masks_and_steps_do_not():
    data, net = Points(), RecordingNet(dropout=0.5)
    train(LitICT(net, OneSample()), data, 2)
    masks = [output != 0 for *_, output in net.calls[-4:]]
    assert masks[0].any()
    assert not masks[0].all()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def test_one_sample_heun_and_euler_targets_agree():
    results = []
    for solver in (euler_step, heun_step):
        net = RecordingNet()
        train(LitICT(net, OneSample(), solver=solver), Points(), 1)
        results.append(net.calls[-1][0])
    torch.testing.assert_close(*results)


def test_resumed_run_repeats_the_uninterrupted_one(tmp_path):
    def run(steps, ckpt_path=None, callbacks=()):
        torch.manual_seed(1)
        model = LitICT(tiny_unet(dropout=0.3), KNN(k=32, n=8), lr=1e-2, ema_decay=0.5, total_steps=8, s1=40)
        # The default generator must not matter, because a resumed process does not have its state.
        torch.manual_seed(steps)
        options = {**TRAINER, "limit_train_batches": 2, "enable_checkpointing": bool(callbacks)}
        trainer = pl.Trainer(max_steps=steps, callbacks=callbacks, **options)
        trainer.fit(model, Digits(batch_size=60), ckpt_path=ckpt_path)
        return model, trainer

    # An epoch has 2 batches, so the run stops and resumes in the middle of an epoch.
    run(3, callbacks=[LastCheckpoint(dirpath=str(tmp_path))])
    resumed, trainer = run(7, ckpt_path=tmp_path / "last.ckpt")
    whole, _ = run(7)
    assert trainer.global_step == 7
    assert resumed.images_seen == whole.images_seen == 7 * 60
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_checkpoint_holds_the_exponential_moving_average(tmp_path):
    class History(pl.Callback):
        def __init__(self):
            self.values = []

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.values.append(pl_module.consistency_function.net.scale.item())

    history = History()
    model = LitICT(RecordingNet(), OneSample(), lr=0.1, ema_decay=0.8)
    trainer = pl.Trainer(max_steps=5, **TRAINER, callbacks=[history, LastCheckpoint(dirpath=str(tmp_path))])
    trainer.fit(model, Points())
    average = history.values[0]
    for value in history.values[1:]:
        average = 0.8 * average + 0.2 * value
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]["consistency_function.net.scale"]
    assert len(set(history.values)) == 5
    assert float(saved) == pytest.approx(average, rel=1e-5)


def test_first_step_has_the_full_learning_rate():
    model = LitICT(RecordingNet(), OneSample(), lr=0.05)
    before = model.consistency_function.net.scale.item()
    train(model, Points(), 1)
    assert model.optimizers().param_groups[0]["lr"] == 0.05
    assert model.consistency_function.net.scale.item() != before


def test_checkpoint_of_another_architecture_is_refused(tmp_path):
    trainer = train(LitICT(tiny_unet(), OneSample()), Digits(batch_size=64), 1)
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    larger = LitICT(UNet(1, channels=16, multipliers=(1, 2), blocks=1), OneSample())
    with pytest.raises(InputError, match=r"another architecture: consistency_function\.net\."):
        pl.Trainer(max_steps=2, **TRAINER).fit(larger, Digits(batch_size=64), ckpt_path=tmp_path / "small.ckpt")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", 0.0),
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
        LitICT(RecordingNet(), OneSample(), **{option: value})
