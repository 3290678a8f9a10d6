import contextlib
import math
from itertools import pairwise

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.callbacks import LastCheckpoint
from lit_knn.common.errors import InputError, NonFiniteLossError
from lit_knn.data import Digits
from lit_knn.estimators import KNN, STF, Exact, OneSample, SubspaceKNN
from lit_knn.modules import LitEDM
from lit_knn.modules.augmentation import Augmented, GeometricAugmentation
from lit_knn.nets import UNet
from lit_knn.theory.posterior import posterior_mean
from lit_knn.theory.warp import flip
from tests.short_training import TRAINER, train
from tests.toys import all_warped, unwarped
from tests.watched import Images


class ConstantNet(nn.Module):
    """Outputs its parameter everywhere and records its inputs."""

    def __init__(self, num_classes=0, augment_dim=0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.3))
        self.num_classes = num_classes
        self.augment_dim = augment_dim
        self.calls = []

    def forward(self, z_scaled, noise_label, class_label=None, augment_label=None):
        self.calls.append((z_scaled.detach(), noise_label.detach(), class_label, augment_label))
        return self.value.expand_as(z_scaled)


def unet(**options):
    return UNet(1, channels=8, multipliers=(1, 2), blocks=1, **options)


def points_and_levels(net):
    """The network's last inputs; see `undone`."""
    return undone(net.calls[-1])


def undone(call):
    """Undo c_in and c_noise of a call; return z, σ, c_skip and c_out in float64, broadcastable."""
    z_scaled, noise, *_ = call
    sigma = torch.exp(4 * noise.double()).reshape(-1, 1, 1, 1)
    norm = (sigma**2 + 0.25).sqrt()
    return z_scaled.double() * norm, sigma, 0.25 / norm**2, 0.5 * sigma / norm


@pytest.mark.parametrize("estimator", [OneSample(), Exact()])
def test_loss_is_the_weighted_squared_distance_to_the_estimated_mean(estimator):
    data, net = Images(60), ConstantNet()
    model = LitEDM(net, estimator)
    logged = {}
    model.log = lambda name, value, **_: logged.update({name: value})
    train(model, data, 1)
    z, sigma, c_skip, c_out = points_and_levels(net)
    target = (
        data.x.double() if isinstance(estimator, OneSample) else posterior_mean(z, data.x.double(), sigma.flatten())
    )
    denoised = c_skip * z + c_out * 0.3
    weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
    expected = (weight * (denoised - target) ** 2).mean()
    assert logged["train/loss"].item() == pytest.approx(expected.item(), rel=1e-3)


def test_noise_levels_are_log_normal():
    net = ConstantNet()
    train(LitEDM(net, OneSample(), P_mean=-0.4, P_std=0.7), Images(60), 40)
    log_sigma = torch.cat([4 * noise for _, noise, *_ in net.calls[-40:]])
    assert log_sigma.mean().item() == pytest.approx(-0.4, abs=0.06)
    assert log_sigma.std().item() == pytest.approx(0.7, abs=0.05)


class EveryOther:
    """Warps every second item with all transformations and does not change the others."""

    label_dim = 9

    def __call__(self, images, generator):
        result = all_warped(images)
        warped = torch.arange(len(images)) % 2 == 0
        images = torch.where(warped[:, None, None, None], result.images, images)
        flips = result.warp.flips & warped.unsqueeze(1)
        return Augmented(images, result.labels * warped.unsqueeze(1), warped, result.warp._replace(flips=flips))


def targets_of(model, data):
    """The arguments and the result of the model's first call for a training target."""
    calls = []
    original = model.target
    model.target = lambda *args: calls.append((args, original(*args))) or calls[-1][1]
    train(model, data, 1)
    return calls[0]


def test_warped_items_have_the_mean_over_the_set_warped_alike_as_target():
    data, net = Images(60), ConstantNet(augment_dim=9)
    (z, sigma, *_), target = targets_of(LitEDM(net, Exact(), augmentation=EveryOther(), P_mean=0.5, P_std=0.5), data)
    warp = all_warped(data.x).warp
    for item in range(60):
        images = data.x
        if item % 2 == 0:
            images = warp.rows(slice(item, item + 1)).apply(data.x.unsqueeze(0))[0]
        row = slice(item, item + 1)
        expected = posterior_mean(z[row], images.double(), sigma[row])
        torch.testing.assert_close(target[row].double(), expected, rtol=1e-4, atol=1e-5)
    assert net.calls[-1][3][1::2].eq(0).all()
    assert net.calls[-1][3][::2].ne(0).any(1).all()


@pytest.mark.parametrize("estimator", [KNN(10, 4), STF(4), SubspaceKNN(5, 4)])
def test_the_draws_of_all_targets_come_from_the_generator_of_the_step(estimator):
    model = LitEDM(ConstantNet(augment_dim=9), estimator, augmentation=EveryOther(), P_mean=1.0)
    targets = []
    for seed in (1, 2):
        original = LitEDM.target.__get__(model)

        def seeded(*args, seed=seed, original=original):
            torch.manual_seed(seed)
            return original(*args)

        model.target = seeded
        targets.append(targets_of(model, Images(60))[1])
    assert torch.equal(*targets)


def test_every_target_has_its_own_item_as_source():
    # A reference batch of one image is the source. Its warped mean is the item, and there is almost no noise.
    data = Images(60)
    model = LitEDM(ConstantNet(augment_dim=9), STF(1), augmentation=EveryOther(), P_mean=-6.0, P_std=0.1)
    (z, *_), target = targets_of(model, data)
    item = EveryOther()(data.x, None).images
    torch.testing.assert_close(target, item)
    torch.testing.assert_close(z, item, rtol=0, atol=0.02)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_gradients_are_those_of_the_sum_over_pixels(accumulated):
    model, data = LitEDM(ConstantNet(), OneSample(), lr_ramp_up_images=0), Images(60 // accumulated)
    gradients = []
    model.on_before_optimizer_step = lambda *_: gradients.append(model.denoiser.model.value.grad.item())
    train(model, data, 1, accumulate_grad_batches=accumulated)
    expected = []
    # Earlier calls are left out: the first one is the trial of the network.
    for call, x in zip(model.denoiser.model.calls[-accumulated:], data.train_dataloader(), strict=True):
        z, sigma, c_skip, c_out = undone(call)
        weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
        # The derivative d/dv of Σ_pixels λ(c_skip z + c_out v − x)², averaged over items.
        by_pixel = 2 * weight * c_out * (c_skip * z + c_out * 0.3 - x)
        expected.append(by_pixel.flatten(1).sum(1))
    assert gradients[0] == pytest.approx(torch.cat(expected).mean().item(), rel=1e-3)


def test_what_is_logged_is_the_mean_over_pixels_and_the_share_of_warped_items():
    class EveryThird(EveryOther):
        def __call__(self, images, generator):
            result = super().__call__(images, generator)
            return result._replace(warped=torch.arange(len(images)) % 3 == 0)

    model, data = LitEDM(ConstantNet(augment_dim=9), Exact(), augmentation=EveryThird()), Images(60)
    data.val_dataloader = data.train_dataloader
    losses, original = [], model.losses
    model.losses = lambda *args: losses.append(original(*args)) or losses[-1]
    trainer = train(model, data, 1, limit_val_batches=1, log_every_n_steps=1)
    # Validation uses images without augmentation.
    assert model.denoiser.model.calls[-2][3] is not None
    assert model.denoiser.model.calls[-1][3] is None
    logged = trainer.logged_metrics
    for name, (loss, sigma) in zip(("train/loss", "val/loss"), losses, strict=True):
        assert loss.shape == sigma.shape == (60,)
        assert logged[name].item() == pytest.approx(loss.mean().item(), rel=1e-5)
    assert logged["train/augmented"].item() == pytest.approx(1 / 3)


def test_flipped_items_have_the_exact_mean_over_the_flipped_set_as_target():
    class AllFlips:
        label_dim = 9

        def __call__(self, images, generator):
            flips = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]]).bool().repeat(len(images) // 4, 1)
            labels = torch.nn.functional.pad(flips.float(), (0, 7))
            return Augmented(flip(images, flips), labels, torch.zeros(len(images), dtype=torch.bool), unwarped(flips))

    data = Images(60)
    model = LitEDM(ConstantNet(augment_dim=9), Exact(), augmentation=AllFlips(), P_mean=0.5)
    (z, sigma, *_), target = targets_of(model, data)
    for kind, axes in enumerate([(), (-1,), (-2,), (-2, -1)]):
        expected = posterior_mean(z[kind::4], data.x.flip(axes).double(), sigma[kind::4])
        torch.testing.assert_close(target[kind::4].double(), expected, rtol=1e-4, atol=1e-5)


def test_learning_rate_ramps_up_over_images_and_never_is_zero():
    rates = []

    class Rates(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    train(LitEDM(ConstantNet(), OneSample(), lr=1.0, lr_ramp_up_images=240), Images(60), 6, callbacks=[Rates()])
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("batch_size", [30, 20])  # 20: the second step of an epoch has only one batch
def test_average_has_the_half_life_in_images_with_accumulation(batch_size, tmp_path):
    values, images = [], []

    class History(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if len(values) < trainer.global_step:
                values.append(pl_module.denoiser.model.value.item())
                images.append(pl_module.images_seen)

    model = LitEDM(ConstantNet(), OneSample(), lr=0.1, lr_ramp_up_images=0, ema_half_life_images=15)
    callbacks = [History(), LastCheckpoint(dirpath=str(tmp_path))]
    trainer = pl.Trainer(max_steps=8, accumulate_grad_batches=2, callbacks=callbacks, **TRAINER)
    trainer.fit(model, Images(batch_size))
    assert images[:4] == ([60, 120, 180, 240] if batch_size == 30 else [40, 60, 100, 120])
    average = values[0]
    for (before, seen), value in zip(pairwise(images), values[1:], strict=True):
        half_life = min(15, 0.05 * seen)
        decay = 0.5 ** ((seen - before) / half_life)
        average = decay * average + (1 - decay) * value
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]["denoiser.model.value"]
    assert saved.item() == pytest.approx(average, rel=1e-5)


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_touched(tmp_path):
    class Breaking(ConstantNet):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return output * math.nan if len(self.calls) > 4 else output

    net = Breaking()
    trainer = pl.Trainer(max_steps=9, callbacks=[LastCheckpoint(dirpath=str(tmp_path))], **TRAINER)
    with pytest.raises(NonFiniteLossError, match=r"not finite at step 3, first at noise level t=\d"):
        trainer.fit(LitEDM(net, OneSample(), lr=0.1, lr_ramp_up_images=0), Images(60))
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 3
    assert checkpoint["current_model_state"]["denoiser.model.value"].isfinite()


def test_a_class_conditional_model_samples_a_class_of_the_seed_or_the_chosen_one():
    def classes(seeds, **options):
        net = ConstantNet(num_classes=10)
        model = LitEDM(net, OneSample(), class_conditional=True, **options)
        model.image_shape = (1, 8, 8)
        model.sample(seeds, num_steps=2)
        assert all(torch.equal(call[2], net.calls[0][2]) for call in net.calls)
        return net.calls[0][2]

    drawn = classes(range(2000))
    assert torch.equal(classes([7, 1234]), drawn[[7, 1234]])
    # Uniform over ten classes: 200 ± 13.4 each.
    assert (drawn.bincount(minlength=10) - 200).abs().max() < 60
    assert classes([7, 1234], sampling_class=3).tolist() == [3, 3]


def test_a_batch_interrupted_half_way_is_counted_once(tmp_path):
    def run(interrupt_at, **fit_args):
        torch.manual_seed(0)
        model, calls = LitEDM(unet(), OneSample(), lr_ramp_up_images=400), []

        def backward(loss, *args, **kwargs):
            calls.append(loss)
            if len(calls) == interrupt_at:
                raise KeyboardInterrupt
            loss.backward()

        model.backward = backward
        trainer = pl.Trainer(max_steps=5, callbacks=[LastCheckpoint(dirpath=str(tmp_path))], **TRAINER)
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(model, Digits(batch_size=32), **fit_args)
        return torch.load(tmp_path / "last.ckpt", weights_only=False)

    whole = run(None)
    assert run(3)["images_seen"] == 2 * 32
    resumed = run(None, ckpt_path=tmp_path / "last.ckpt")
    assert resumed["images_seen"] == whole["images_seen"] == 5 * 32
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name])


def test_a_checkpoint_of_another_sigma_data_or_net_is_refused():
    saved = {"state_dict": LitEDM(unet(), OneSample()).state_dict(), "hyper_parameters": {"sigma_data": 0.5}}
    LitEDM(unet(), OneSample()).check_checkpoint(saved)
    with pytest.raises(InputError, match=r"preconditioning: sigma_data is 0.5 in the checkpoint, 0.4 in LitEDM"):
        LitEDM(unet(), OneSample(), sigma_data=0.4).check_checkpoint(saved)
    saved["generative_model"] = {"kind": "flow"}
    with pytest.raises(InputError, match=r"another architecture: .*; the checkpoint is of a flow model"):
        LitEDM(ConstantNet(), OneSample()).check_checkpoint(saved)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_mixed_precision_trains_and_keeps_the_target_exact(precision):
    model = LitEDM(unet(), Exact(), lr=1e-2, lr_ramp_up_images=0)
    targets = []
    original = model.target
    model.target = lambda *args: targets.append((args, original(*args))) or targets[-1][1]
    train(model, Digits(batch_size=64), 3, precision=precision)
    (z, sigma, *_), target = targets[-1]
    assert target.dtype == torch.float32
    expected = posterior_mean(z, model.estimator.reference.gather(torch.arange(1797)), sigma)
    # `Exact` promises this bound; bfloat16 would have an error of 1e-6.
    assert (target.double() - expected).square().mean() < 1e-9
    assert all(p.isfinite().all() for p in model.parameters())


def test_better_targets_have_less_error_at_validation():
    errors = []
    for estimator in (OneSample(), KNN(256, 64), Exact()):
        trainer = pl.Trainer(**{**TRAINER, "limit_val_batches": 1, "enable_checkpointing": False})
        (metrics,) = trainer.validate(LitEDM(unet(), estimator), Digits(batch_size=128), verbose=False)
        errors.append(metrics["val/target_mse"])
    assert errors[0] > 10 * errors[1] > 100 * errors[2]


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", 0), ("ema_half_life_images", 0), ("lr_ramp_up_images", -1), ("sampling_steps", 0), ("sigma_min", 100.0)],
)
def test_option_out_of_range_is_named(option, value):
    with pytest.raises(InputError, match=option):
        LitEDM(ConstantNet(), OneSample(), **{option: value})


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_augmentation_draws_as_edm_does():
    images = torch.rand(20000, 1, 4, 4, generator=generator(1))
    result = GeometricAugmentation(p=0.12)(images, generator())
    assert result.labels.shape == (20000, 9)
    applied = result.labels.ne(0)
    rates = {0: 0.5, 1: 0.06, 2: 0.12, 4: 0.12, 5: 0.12, 6: 0.06, 7: 0.12, 8: 0.12}  # half of the axes are 0
    for column, rate in rates.items():
        assert applied[:, column].float().mean().item() == pytest.approx(rate, abs=5 * (rate / 20000) ** 0.5)
    assert torch.equal(applied[:, 7], applied[:, 8])
    for column in (2, 7, 8):
        assert result.labels[applied[:, column], column].std().item() == pytest.approx(1, abs=0.07)
    assert result.warped.float().mean().item() == pytest.approx(1 - 0.88**4, abs=0.02)
    assert torch.equal(result.warp.flips, result.labels[:, :2].bool())
    untouched = ~result.labels.ne(0).any(1)
    assert torch.equal(result.images[untouched], images[untouched])
    flips = result.warp.flips
    only_x = flips[:, 0] & ~flips[:, 1] & ~result.warped
    assert torch.equal(result.images[only_x], images[only_x].flip(-1))
    only_y = ~flips[:, 0] & flips[:, 1] & ~result.warped
    assert only_y.sum() > 100
    assert torch.equal(result.images[only_y], images[only_y].flip(-2))
    assert torch.equal(GeometricAugmentation(p=0)(images, generator()).images, images)


def homogeneous(label, sign, width, height):
    """The label's map from places in the result to places in the source, in pixels from the centre.

    EDM's label is the same for a stretch along an axis and a compression along the opposite axis; `sign` tells which.
    """
    x_flip, y_flip, scale, cos, sin, stretch_cos, stretch_sin, shift_x, shift_y = label.double().numpy()
    angle, axis = np.arctan2(sin, cos + 1), np.arctan2(stretch_sin, stretch_cos)
    stretch = sign * 0.2 * np.hypot(stretch_cos, stretch_sin)

    def rotation(a):
        return np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])

    flips = np.diag([1 - 2 * x_flip, 1 - 2 * y_flip, 1])
    scaling = np.diag([2 ** (0.2 * scale), 2 ** (0.2 * scale), 1])
    stretching = rotation(-axis) @ np.diag([2**stretch, 2**-stretch, 1]) @ rotation(axis)
    shift = np.array([[1, 0, 0.125 * shift_x * width], [0, 1, 0.125 * shift_y * height], [0, 0, 1]])
    # The steps are in order, first to last; EDM rotates by minus the angle of its label.
    return np.linalg.inv(shift @ stretching @ rotation(-angle) @ scaling @ flips)


@pytest.mark.parametrize("sides", [(32, 32), (33, 33), (24, 40)])
def test_augmentation_is_the_map_that_its_label_says(sides):
    # Each pixel's value is its coordinate, so the result shows the origin of each pixel.
    height, width = sides
    down, along = (torch.arange(side) + 0.5 - side / 2 for side in sides)
    images = torch.stack(torch.meshgrid(along, down, indexing="xy"))[None].expand(300, -1, -1, -1)
    images = images.contiguous()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # must not matter
        result = GeometricAugmentation(p=0.7)(images, generator())
    checked = 0
    for image, label in zip(result.images, result.labels, strict=True):
        errors = []
        for sign in (1, -1):
            back = homogeneous(label, sign, width, height)
            for row, column in ((height // 2, width // 2), (height // 2 - 3, width // 2 + 2)):
                source = (back @ np.array([along[column], down[row], 1]))[:2]
                errors.append(np.abs(image[:, row, column].numpy() - source).max())
            inside = np.abs(source / [width, height]).max() < 0.35  # away from the reflected border
        if inside:
            assert min(max(errors[:2]), max(errors[2:])) < 3e-3
            checked += 1
    assert checked > 150
