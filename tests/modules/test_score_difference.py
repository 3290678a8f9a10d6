"""LitScoreDifference: its gradient, its bank, starts, resumed and distributed runs."""

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from lit_knn import load
from lit_knn.common.checkpoint_file import read_checkpoint_file
from lit_knn.common.errors import InputError, NonFiniteLossError
from lit_knn.common.rng import Stream
from lit_knn.estimators import KNN, Exact, OneSample
from lit_knn.modules import LitScoreDifference
from lit_knn.modules.sample_bank import SampleBank, Samples, labels_in_proportion
from lit_knn.modules.score_difference import BANK_KEY
from lit_knn.nets import UNet
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.theory.posterior import posterior_mean
from main import main
from tests.command_lines import ROOT
from tests.interrupted_runs import At, assert_same, fit, interrupt
from tests.networks import write_own
from tests.ranks import run_main
from tests.short_training import train
from tests.toys import rng
from tests.watched import Images, Labelled, OneBadItem, WatchedNet

CONFIG = str(ROOT / "configs" / "score_difference" / "digits.yaml")
SLOW = pytest.mark.slow
STD = 0.6  # sigma_data and sigma_max; then G(ε) = 0.5·0.6·ε + 0.6/√2·v


class Watched(Exact):
    """Records the latents and levels of its calls, and the images to which it is bound."""

    def __init__(self):
        self.calls, self.sets = [], []

    def bind(self, reference):
        self.sets.append(reference.images.clone())
        return super().bind(reference)

    def _posterior_mean(self, z, t, x_source, generator):
        self.calls.append((z.clone(), t.clone()))
        return super()._posterior_mean(z, t, x_source, generator)


def model(net=None, **options):
    estimator = options.pop("estimator", Exact())
    options = {"sigma_data": STD, "bank_size": 90, "lr": 1e-2, **options}
    return LitScoreDifference(estimator, net or WatchedNet(), **options)


def test_gradient_of_the_loss_is_the_weighted_difference():
    options = {"levels": 3, "weight_power": 1.0, "include_batch": True}
    module, data, seen = model(estimator=Watched(), **options), Images(60), {}
    module.repulsion = Watched()
    module.on_before_optimizer_step = lambda *_: seen.update(grad=module.network.value.grad.item())
    logged = train(module, data, 1, log_every_n_steps=1).callback_metrics
    ((z, t),), (bank,) = module.repulsion.calls, module.repulsion.sets
    assert torch.equal(z, module.estimator.calls[0][0])
    assert len(z) == 3 * 60
    # Each of the 60 samples stands at its three levels, and is among the last in the bank.
    V = posterior_mean(z, data.x.double(), t) - posterior_mean(z, bank.double(), t)
    weight = t.flatten()
    loss = (weight * V.square().flatten(1).mean(1)).mean()
    assert logged["train/loss"].item() == pytest.approx(loss.item(), rel=1e-3)
    # ∂G/∂v = c_out = STD·STD/√(2·STD²) in each pixel; the loss is a mean over 16 pixels.
    slope = -2 * (weight * V.flatten(1).mean(1)).mean() * STD / 2**0.5
    assert seen["grad"] == pytest.approx(slope.item(), rel=1e-3)


@pytest.mark.parametrize("fresh", [0, 40, None])
def test_bank_has_new_samples_and_the_latest_in_order(fresh):
    module, batches = model(levels=1, fresh=fresh), []
    module.repulsion = Watched()

    def keep(*_):
        made = []
        for scaled, _, output in module.network.calls[1:]:  # after the trial
            # c_in·σ_max = 1/√2, c_skip·σ_max = STD/2, c_out = STD/√2
            made.append(0.5 * STD * 2**0.5 * scaled + STD / 2**0.5 * output)
        batches.append(made)
        del module.network.calls[1:]

    module.on_after_backward = keep
    train(module, Images(30), 3)
    assert [len(bank) for bank in module.repulsion.sets] == [90, 90, 90]
    # The batch comes first, then the new samples: in the first step so many as fill the bank.
    new = {0: 0, 40: 2, None: 3}[fresh]
    assert [len(made) for made in batches] == [1 + 3, 1 + new, 1 + new]
    order = [*batches[0][1:], batches[0][0]]
    if fresh is None:
        order = []
    for made in batches[1:]:
        order += made[1:]
        torch.testing.assert_close(module.repulsion.sets.pop(1), torch.cat(order)[-90:])
        if fresh is not None:
            order.append(made[0])


def test_checkpoint_has_the_samples_of_whole_batches_alone():
    bank, x = SampleBank(3), torch.arange(10.0)[:, None]
    labels = torch.arange(10)
    assert bank.content(0) == {}
    assert bank.joined(x, labels).labels.tolist() == list(range(10))
    for batch in range(2):
        bank.add(x[2 * batch : 2 * batch + 2], labels[2 * batch : 2 * batch + 2], batch)
    # The second batch, number 1, was interrupted.
    assert bank.content(1)["images"].flatten().tolist() == [0, 1]
    content = bank.content(2)
    assert content["images"].flatten().tolist() == [1, 2, 3]
    assert content["labels"].tolist() == [1, 2, 3]
    other = SampleBank(2)
    other.restore(content)
    assert other.content(5)["images"].flatten().tolist() == [2, 3]


def small(fresh):
    torch.manual_seed(0)
    net = UNet(1, channels=4, multipliers=(1,), blocks=1, dropout=0.2)
    return LitScoreDifference(
        KNN(k=16, n=4),
        net,
        KNN(k=16, n=4),
        bank_size=96,
        fresh=fresh,
        levels=2,
        lr=1e-2,
        ema_decay=0.5,
    )


def broken_off():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fresh", "action"),
    [(64, broken_off), *(pytest.param(fresh, interrupt, marks=SLOW) for fresh in (0, None))],
)
def test_resumed_run_is_the_whole_one_with_its_bank(fresh, action, tmp_path):
    _, whole = fit(tmp_path / "whole", small(fresh), 4)
    _, first = fit(tmp_path / "1", small(fresh), 4, at=At(2, "on_after_backward", action))
    _, second = fit(tmp_path / "2", small(fresh), 4, first)
    assert_same(second, whole)
    if fresh is None:
        assert BANK_KEY not in read_checkpoint_file(second)
        return
    banks = [read_checkpoint_file(path)[BANK_KEY]["images"] for path in (second, whole)]
    assert torch.equal(*banks)
    assert banks[0].shape == (96, 1, 8, 8)


def test_classes_attract_and_repel_their_own():
    net = WatchedNet(num_classes=3)
    module = model(net, class_conditional=True, levels=2)
    train(module, Labelled(), 2)
    labels = module.bank.samples.labels
    # New samples have the classes in the proportions of the data, up to the samples that the bank is too small for.
    assert (labels.bincount(minlength=3) - 30).abs().max() <= 6
    assert set(module.repulsion.parts) == {0, 1, 2}
    for label, part in module.repulsion.parts.items():
        expected = module.bank.samples.images[labels == label]
        assert torch.equal(part.reference.images, expected)


def test_new_labels_have_the_shares_of_the_data():
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)
    counts = []
    for seed in range(200):
        drawn = labels_in_proportion(labels, 7, rng(seed))
        counts.append(drawn.bincount(minlength=3))
        assert (counts[-1] - 7 * torch.tensor([0.5, 0.3, 0.2])).abs().max() <= 1
    mean = torch.stack(counts).double().mean(0)
    # A share of 3.5 is 3 or 4, so that the standard error of its mean is at most 0.036.
    torch.testing.assert_close(mean, torch.tensor([3.5, 2.1, 1.4]).double(), rtol=0, atol=0.15)
    assert drawn.tolist() != sorted(drawn.tolist())


def test_bank_without_a_class_of_the_batch_is_refused():
    module = model(WatchedNet(num_classes=3), class_conditional=True, bank_size=4, fresh=0)
    module.bank.restore({"images": torch.zeros(4, 1, 4, 4), "labels": torch.zeros(4).long()})
    with pytest.raises(InputError, match="bank of 4 samples has none of class 1: raise bank_size"):
        train(module, Labelled(), 1)
    net = WatchedNet(num_classes=3)
    net.label_dropout = 0.1
    with pytest.raises(InputError, match="still move towards the class: set it to 0"):
        model(net, class_conditional=True)


def test_passes_of_a_step_and_steps_have_masks_of_their_own():
    module = model(WatchedNet(dropout=0.5), bank_size=60)
    train(module, Images(30), 2, limit_val_batches=0)
    # Two steps follow the trial, each of a batch and two new ones.
    masks = [output.flatten().tolist() for _, _, output in module.network.calls[1:]]
    assert len(masks) == 6
    assert len(set(map(tuple, masks))) == 6


def test_validation_leaves_the_bank_and_one_estimator_serves_both_sides():
    estimator = Watched()
    module = model(estimator=estimator, repulsion=estimator, fresh=30)
    train(module, Images(30), 2, limit_val_batches=0)
    bank = module.bank.samples.images
    assert torch.equal(module.estimator.reference.images, Images(30).reference.images)
    assert not torch.equal(module.repulsion.reference.images, module.estimator.reference.images)
    module.losses(torch.zeros(30, 1, 4, 4), None, (0, 0, 0, Stream.VALIDATION))
    assert module.bank.samples.images is bank


def test_bank_of_a_checkpoint_follows_the_new_samples_to_their_device():
    kept = Samples(torch.zeros(3, 1), None)
    new = Samples(torch.zeros(2, 1, device="meta"), None)
    assert kept.followed_by(new, 4).images.device.type == "meta"


# Starts


@pytest.mark.parametrize("kind", ["ict", "mean_flow", pytest.param("ect", marks=SLOW)])
def test_generator_starts_as_one_step_of_a_trained_model(kind, trained_run, tmp_path):
    run, _ = trained_run(kind)
    before = load(run)
    module = LitScoreDifference(Exact(), start=run).eval()
    module.image_shape = (1, 8, 8)
    seeds = [3, 5]
    assert torch.equal(module.sample(seeds), before.sample(seeds, 1))
    # The generator that trains is the one that samples.
    noise = seeded_noise(seeds, (1, 8, 8))
    torch.testing.assert_close(module.generator(noise), before.sample(seeds, 1))
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_denoiser_starts_at_a_chosen_level(tmp_path):
    path = write_own(tmp_path / "own.ckpt", augment_dim=9)
    module = LitScoreDifference(Exact(), start=path, sigma_max=2.0).eval()
    noise = torch.randn(2, 1, 8, 8)
    denoised = load(path)(2 * noise, 2.0)
    torch.testing.assert_close(module.generator(noise), denoised)
    assert LitScoreDifference(Exact(), start=path).generator.sigma_max == 80


@pytest.mark.usefixtures("own_folder")
def test_noise_level_of_the_start_is_kept_or_refused():
    start = write_own(Path("own.ckpt"))
    net = load(start).net
    _, path = fit(Path("run"), LitScoreDifference(Exact(), start=start, bank_size=64), 1)
    again = LitScoreDifference.load_from_checkpoint(path, estimator=Exact(), net=net)
    assert again.generator.sigma_max == 80
    with pytest.raises(InputError, match=r"sigma_max is 80\.0 in the checkpoint, 0\.5"):
        fit(Path("other"), LitScoreDifference(Exact(), net, bank_size=64), 2, path)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": OneSample()}, "OneSample uses the image that z was made from"),
        ({"t_min": 9.0}, "need 0 < sigma_min < sigma_max"),
        ({"bank_size": 0}, "bank_size must be at least 1"),
        ({"fresh": 91}, "fresh=91 must be from 0 to bank_size=90"),
        ({"levels": 0}, "levels must be at least 1"),
        ({"ema_decay": 1.0}, r"ema_decay must be in \[0, 1\)"),
        ({"start": "none.ckpt"}, "start=none.ckpt: no such file"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InputError, match=f"LitScoreDifference: .*{message}"):
        model(**options)


def test_start_and_net_must_fit(trained_run, tmp_path):
    with pytest.raises(InputError, match="start=null needs net"):
        LitScoreDifference(Exact())
    run, _ = trained_run("mean_flow")
    with pytest.raises(InputError, match=r"sigma_max=3\.0, but a mean flow has none"):
        LitScoreDifference(Exact(), start=run, sigma_max=3.0)
    path = write_own(tmp_path / "own.ckpt")
    with pytest.raises(InputError, match=r"trained with sigma_data=0\.5, not 1\.0: give null"):
        LitScoreDifference(Exact(), start=path, sigma_data=1.0)
    with pytest.raises(InputError, match="must descend and stay above sigma_min"):
        LitScoreDifference(Exact(), start=path, sigma_max=0.0)


def test_samples_that_are_not_finite_end_the_run():
    with pytest.raises(NonFiniteLossError, match="the samples are not finite at step 1"):
        train(model(OneBadItem(), bank_size=30), Images(30), 9)


# Whole runs


@pytest.mark.usefixtures("own_folder")
def test_a_run_trains_samples_and_exports_as_others():
    options = ["-c", CONFIG, "-c", str(ROOT / "tests" / "tiny.yaml"), "--model.net.channels", "8"]
    options += ["--model.start", "null", "--model.bank_size", "64"]
    options += ["--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
    options += ["--trainer.logger.save_dir", "runs", "--trainer.logger.name", "sd"]
    main(["fit", *options])
    (run,) = Path("runs/sd").iterdir()
    trained = load(run)
    main(["export", str(run), "out"])
    assert torch.equal(load("out").sample([1, 2]), trained.sample([1, 2]))
    main(["validate", *options, "--ckpt_path", str(run / "checkpoints" / "last.ckpt")])


class KeptBank(pl.Callback):
    """Keeps the bank and the weights of each rank in a file of the current folder."""

    def on_train_end(self, trainer, pl_module):
        weights = [parameter.detach() for parameter in pl_module.parameters()]
        torch.save([pl_module.bank.samples.images, weights], f"{trainer.global_rank}.pt")


@SLOW
@pytest.mark.usefixtures("own_folder")
def test_two_ranks_share_one_bank():
    kept = f"{__name__}.KeptBank"
    options = ["-c", CONFIG, "-c", ROOT / "tests" / "tiny.yaml", "--model.net.channels", "8"]
    options += ["--model.start", "null", "--model.bank_size", "200", "--trainer.max_steps", "3"]
    run_main(["fit", *options, "--trainer.callbacks+", kept], 2)
    (bank, weights), (other_bank, other_weights) = (torch.load(f"{rank}.pt") for rank in range(2))
    assert torch.equal(bank, other_bank)
    assert len(bank) == 200
    # The last 64 samples are 32 of each rank, made from noise of their own.
    assert not torch.equal(bank[-32:], bank[-64:-32])
    for weight, other in zip(weights, other_weights, strict=True):
        assert torch.equal(weight, other)


class Labels(OneSample):
    """Records the sources and labels of its calls."""

    def __init__(self):
        self.calls = []

    def _posterior_mean(self, z, t, x_source, generator, labels=None):
        self.calls.append((x_source.clone(), labels))
        return x_source


def test_a_sample_keeps_its_class_at_all_its_levels():
    module = model(WatchedNet(num_classes=3), class_conditional=True, levels=2)
    module.repulsion = Labels()
    train(module, Labelled(), 1)
    samples, labels = module.repulsion.calls[0]
    assert torch.equal(*samples.chunk(2))
    # The first labels of the network are those of the trial.
    assert torch.equal(labels, module.network.labels[1].repeat(2))
