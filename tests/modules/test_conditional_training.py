"""Class-conditional EDM and iCT: labels reach network and estimator, samples have a class, bad input is refused."""

from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import nn

from lit_knn.commands.prepare import main as prepare
from lit_knn.common.errors import InputError
from lit_knn.estimators import KNN, STF, ByClass, Estimator, Exact, Network, OneSample
from lit_knn.modules import LitEDM, LitICT
from lit_knn.modules.augmentation import Augmented
from lit_knn.modules.conditioning import Conditioning
from lit_knn.nets import UNet
from lit_knn.reference.classes import classes_of
from lit_knn.sampling.solvers import euler_step
from lit_knn.theory.warp import flip
from main import main
from tests import ROOT
from tests.labelled import Labelled, Watched, undone
from tests.networks import write_start
from tests.short_training import TRAINER, train
from tests.toys import enumerate_class_mean, unwarped

CONFIGS = {name: str(ROOT / "configs" / name / "digits_conditional.yaml") for name in ("table1", "table2")}
TINY = ["-c", str(ROOT / "tests" / "tiny.yaml"), "--model.net.channels", "8", "--model.estimator.n", "8"]
BOTH = pytest.mark.parametrize("kind", [LitICT, LitEDM])


class Asked(Estimator):
    """Records the labels of its calls."""

    needs_reference = False
    uses_source = takes_labels = True

    def __init__(self):
        self.calls = []

    def _posterior_mean(self, z, t, x_source, generator):
        self.calls.append((z, t, x_source, self.labels))
        return x_source

    def mean_of(self, query):
        self.labels = query.labels
        return super().mean_of(query)


def scaled(kind, **options):
    """A network that records its inputs, and the conditional model around it."""
    net = Watched()
    return net, kind(net, class_conditional=True, **options)


@BOTH
def test_network_and_estimator_are_given_the_labels_of_the_batch(kind):
    data, estimator = Labelled(), Asked()
    net, model = scaled(kind, estimator=estimator)
    train(model, data, 1)
    calls = net.calls[-2:] if kind is LitICT else net.calls[-1:]  # student and teacher
    assert all(torch.equal(labels, data.labels) for *_, labels in calls)
    assert estimator.calls
    for _, _, x_source, labels in estimator.calls:
        assert torch.equal(x_source, data.x)
        assert torch.equal(labels, data.labels)


def test_the_teacher_is_one_step_down_the_flow_of_its_class():
    data = Labelled()
    net, model = scaled(LitICT, estimator=Exact(), solver=euler_step, sigma_max=20.0)
    train(model, data, 1)
    (z, t), (z_hat, t_prev) = map(undone, net.calls[-2:])
    mu = enumerate_class_mean(data.reference, z, t, data.labels)
    expected = z + ((t_prev - t) / t).reshape(-1, 1, 1, 1) * (z - mu)
    torch.testing.assert_close(z_hat, expected, rtol=1e-4, atol=1e-4)


class EverySecondWarped:
    """Mirrors half of the images along each axis; it marks every second one as warped, with the identity as warp."""

    label_dim = 0

    def __call__(self, images, generator):
        flips = torch.rand(len(images), 2, generator=generator) < 0.5
        warped = torch.arange(len(images)) % 2 == 0
        return Augmented(flip(images, flips), torch.zeros(len(images), 9), warped, unwarped(flips))


@pytest.mark.parametrize("augmentation", [None, EverySecondWarped()])
def test_the_target_of_denoising_is_the_mean_of_the_class(augmentation):
    data = Labelled()
    net, model = scaled(LitEDM, estimator=Exact(), augmentation=augmentation)
    net.forward = lambda *args: Watched.forward(net, *args[:3])  # it takes no augmentation labels
    losses = []
    model.objective = lambda loss, x: losses.append(loss.detach()) or loss.mean()
    train(model, data, 1)
    z, sigma = undone(net.calls[-1])
    level = sigma.reshape(-1, 1, 1, 1)
    denoised = 0.25 / (level**2 + 0.25) * z + 0.5 * level / (level**2 + 0.25).sqrt() * 0.3
    target = enumerate_class_mean(data.reference, z, sigma, data.labels)
    if augmentation is not None:
        # The distance of an item to its own image shows how it was mirrored.
        ways = [torch.tensor(way).expand(60, 2) for way in ((False, False), (True, False), (False, True), (True, True))]
        distances = torch.stack([(flip(z, way) - data.x).flatten(1).norm(dim=1) for way in ways])
        targets = [flip(enumerate_class_mean(data.reference, flip(z, w), sigma, data.labels), w) for w in ways]
        target = torch.stack(targets)[distances.argmin(0), torch.arange(60)]
    weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
    expected = weight * (denoised - target).square().flatten(1).mean(1)
    small = sigma < 1  # the noise is small enough to see the distance
    assert small.sum() > 20
    torch.testing.assert_close(losses[0].double()[small], expected[small], rtol=1e-3, atol=1e-4)


def test_the_error_of_the_target_is_against_the_mean_of_the_class():
    def target_mse(estimator):
        _, model = scaled(LitEDM, estimator=estimator)
        trainer = train(model, Labelled(), 1, limit_val_batches=1)
        return trainer.callback_metrics["val/target_mse"].item()

    assert target_mse(Exact()) < 1e-12
    assert 0 < target_mse(STF(n=1000)) < target_mse(OneSample())


@BOTH
def test_the_estimator_is_bound_to_the_classes_before_training_and_not_for_sampling(kind):
    data = Labelled()
    _, model = scaled(kind, estimator=KNN(k=8, n=4))
    train(model, data, 1)
    assert not data.reference.index_built
    assert all(classes_of(data.reference)[c].index_built for c in range(3))
    with pytest.raises(InputError, match="labels missing"):
        model.estimator.posterior_mean(data.x, 1.0)
    data, (_, model) = Labelled(), scaled(kind, estimator=KNN(k=800, n=4))
    data.predict_dataloader = lambda: torch.utils.data.DataLoader(range(3))
    pl.Trainer(**TRAINER).predict(model, data)


@BOTH
def test_samples_have_the_class_of_their_seed_or_the_chosen_one(kind):
    def classes(seeds, **options):
        net, model = scaled(kind, estimator=OneSample(), **options)
        model.image_shape = (1, 4, 4)
        model.sample(seeds, num_steps=2)
        assert all(torch.equal(call[2], net.calls[0][2]) for call in net.calls)
        return net.calls[0][2]

    drawn = classes(range(300))
    assert torch.equal(classes([7, 234]), drawn[[7, 234]])
    # Uniform over three classes: 100 ± 8.2 each.
    assert (drawn.bincount(minlength=3) - 100).abs().max() < 40
    assert classes([7, 234], sampling_class=2).tolist() == [2, 2]
    assert classes(range(9), sampling_class=0).tolist() == [0] * 9


@BOTH
def test_what_does_not_fit_is_refused_before_the_estimator_is_bound(kind):
    def model(num_classes, conditional=True, **options):
        return kind(Watched(num_classes), KNN(k=8, n=4), class_conditional=conditional, **options)

    name = kind.__name__
    with pytest.raises(InputError, match=f"{name}: class_conditional=True, but the net has num_classes=0"):
        model(0)
    with pytest.raises(InputError, match=f"{name}: class_conditional=False, but the net has num_classes=3"):
        model(3, conditional=False)
    for chosen in (3, -1):
        with pytest.raises(InputError, match=f"{name}: sampling_class={chosen}, but the net has num_classes=3"):
            model(3, sampling_class=chosen)
    with pytest.raises(InputError, match="sampling_class=1, but the net has num_classes=0"):
        model(0, conditional=False, sampling_class=1)
    for num_classes, data, words in (
        (3, Labelled(in_reference=False), f"{name}: class_conditional=True, but the data has no labels"),
        (3, Labelled(lowest=1), f"{name}: the labels of the data are 1 to 3, but the net has num_classes=3: give it 4"),
        # Of ten classes, samples of seven would be of classes that do not exist.
        (10, Labelled(), f"{name}: the labels of the data are 0 to 2, but the net has num_classes=10: give it 3"),
    ):
        with pytest.raises(InputError, match=words):
            train(model(num_classes), data, 1)
        assert not data.reference.index_built
    with pytest.raises(InputError, match=f"{name}: class_conditional=True, but the batches have no labels"):
        train(model(3), Labelled(in_batches=False), 1)
    with pytest.raises(InputError, match=r"^class 0: KNN: k=40 is more than the \d+ images"):
        train(kind(Watched(), KNN(k=40, n=4), class_conditional=True), Labelled(), 1)


def test_a_conditional_network_estimates_the_mean_of_a_class(tmp_path):
    torch.manual_seed(0)
    net = UNet(1, channels=8, multipliers=(1, 2), blocks=1, num_classes=10)
    model = LitEDM(net, OneSample(), class_conditional=True)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.05)
    network = Network(write_start(tmp_path / "net.ckpt", net))
    z, sigma, labels = torch.randn(4, 1, 8, 8), torch.ones(4), torch.tensor([0, 9, 3, 3])
    with torch.no_grad():
        expected = model.denoiser.eval()(z, sigma, labels)
    torch.testing.assert_close(network.posterior_mean(z, sigma, labels=labels), expected)
    assert not torch.allclose(network.posterior_mean(z, sigma), expected)
    with pytest.raises(InputError, match="Network: labels are 0 to 10, but the net has num_classes=10"):
        network.posterior_mean(z, sigma, labels=torch.tensor([0, 10, 3, 3]))


# The application


FAST = {
    "table1": ["--model.lr", "0.03", "--model.ema_decay", "0.1"],
    "table2": ["--model.lr", "0.03", "--model.lr_ramp_up_images", "0", "--model.ema_half_life_images", "10"],
}


# The conditional run of tests/runs/test_hand_over.py is of the kind of table1.
@pytest.mark.parametrize("name", [pytest.param("table1", marks=pytest.mark.slow), "table2"])
def test_fit_and_predict_a_class(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = ["--trainer.max_steps", "6", "--trainer.val_check_interval", "6"]
    main(["fit", "-c", CONFIGS[name], *TINY, *steps, *FAST[name]])
    folder = Path("runs") / f"{name}_digits_conditional"
    checkpoint = folder / "knn_0" / "checkpoints" / "last.ckpt"
    assert list((folder / "knn_0" / "samples").glob("*.png"))
    written = []
    for number, more in enumerate((["--model.sampling_class", "3"], [])):
        options = ["--ckpt_path", str(checkpoint), "--data.predict_samples", "24", *more]
        main(["predict", "-c", CONFIGS[name], *TINY, "--sample_writer.format", "npz", *options])
        with np.load(folder / "knn_0" / f"predict_{number}" / "predictions" / "samples.npz") as file:
            written.append(file["images"].astype(int))
            labels = file["labels"]
    three, drawn = written
    assert three.shape == drawn.shape == (24, 8, 8, 1)
    assert (three != drawn).any()
    conditioning = Conditioning(Watched(10), class_conditional=True, sampling_class=None)
    own = conditioning.of_samples(range(24), torch.device("cpu")).numpy()
    assert (labels == own).all()
    assert (own == 3).any()
    assert np.abs(drawn - three)[own == 3].max() <= 1  # rounding, one grey level


def test_imagenet_run_on_a_few_prepared_images(tmp_path, monkeypatch):
    # Three folders of twenty images; the archive has a thousand folders. The network is small.
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for i in range(60):
        folder = Path("train") / f"n{i % 3:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    prepare(["train", "data/imagenet64.npy", "--labels-from-folders"])
    small = ["--model.net", str(ROOT / "configs" / "models" / "unet.yaml"), "--model.net.num_classes", "3"]
    options = ["--model.estimator.k", "16", "--trainer.max_steps", "2", "--trainer.accumulate_grad_batches", "1"]
    options += ["--model.estimator.n", "8", "--model.net.channels", "8", "--model.net.multipliers", "[1, 1, 1]"]
    options += ["--model.net.blocks", "1", "--data.batch_size", "4", "--data.val_images", "4"]
    # Without instructions for bfloat16, a convolution would take 60 times as long.
    options += ["--trainer.precision", "32-true"]
    options += ["--trainer.limit_train_batches", "1", "--trainer.val_check_interval", "1"]
    options += ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.enable_progress_bar", "false"]
    options += ["--trainer.callbacks", "[]"]
    run_config = str(ROOT / "configs" / "imagenet64" / "ict_knn_conditional.yaml")
    seen = []
    bound = ByClass.bind
    monkeypatch.setattr(ByClass, "bind", lambda e, reference: seen.append(reference) or bound(e, reference))
    main(["fit", "-c", run_config, *small, *options])
    (reference,) = seen
    assert tuple(classes_of(reference)) == (0, 1, 2)
    for label in classes_of(reference):  # sorted by class, so the mapped file needs no copy
        own = classes_of(reference)[label].images
        assert own.untyped_storage().data_ptr() == reference.images.untyped_storage().data_ptr()
    assert list(Path("runs/imagenet64_conditional").rglob("last.ckpt"))
