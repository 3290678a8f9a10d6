"""Classifier-free guidance: against enumerated densities; training with dropped labels; samples; files; bad input."""

import pytest
import pytorch_lightning as pl
import torch

from lit_knn import load
from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, class_conditional
from lit_knn.modules import LitEDM, LitFlow
from lit_knn.modules.conditioning import Conditioning
from lit_knn.nets import UNet
from lit_knn.nets.base import NO_CLASS
from lit_knn.nets.flow import VelocityOutput
from lit_knn.nets.precond import EDMPrecond
from lit_knn.reference import ReferenceSet
from lit_knn.sampling import DiffusionModel, FlowModel
from lit_knn.sampling.building import build
from lit_knn.sampling.flow_times import TimeSpan
from lit_knn.sampling.guidance import guided
from lit_knn.sampling.samplers import heun_sampler, seeded_noise
from tests.short_training import TRAINER, train
from tests.toys import enumerate_class_mean
from tests.watched import Labelled, WatchedNet, undone


def small_unet():
    """A network whose weights use all inputs; some layers begin as zeros."""
    net, generator = (
        UNet(1, channels=8, multipliers=(1, 2), blocks=1, num_classes=3),
        torch.Generator().manual_seed(0),
    )
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return net.eval()


def diffusion(**options):
    return DiffusionModel(EDMPrecond(small_unet()), (1, 4, 4), num_steps=3, **options)


def flow(**options):
    return FlowModel(
        VelocityOutput(small_unet()), (1, 4, 4), TimeSpan(1e-3, 0.999), num_steps=3, **options
    )


@pytest.mark.parametrize("w", [0.0, 1.0, 2.5])
def test_guided_score_is_gradient_of_guided_log_density(w):
    data = Labelled()
    z, t = (
        torch.randn(7, 1, 4, 4, dtype=torch.float64),
        torch.linspace(0.5, 4, 7, dtype=torch.float64),
    )
    labels = torch.arange(7) % 3
    by_class, whole = class_conditional(Exact()).bind(data.reference), Exact().bind(data.reference)
    mean = guided(
        lambda z, t: by_class.posterior_mean(z, t, labels=labels), whole.posterior_mean, w
    )(z, t)
    score = (mean - z) / t.reshape(-1, 1, 1, 1) ** 2

    wanted = z.clone().requires_grad_()
    x = data.reference.gather(torch.arange(60)).flatten(1).double()
    log_p = -torch.cdist(wanted.flatten(1), x).square() / (2 * t[:, None] ** 2)
    own = log_p.masked_fill(data.labels != labels[:, None], -torch.inf).logsumexp(1)
    unconditional = log_p.logsumexp(1)
    (unconditional + w * (own - unconditional)).sum().backward()
    torch.testing.assert_close(score, wanted.grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("make", [diffusion, flow])
def test_w_1_is_conditional_and_w_0_unconditional_bit_for_bit(
    make,
):
    model, seeds, labels = make(), range(4), torch.tensor([0, 2, 1, 1])
    own = model.sample(seeds, class_label=labels)
    assert torch.equal(model.sample(seeds, class_label=labels, guidance=1), own)
    without = model.sample(seeds, class_label=labels, guidance=0)
    assert torch.equal(without, model.sample(seeds, class_label=[2, 2, 0, 0], guidance=0))
    if make is diffusion:
        assert torch.equal(without, heun_sampler(model.network, seeded_noise(seeds, (1, 4, 4)), 3))
    guided_twice = model.sample(seeds, class_label=labels, guidance=2)
    assert not torch.allclose(guided_twice, own)
    # A file keeps the guidance.
    given = make(guidance=2)
    for keeps in (given, build(given.description(), given.net.state_dict())):
        assert torch.equal(keeps.sample(seeds, class_label=labels), guided_twice)
        assert torch.equal(keeps.sample(seeds, class_label=labels, guidance=0), without)
    assert "guidance" not in model.options()
    with pytest.raises(
        InputError, match="class_label=3, but the net has num_classes=3: give a number from 0 to 2"
    ):
        model.sample(seeds, class_label=[0, 3, 1, 1])
    assert torch.equal(make(sampling_class=0).sample(seeds, class_label=labels), own)
    z, t = torch.randn(4, 1, 4, 4), torch.full((4,), 0.3)
    none, conditional = model(z, t), model(z, t, labels)
    mixed = model.guided_network(labels, 2.0)(z, t)
    torch.testing.assert_close(mixed, 2 * conditional - none)
    assert not torch.allclose(mixed, conditional)


def test_labels_are_dropped_as_often_as_asked_and_reproducibly():
    conditioning = Conditioning(WatchedNet(num_classes=3), True, None, label_dropout=0.2)
    labels = torch.arange(40_000) % 3
    dropped = conditioning.dropped(labels, 1, 2)
    # Four standard deviations of a share of 40,000 draws.
    assert abs((dropped == NO_CLASS).float().mean() - 0.2) < 4 * (0.2 * 0.8 / 40_000) ** 0.5
    kept = dropped != NO_CLASS
    assert torch.equal(dropped[kept], labels[kept])
    assert torch.equal(conditioning.dropped(labels, 1, 2), dropped)
    assert not torch.equal(conditioning.dropped(labels, 1, 3), dropped)
    assert conditioning.dropped(None, 1, 2) is None


def test_target_of_item_without_class_is_mean_over_all_images():
    data, net, losses = Labelled(), WatchedNet(num_classes=3), []
    model = LitEDM(net, Exact(), class_conditional=True, label_dropout=0.5)
    model.objective = lambda loss, x: losses.append(loss.detach()) or loss.mean()
    train(model, data, 1, limit_val_batches=1)
    labels, labels_of_validation = net.labels[-2:]
    assert torch.equal(labels_of_validation, data.labels)
    z, level = undone(net.calls[-2])
    sigma, unlabelled = level.flatten(), labels == NO_CLASS
    assert torch.equal(labels[~unlabelled], data.labels[~unlabelled])
    denoised = 0.25 / (level**2 + 0.25) * z + 0.5 * level / (level**2 + 0.25).sqrt() * 0.3
    every = ReferenceSet(data.x, labels=torch.zeros(60, dtype=torch.int64))
    whole = enumerate_class_mean(every, z, sigma, torch.zeros(60, dtype=torch.int64))
    own = enumerate_class_mean(data.reference, z, sigma, data.labels)
    target = torch.where(unlabelled.reshape(-1, 1, 1, 1), whole, own)
    # At large noise levels the two means differ.
    assert 15 < unlabelled.sum() < 45
    assert (whole - own)[sigma > 1].abs().max() > 0.1
    expected = (
        (sigma**2 + 0.25) / (sigma * 0.5) ** 2 * (denoised - target).square().flatten(1).mean(1)
    )
    torch.testing.assert_close(losses[0].double(), expected, rtol=1e-3, atol=1e-4)


def test_the_trainings_of_a_checkpoint_decide_over_its_guidance(tmp_path):
    def module(**options):
        return LitEDM(small_unet(), Exact(), class_conditional=True, sampling_steps=2, **options)

    def go_on(model, checkpoint, steps, name):
        trainer = pl.Trainer(max_steps=steps, enable_checkpointing=False, **TRAINER)
        trainer.fit(model, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / name)
        return tmp_path / name

    data, guided_module = Labelled(), {"label_dropout": 0.5, "guidance": 2.0}
    never = go_on(module(), None, 1, "never.ckpt")
    with pytest.raises(
        InputError, match=r"guidance=2\.0 needs a network that was trained without classes, too"
    ):
        pl.Trainer(**{**TRAINER, "limit_val_batches": 1}).validate(
            module(**guided_module), data, ckpt_path=never
        )
    later = go_on(module(**guided_module), never, 2, "later.ckpt")
    # The network still knows what it learnt without classes.
    again = go_on(module(), later, 3, "again.ckpt")
    for checkpoint in (later, again):
        assert load(checkpoint).sample([0], guidance=3.0).isfinite().all()
    assert load(never).sample([0], guidance=1).isfinite().all()
    for weight in (0, 3.0):
        with pytest.raises(InputError, match=f"guidance={weight} needs"):
            load(never).sample([0], guidance=weight)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label_dropout": 1.0}, "label_dropout must be at least 0 and below 1, got 1.0"),
        (
            {"label_dropout": 0.1, "class_conditional": False},
            "label_dropout=0.1, but class_conditional is false",
        ),
        (
            {"guidance": 2.0},
            r"guidance=2.0 needs a network that was trained without classes, too \(label_dropout\)",
        ),
        (
            {"guidance": -1.0, "label_dropout": 0.1},
            "guidance must be at least 0 and finite, got -1.0",
        ),
        (
            {"guidance": 2.0, "class_conditional": False},
            "guidance=2.0 needs a class-conditional network",
        ),
    ],
)
@pytest.mark.parametrize("kind", [LitEDM, LitFlow])
def test_options_that_do_not_fit_are_refused(kind, options, words):
    conditional = options.get("class_conditional", True)
    with pytest.raises(InputError, match=f"^{kind.__name__}: {words}"):
        kind(
            WatchedNet(num_classes=3 if conditional else 0),
            Exact(),
            **{"class_conditional": conditional, **options},
        )
