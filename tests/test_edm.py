import math

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from callbacks import LastCheckpoint
from lit_knn.augment import GeometricAugmentation
from lit_knn.data import Digits
from lit_knn.edm import LitEDM
from lit_knn.errors import InputError, NonFiniteLossError
from lit_knn.estimators import KNN, Exact, OneSample
from lit_knn.nets import UNet
from lit_knn.posterior import posterior_mean
from lit_knn.reference import ReferenceSet

TRAINER = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}


class ConstantNet(nn.Module):
    """Outputs its parameter everywhere and remembers what it was given."""

    def __init__(self, num_classes=0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.3))
        self.num_classes = num_classes
        self.calls = []

    def forward(self, z_scaled, noise_label, class_label=None, augment_label=None):
        self.calls.append((z_scaled.detach(), noise_label.detach(), class_label, augment_label))
        return self.value.expand_as(z_scaled)


class Images(pl.LightningDataModule):
    """Sixty images of 1x4x4, all of them in every batch."""

    def __init__(self):
        super().__init__()
        self.x = torch.randn(60, 1, 4, 4, generator=torch.Generator().manual_seed(3)) * 0.5
        self.reference = ReferenceSet(self.x)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.x, batch_size=60)


def train(model, data, steps, **trainer_args):
    trainer = pl.Trainer(max_steps=steps, **{**TRAINER, "enable_checkpointing": False, **trainer_args})
    trainer.fit(model, data)
    return trainer


def unet(**options):
    return UNet(1, channels=8, multipliers=(1, 2), blocks=1, **options)


def points_and_levels(net):
    """Undo c_in and c_noise of the last call: z, σ, c_skip and c_out in float64, broadcastable."""
    z_scaled, noise, *_ = net.calls[-1]
    sigma = torch.exp(4 * noise.double()).reshape(-1, 1, 1, 1)
    norm = (sigma**2 + 0.25).sqrt()
    return z_scaled.double() * norm, sigma, 0.25 / norm**2, 0.5 * sigma / norm


@pytest.mark.parametrize("estimator", [OneSample(), Exact()])
def test_loss_is_the_weighted_squared_distance_to_the_estimated_mean(estimator):
    data, net = Images(), ConstantNet()
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
    train(LitEDM(net, OneSample(), P_mean=-0.4, P_std=0.7), Images(), 40)
    log_sigma = torch.cat([4 * noise for _, noise, *_ in net.calls[-40:]])
    assert log_sigma.mean().item() == pytest.approx(-0.4, abs=0.06)
    assert log_sigma.std().item() == pytest.approx(0.7, abs=0.05)


def test_augmented_items_keep_their_own_image_as_target_and_the_others_use_the_estimator():
    seen = {}

    class Half:
        def __call__(self, images, generator):
            changed = torch.arange(len(images)) % 2 == 0
            return torch.where(changed[:, None, None, None], images + 5, images), changed[:, None].float(), changed

    class Marker(Exact):
        def _posterior_mean(self, z, t, x_source, generator):
            seen["x_source"] = x_source
            return torch.full_like(z, 7.0)

    data, net = Images(), ConstantNet()
    model = LitEDM(net, Marker(), augmentation=Half())
    targets = []
    original = model._target
    model._target = lambda *args: targets.append(original(*args)) or targets[-1]
    train(model, data, 1)
    torch.testing.assert_close(targets[0][::2], data.x[::2] + 5)
    assert (targets[0][1::2] == 7).all()
    torch.testing.assert_close(seen["x_source"], data.x[1::2])
    assert net.calls[-1][3].flatten().tolist() == [1.0, 0.0] * 30


def test_learning_rate_ramps_up_over_images_and_never_is_zero():
    rates = []

    class Rates(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    train(LitEDM(ConstantNet(), OneSample(), lr=1.0, lr_ramp_up_images=240), Images(), 6, callbacks=[Rates()])
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_average_has_the_half_life_in_images_with_accumulation(tmp_path):
    values = []

    class History(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if len(values) < trainer.global_step:
                values.append(pl_module.denoiser.model.value.item())

    model = LitEDM(ConstantNet(), OneSample(), lr=0.1, lr_ramp_up_images=0, ema_half_life_images=9)
    callbacks = [History(), LastCheckpoint(dirpath=str(tmp_path))]
    trainer = pl.Trainer(max_steps=4, accumulate_grad_batches=2, callbacks=callbacks, **TRAINER)
    trainer.fit(model, Images())
    average = values[0]
    for step, value in enumerate(values[1:], start=2):
        half_life = min(9, 0.05 * step * 120)
        decay = 0.5 ** (120 / half_life)
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
        trainer.fit(LitEDM(net, OneSample(), lr=0.1, lr_ramp_up_images=0), Images())
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 3
    assert checkpoint["current_model_state"]["denoiser.model.value"].isfinite()


def test_class_labels_reach_the_net():
    net = ConstantNet(num_classes=10)
    train(LitEDM(net, OneSample(), class_conditional=True), Digits(batch_size=64), 1)
    assert net.calls[-1][2].dtype == torch.int64
    assert set(net.calls[-1][2].tolist()) <= set(range(10))


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
    # Uniform over the ten: 200 ± 13.4 each.
    assert (drawn.bincount(minlength=10) - 200).abs().max() < 60
    assert classes([7, 1234], sampling_class=3).tolist() == [3, 3]


def test_classes_that_do_not_fit_are_refused():
    def model(num_classes, estimator=None, **options):
        return LitEDM(ConstantNet(num_classes), estimator or OneSample(), **options)

    with pytest.raises(InputError, match="class_conditional=True needs OneSample; KNN"):
        model(10, KNN(8, 4), class_conditional=True)
    with pytest.raises(InputError, match="class_conditional=True, but the net has num_classes=0"):
        model(0, class_conditional=True)
    with pytest.raises(InputError, match="class_conditional=False, but the net has num_classes=10"):
        model(10)
    with pytest.raises(InputError, match="sampling_class=10, but the net has num_classes=10"):
        model(10, class_conditional=True, sampling_class=10)
    with pytest.raises(InputError, match="labels of the data are 0 to 9, but the net has num_classes=9"):
        train(model(9, class_conditional=True), Digits(batch_size=64), 1)
    with pytest.raises(InputError, match="the data has no labels"):
        train(model(9, class_conditional=True), Images(), 1)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_mixed_precision_trains_and_keeps_the_target_exact(precision):
    model = LitEDM(unet(), Exact(), lr=1e-2, lr_ramp_up_images=0)
    targets = []
    original = model._target
    model._target = lambda *args: targets.append((args, original(*args))) or targets[-1][1]
    train(model, Digits(batch_size=64), 3, precision=precision)
    (z, sigma, *_), target = targets[-1]
    assert target.dtype == torch.float32
    expected = posterior_mean(z, model.estimator.reference.gather(torch.arange(1797)), sigma)
    torch.testing.assert_close(target.double(), expected, rtol=1e-5, atol=1e-5)
    assert all(p.isfinite().all() for p in model.parameters())


def test_samples_depend_on_their_seed_alone():
    model = LitEDM(unet(), OneSample())
    model.image_shape = (1, 8, 8)
    nn.init.normal_(model.denoiser.model.conv_out.weight, std=0.1)
    together = model.eval().sample([3, 4, 5, 6], num_steps=4)
    torch.testing.assert_close(together[2:3], model.sample([5], num_steps=4), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together[0], together[1])


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


def test_augmentation_tells_what_it_did_and_leaves_the_others_alone():
    images = torch.rand(4000, 1, 8, 8, generator=generator(1)) * 2 - 1
    augmented, labels, changed = GeometricAugmentation(p=0.12)(images, generator())
    assert labels.shape == (4000, 9)
    assert torch.equal(augmented[~changed], images[~changed])
    assert (labels[~changed] == 0).all()
    different = (augmented != images).flatten(1).any(1)
    assert torch.equal(different, changed)
    # Seven independent draws of 0.12: two flips, scale, rotation, anisotropy, two shifts.
    assert changed.float().mean().item() == pytest.approx(1 - 0.88**7, abs=0.03)
    for column in (0, 1, 2, 4, 7, 8):
        assert labels[:, column].ne(0).float().mean().item() == pytest.approx(0.12, abs=0.02)


def test_augmentation_is_the_map_its_label_says():
    images = torch.rand(3000, 1, 8, 8, generator=generator(1)) * 2 - 1
    augmented, labels, _ = GeometricAugmentation(p=0.12)(images, generator())
    only = lambda column: labels[:, column].ne(0) & (labels.ne(0).sum(1) == 1)  # noqa: E731
    torch.testing.assert_close(augmented[only(0)], images[only(0)].flip(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(augmented[only(1)], images[only(1)].flip(-2), atol=1e-5, rtol=0)
    assert only(0).sum() > 20
    # A larger scale shows less of a ramp along x, a smaller one more; a shift to the right moves its values right.
    ramp = torch.linspace(-1, 1, 32).expand(3000, 1, 32, 32)
    warped, labels, _ = GeometricAugmentation(p=0.12)(ramp, generator())
    center = warped[:, 0, 16, 15:17].diff(dim=1)[:, 0] / (2 / 31)
    scaled = labels[:, 2].ne(0) & (labels.ne(0).sum(1) == 1)
    torch.testing.assert_close(center[scaled], torch.exp2(-labels[scaled, 2]), atol=1e-3, rtol=0)
    shifted = labels[:, 7].ne(0) & (labels.ne(0).sum(1) == 1) & (labels[:, 7].abs() < 0.3)
    moved = -warped[shifted, 0, 16, 15:17].mean(1) / (2 / 31) / 32
    torch.testing.assert_close(moved, labels[shifted, 7], atol=1e-3, rtol=0)


def test_augmentation_of_vectors_or_bad_probability_is_refused():
    with pytest.raises(InputError, match=r"p must be in \[0, 1\], got 1.5"):
        GeometricAugmentation(1.5)
    with pytest.raises(InputError, match="images"):
        GeometricAugmentation()(torch.zeros(3, 2), generator())
