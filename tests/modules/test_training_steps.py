"""What modules share: bad losses, logs, images seen, and the options of sampling, also with an estimator alone."""

import math
from itertools import pairwise

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.callbacks import LastCheckpoint
from lit_knn.common.errors import InputError, NonFiniteLossError
from lit_knn.estimators import OneSample
from lit_knn.modules import LitEDM, LitEstimator
from lit_knn.nets import UNet
from main import main
from tests.command_lines import refusal_of
from tests.interrupted_runs import At, edm, fit
from tests.short_training import TRAINER, train
from tests.watched import Asked, Images, OneBadItem, WatchedNet, heun_levels, karras, undone


def test_infinite_loss_of_one_item_stops_before_weights_change(
    tmp_path,
):
    net = OneBadItem()
    trainer = pl.Trainer(max_steps=9, callbacks=[LastCheckpoint(dirpath=str(tmp_path))], **TRAINER)
    with pytest.raises(
        NonFiniteLossError, match="not finite at step 3, first at noise level"
    ) as stop:
        trainer.fit(LitEDM(net, OneSample(), lr=0.1, lr_ramp_up_images=0), Images())
    t = undone(net.calls[-1])[1].flatten()[7].item()
    assert f"t={t:.4g};" in str(stop.value)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 3
    assert checkpoint["current_model_state"]["denoiser.model.value"].isfinite()


def test_a_batch_broken_off_half_way_is_counted_once(tmp_path):
    def break_off():
        raise KeyboardInterrupt

    # No validation has saved the second step.
    _, path = fit(tmp_path, edm(), 5, at=At(2, "on_after_backward", break_off))
    checkpoint = torch.load(path, weights_only=True)
    assert (checkpoint["global_step"], checkpoint["images_seen"]) == (2, 2 * 40)


def test_averages_are_logged_every_n_steps():
    logged = {}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            pl_module.log_dict = lambda values, **_: logged.setdefault(
                trainer.global_step, {}
            ).update(values)

    net = WatchedNet()
    grid = {"sigma_min": 0.01, "sigma_max": 50.0}
    model = LitEDM(net, OneSample(), P_mean=0.0, P_std=3.0, lr=0.5, lr_ramp_up_images=0, **grid)
    losses, original = [], model.losses
    model.losses = lambda *args: losses.append(original(*args)) or losses[-1]
    train(model, Images(), 6, callbacks=[Watch()], log_every_n_steps=3, accumulate_grad_batches=2)
    assert list(logged) == [3, 6]
    assert logged[6]["train/lr"] == 0.5
    # The bands divide ln t into four equal parts between 0.01 and 50.
    edges = [0.01 * 5000 ** (i / 4) for i in range(5)]
    loss, t = (torch.cat([pair[i].detach().flatten() for pair in losses[6:]]) for i in (0, 1))
    for low, high in zip([0, *edges[1:4]], [*edges[1:4], math.inf], strict=True):
        band = (t > low) & (t <= high)
        shown = [max(low, 0.01), min(high, 50.0)]
        name = f"train/loss_t_{shown[0]:.3g}_to_{shown[1]:.3g}"
        assert logged[6][name] == pytest.approx(loss[band].mean().item(), rel=1e-4)


def test_a_band_without_items_logs_no_old_loss():
    logged = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            values = trainer.logged_metrics.items()
            logged.append({name: float(value) for name, value in values if "loss_t_" in name})

    losses = []
    model = LitEDM(WatchedNet(), OneSample(), P_mean=0.0, P_std=2.0)
    original = model.losses
    model.losses = lambda *args: losses.append(original(*args)) or losses[-1]
    train(model, Images(), 8, callbacks=[Watch()], log_every_n_steps=1)
    edges = model.level_range.bands(4)
    names = [f"train/loss_t_{a:.3g}_to_{b:.3g}" for a, b in pairwise(edges.tolist())]
    old = 0
    # The log of a step is seen after the next one.
    for values, (_, t) in zip(logged[1:], losses, strict=False):
        bands = set(torch.bucketize(t, edges[1:-1]).tolist())
        assert {names[band] for band in bands} <= set(values)
        for name, value in values.items():
            assert math.isfinite(value) == (names.index(name) in bands)
            old += math.isnan(value)
    assert old > 0


def test_batch_norm_neither_refuses_nor_counts_the_trial():
    class Norm(WatchedNet):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, z_scaled, noise_label, *labels, **options):
            return super().forward(z_scaled, noise_label) + self.norm(noise_label[:, None])[0, 0]

    net = Norm()
    train(LitEDM(net, OneSample()), Images(), 3)
    assert net.norm.num_batches_tracked == 3
    assert net.training


def test_a_lazy_layer_is_refused_by_name():
    class Lazy(WatchedNet):
        def __init__(self):
            super().__init__()
            self.conv = nn.LazyConv2d(1, 1)

    with pytest.raises(InputError, match=r"net's conv\.weight is lazy: give the layer its sizes"):
        train(LitEDM(Lazy(), OneSample()), Images(), 1)


def test_every_step_has_all_its_batches(tmp_path):
    # 1,797 digits make 44 batches of 40, and no 15 times three.
    whole = fit(
        tmp_path / "a",
        edm(),
        30,
        limit_train_batches=1.0,
        limit_val_batches=0,
        accumulate_grad_batches=3,
    )[1]
    assert torch.load(whole, weights_only=True)["images_seen"] == 30 * 3 * 40


def test_samples_are_float32_with_any_training_precision():
    images, model = (
        Images(),
        LitEDM(UNet(1, channels=8, multipliers=(1,), blocks=1), OneSample(), sampling_steps=2),
    )
    images.predict_dataloader = lambda: torch.utils.data.DataLoader(range(3), batch_size=3)
    (samples,) = pl.Trainer(**TRAINER, precision="bf16-mixed").predict(model, images)
    assert torch.equal(samples, model.sample(range(3)))


def test_validations_share_their_noise_and_steps_do_not():
    net = WatchedNet()
    train(LitEDM(net, OneSample()), Images(60), 2, limit_val_batches=1)
    _, first, in_first, second, in_second = (z for z, *_ in net.calls)
    assert torch.equal(in_first, in_second)
    assert not torch.equal(first, second)


GRID = {"sigma_min": 0.03, "sigma_max": 12.0, "rho": 4.0}


@pytest.mark.parametrize("steps", [None, 3])
def test_samples_of_edm_go_through_the_grid_of_the_options(steps):
    net = WatchedNet()
    model = LitEDM(net, OneSample(), sampling_steps=5, **GRID)
    model.image_shape = (1, 4, 4)
    model.sample([1, 2], steps)
    levels = [undone(call)[1][0].item() for call in net.calls]
    assert levels == pytest.approx(heun_levels(karras(steps or 5, **GRID)), rel=1e-5)
    assert undone(net.calls[0])[0].std().item() == pytest.approx(12, rel=0.5)


def samples_of(seeds, steps=None, **options):
    estimator = Asked(num_classes=3)
    model = LitEstimator(estimator, sampling_steps=5, **GRID, **options)
    trainer = pl.Trainer(**TRAINER)
    data = Images()
    data.predict_dataloader = lambda: torch.utils.data.DataLoader(list(seeds), batch_size=3)
    trainer.predict(model, data)
    return estimator


def test_estimator_samples_have_grid_class_and_draws_of_options():
    estimator = samples_of(range(6), sampling_class=0)
    assert estimator.levels == pytest.approx(2 * heun_levels(karras(5, **GRID)), rel=1e-6)
    assert estimator.labels == [[0, 0, 0]] * len(estimator.levels)
    first, second = estimator.drawn[0], estimator.drawn[len(estimator.drawn) // 2]
    assert not torch.equal(first, second)
    assert not torch.equal(first, samples_of(range(3), seed=1).drawn[0])
    assert torch.equal(first, samples_of(range(3)).drawn[0])


@pytest.mark.usefixtures("own_folder")
def test_estimator_alone_is_validated_and_not_trained(capsys):
    run = [
        "--data",
        "Digits",
        "--model",
        "LitEstimator",
        "--trainer.accelerator",
        "cpu",
        "--trainer.logger",
        "false",
    ]
    for command, message in (("fit", "has nothing to train"), ("predict", "estimator is null")):
        assert message in refusal_of([command, *run], capsys)
    assert "without --ckpt_path" in refusal_of(
        ["validate", *run, "--ckpt_path", "some.ckpt"], capsys
    )
    main(["validate", *run])
    assert "error" not in capsys.readouterr().err
