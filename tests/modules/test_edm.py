"""LitEDM: its loss and gradient, targets of augmented items, and augmentation."""

import numpy as np
import pytest
import torch

from lit_knn.estimators import KNN, STF, Exact, OneSample
from lit_knn.modules import LitEDM
from lit_knn.modules.augmentation import Augmented, GeometricAugmentation
from lit_knn.theory.posterior import posterior_mean
from lit_knn.theory.warp import flip
from tests.short_training import train
from tests.toys import all_warped, rng
from tests.watched import Images, Labelled, WatchedNet, undone


def recorded(model, method):
    """A list that gets the arguments, in their order, and the result of each call of the method."""
    calls, original = [], getattr(model, method)

    def record(*args, **named):
        result = original(*args, **named)
        calls.append(((*args, *named.values()), result))
        return result

    setattr(model, method, record)
    return calls


@pytest.mark.parametrize(
    ("estimator", "sigma_data", "accumulated"), [(Exact(), 0.2, 1), (OneSample(), 0.5, 3)]
)
def test_loss_and_gradient_are_those_of_the_formulas(estimator, sigma_data, accumulated):
    data, net = Images(60 // accumulated), WatchedNet()
    model = LitEDM(net, estimator, sigma_data=sigma_data)
    losses, gradients, expected = recorded(model, "losses"), [], []
    model.on_before_optimizer_step = lambda *_: gradients.append(net.value.grad.item())
    train(model, data, 1, accumulate_grad_batches=accumulated)
    # The network's first call is its trial.
    for call, x, (_, (loss, _)) in zip(net.calls[1:], data.train_dataloader(), losses, strict=True):
        z, sigma = undone(call, sigma_data)
        norm = (sigma**2 + sigma_data**2).sqrt()
        c_out = sigma_data * sigma / norm
        target = (
            posterior_mean(z, data.x.double(), sigma.flatten())
            if isinstance(estimator, Exact)
            else x
        )
        error = (sigma_data / norm) ** 2 * z + c_out * 0.3 - target
        weight = (norm / (sigma_data * sigma)) ** 2
        torch.testing.assert_close(
            loss.double(), (weight * error**2).flatten(1).mean(1), rtol=1e-3, atol=1e-5
        )
        # The derivative of the sum over pixels, λ(c_skip z + c_out v − target)², by v.
        expected.append((2 * weight * c_out * error).flatten(1).sum(1))
    assert gradients[0] == pytest.approx(torch.cat(expected).mean().item(), rel=1e-3)


def test_noise_levels_are_log_normal():
    net = WatchedNet()
    train(LitEDM(net, OneSample(), P_mean=-0.4, P_std=0.7), Images(60), 40)
    log_sigma = torch.cat([4 * noise for _, noise, _ in net.calls[1:]])
    # 2,400 draws: the standard errors are 0.014 and 0.010.
    assert log_sigma.mean().item() == pytest.approx(-0.4, abs=0.06)
    assert log_sigma.std().item() == pytest.approx(0.7, abs=0.05)


# Targets of augmented items

WAYS = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]]).bool()
AXES = [(), (-1,), (-2,), (-2, -1)]


class EveryFifth:
    """Warps every fifth item with all transformations, and mirrors the others in one of four ways each."""

    label_dim = 9

    def __call__(self, images, generator):
        result, item = all_warped(images), torch.arange(len(images))
        warped = item % 5 == 0
        flips = torch.where(warped[:, None], result.warp.flips, WAYS[item % 4])
        labels = torch.where(
            warped[:, None], result.labels, torch.nn.functional.pad(flips.float(), (0, 7))
        )
        images = torch.where(warped[:, None, None, None], result.images, flip(images, flips))
        return Augmented(images, labels, warped, result.warp._replace(flips=flips))


def augmented(estimator, num_classes=0, **options):
    net = WatchedNet(num_classes=num_classes)
    net.augment_dim = 9
    return LitEDM(net, estimator, augmentation=EveryFifth(), **options)


@pytest.mark.parametrize("data", [Images(60), Labelled()], ids=["without classes", "by class"])
def test_augmented_target_is_the_mean_over_the_augmented_set(data):
    options = {"num_classes": 3, "class_conditional": True} if isinstance(data, Labelled) else {}
    model = augmented(Exact(), P_mean=0.5, P_std=0.5, **options)
    targets, losses, inputs = recorded(model, "target"), recorded(model, "losses"), []
    model.network.register_forward_pre_hook(lambda net, given: inputs.append(given))
    logged = train(model, data, 1, limit_val_batches=1, log_every_n_steps=1).logged_metrics
    (z, sigma, *_), target = targets[0]
    warp = all_warped(data.x).warp
    for item in range(60):
        row = slice(item, item + 1)
        images = (
            data.x.flip(AXES[item % 4])
            if item % 5
            else warp.rows(row).apply(data.x.unsqueeze(0))[0]
        )
        images = images[data.labels == data.labels[item]] if options else images
        expected = posterior_mean(z[row], images.double(), sigma[row])
        torch.testing.assert_close(target[row].double(), expected, rtol=1e-4, atol=1e-5)
    # Validation uses images without augmentation.
    in_training, in_validation = inputs[-2:]
    assert torch.equal(in_training[3], EveryFifth()(data.x, None).labels)
    assert len(in_validation) == 3
    # The logs have the mean over pixels and the share of warped items.
    for name, (_, (loss, sigma)) in zip(("train/loss", "val/loss"), losses, strict=True):
        assert loss.shape == sigma.shape == (60,)
        assert logged[name].item() == pytest.approx(loss.mean().item(), rel=1e-5)
    assert logged["train/augmented"].item() == pytest.approx(1 / 5)


def test_all_target_draws_come_from_the_steps_generator():
    model = augmented(KNN(10, 4), P_mean=1.0)
    calls = recorded(model, "target")
    for seed in (1, 2):
        torch.manual_seed(seed)
        train(model, Images(60), 1)
    (_, first), (_, second) = calls
    assert torch.equal(first, second)


def test_every_target_has_its_own_item_as_source():
    # A reference batch of one image is the source. Its augmented mean is the item, and there is almost no noise.
    data, model = Images(60), augmented(STF(1), P_mean=-6.0, P_std=0.1)
    calls = recorded(model, "target")
    train(model, data, 1)
    ((z, *_), target) = calls[0]
    item = EveryFifth()(data.x, None).images
    torch.testing.assert_close(target, item)
    torch.testing.assert_close(z, item, rtol=0, atol=0.02)


# Augmentation


def test_augmentation_draws_as_edm_does():
    images = torch.rand(20000, 1, 4, 4, generator=rng(1))
    result = GeometricAugmentation(p=0.12)(images, rng())
    labels, warped, flips = result.labels, result.warped, result.warp.flips
    assert labels.shape == (20000, 9)
    applied = labels.ne(0)
    # half of the axes are 0
    rates = {0: 0.5, 1: 0.06, 2: 0.12, 4: 0.12, 5: 0.12, 6: 0.06, 7: 0.12, 8: 0.12}
    for column, rate in rates.items():
        assert applied[:, column].float().mean().item() == pytest.approx(
            rate, abs=5 * (rate / 20000) ** 0.5
        )
    assert torch.equal(applied[:, 7], applied[:, 8])
    for column in (2, 7, 8):
        assert labels[applied[:, column], column].std().item() == pytest.approx(1, abs=0.07)
    # The angles are uniform over the circle: half of the 2,400 are beyond a right angle; the standard error is 0.01.
    assert (labels[applied[:, 4], 3] < -1).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert warped.float().mean().item() == pytest.approx(1 - 0.88**4, abs=0.02)
    assert torch.equal(flips, labels[:, :2].bool())
    for way, axes in zip(WAYS, AXES, strict=True):
        only = (flips == way).all(1) & ~warped
        assert only.sum() > 100
        assert torch.equal(result.images[only], images[only].flip(axes))
    assert torch.equal(GeometricAugmentation(p=0)(images, rng()).images, images)


def homogeneous(label, sign, width, height):
    """The label's map, without its flips, from places in the result to places in the source, in pixels from the centre.

    EDM's label is the same for a stretch along an axis and a compression along the opposite axis; `sign` tells which.
    """
    scale, cos, sin, stretch_cos, stretch_sin, shift_x, shift_y = label[2:].double().numpy()
    angle, axis = np.arctan2(sin, cos + 1), np.arctan2(stretch_sin, stretch_cos)
    stretch = sign * 0.2 * np.hypot(stretch_cos, stretch_sin)

    def rotation(a):
        return np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])

    scaling = np.diag([2 ** (0.2 * scale), 2 ** (0.2 * scale), 1])
    stretching = rotation(-axis) @ np.diag([2**stretch, 2**-stretch, 1]) @ rotation(axis)
    shift = np.array([[1, 0, 0.125 * shift_x * width], [0, 1, 0.125 * shift_y * height], [0, 0, 1]])
    # The steps are in order, first to last; EDM rotates by minus the angle of its label.
    return np.linalg.inv(shift @ stretching @ rotation(-angle) @ scaling)


@pytest.mark.parametrize("sides", [(33, 33), (24, 40)])
def test_augmentation_is_the_map_that_its_label_says(sides):
    height, width = sides
    images = torch.rand(300, 1, height, width)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # must not matter
        result = GeometricAugmentation(p=0.7)(images, rng())
    # Resampling rounds places of up to 40 pixels, and so the values between pixels, to some 1e-6.
    torch.testing.assert_close(result.images, result.warp.apply(images), rtol=0, atol=2e-5)
    # The map of a warp is in halves of the sides.
    halves = np.diag([width / 2, height / 2, 1])
    for theta, label in zip(result.warp.theta.double().numpy(), result.labels, strict=True):
        maps = [
            np.linalg.inv(halves) @ homogeneous(label, sign, width, height) @ halves
            for sign in (1, -1)
        ]
        # Both come from some ten roundings of float32 numbers near 1.
        assert min(np.abs(own[:2] - theta).max() for own in maps) < 2e-6


def test_ranks_validate_with_noise_of_their_own(monkeypatch):
    keys = []
    module = LitEDM(WatchedNet(), OneSample())
    monkeypatch.setattr(module, "log", lambda *args, **options: None)
    monkeypatch.setattr(
        module, "losses", lambda x, label, key: (keys.append(key) or torch.zeros(len(x)), None)
    )
    for rank in (0, 1):
        monkeypatch.setattr(LitEDM, "global_rank", rank)
        module.validation_step(torch.zeros(4, 1, 4, 4), 0)
    assert keys[0] != keys[1]
