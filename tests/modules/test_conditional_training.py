"""Class-conditional training: labels reach network and estimator, and samples have a class."""

import unicodedata
import warnings
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import KNN, STF, Exact, Network, OneSample
from lit_knn.modules import LitEDM, LitFlow, LitICT, LitMeanFlow, LitSCT
from lit_knn.modules.conditioning import Conditioning
from lit_knn.nets.base import NO_CLASS, name_classes
from lit_knn.reference.classes import classes_of
from tests.short_training import TRAINER, train
from tests.watched import Asked, Labelled, WatchedNet

KINDS = pytest.mark.parametrize("kind", [LitICT, LitSCT, LitEDM, LitFlow, LitMeanFlow])


def watched_net(kind, num_classes):
    """A network that records its inputs; that of a mean flow gets a second time."""
    net = WatchedNet(num_classes=num_classes)
    net.augment_dim = getattr(kind, "time_labels", 0)
    return net


def conditional(kind, estimator, **options):
    """A network that records its inputs, and the conditional model around it."""
    net = watched_net(kind, 3)
    if kind is LitMeanFlow:
        options["tangent"] = Exact()
    return net, kind(net=net, estimator=estimator, class_conditional=True, **options)


@KINDS
def test_network_and_estimator_are_given_the_labels_of_the_batch(kind):
    data, estimator = Labelled(), Asked()
    net, model = conditional(kind, estimator)
    train(model, data, 1)
    two_passes = kind in (LitICT, LitSCT)  # of student and teacher, or of student and derivative
    given = net.labels[-2:] if two_passes else net.labels[-1:]
    assert all(torch.equal(labels, data.labels) for labels in given)
    assert estimator.labels
    assert all(labels == data.labels.tolist() for labels in estimator.labels)


class NeedsLabels(WatchedNet):
    """A network that cannot run without labels, and that counts the items without a class."""

    augment_dim, without = 0, 0

    def forward(self, z_scaled, noise_label, class_label, augment_label=None):
        assert class_label.shape == (len(z_scaled),)
        assert class_label.dtype == torch.int64
        self.without += int((class_label == NO_CLASS).sum())
        return super().forward(z_scaled, noise_label, class_label, augment_label)


@pytest.mark.parametrize("kind", [LitICT, LitEDM, LitFlow, LitMeanFlow])
def test_a_network_with_classes_always_gets_labels(kind):
    net, data = NeedsLabels(num_classes=3), Labelled()
    net.augment_dim = 8 * (kind is LitMeanFlow)
    options = {} if kind is LitICT else {"label_dropout": 0.5}
    model = kind(net, OneSample(), class_conditional=True, **options)
    train(model, data, 1, limit_val_batches=1)
    dropped = net.without - 1  # the trial before the training
    assert dropped == 0 if kind is LitICT else 10 < dropped < 50
    sampler, z = model.generative_model(), torch.zeros(5, 1, 4, 4)
    net.without = 0
    sampler(z, 0.5)
    assert net.without == 5
    sampler.sample(range(5), 1, class_label=2)
    assert net.without == 5
    if kind in (LitEDM, LitFlow):
        for guidance, count in ((2.0, 5), (0.0, 5)):
            net.without = 0
            sampler.sample(range(5), 1, class_label=2, guidance=guidance)
            assert net.without == count
        Network(sampler.eval()).posterior_mean(z, 1.0)
        assert net.without == 10


def test_a_network_without_classes_gets_no_labels():
    net = WatchedNet()
    train(LitEDM(net, OneSample()), Labelled(), 1)
    assert net.labels == [None, None]


@pytest.mark.parametrize(
    ("kind", "more"),
    [(LitEDM, {}), (LitMeanFlow, {"tangent": OneSample()})],
    ids=["EDM", "MeanFlow"],
)
@pytest.mark.parametrize("by_class", [True, False])
def test_targets_error_is_against_exact_mean_of_its_class(by_class, kind, more):
    def target_mse(estimator, **options):
        net = watched_net(kind, 3 if by_class else 0)
        options |= more
        model = kind(net, estimator, class_conditional=by_class, **options)
        return train(model, Labelled(), 1, limit_val_batches=1).callback_metrics.get(
            "val/target_mse"
        )

    assert target_mse(Exact()) < 1e-12
    assert 0 < target_mse(STF(n=16)) < target_mse(OneSample())
    assert target_mse(Exact(), measure_target=False) is None


def test_estimator_is_bound_to_classes_for_training_alone():
    data, (_, model) = Labelled(), conditional(LitEDM, KNN(k=8, n=4))
    train(model, data, 1)
    assert not data.reference.index_built
    assert all(classes_of(data.reference)[c].index_built for c in range(3))
    with pytest.raises(InputError, match="labels missing"):
        model.estimator.posterior_mean(data.x, 1.0)
    data, (_, model) = Labelled(), conditional(LitEDM, KNN(k=800, n=4))
    data.predict_dataloader = lambda: torch.utils.data.DataLoader(range(3))
    pl.Trainer(**TRAINER).predict(model, data)


@KINDS
def test_samples_have_the_class_of_their_seed_or_the_chosen_one(kind):
    def classes(seeds, **options):
        net, model = conditional(kind, OneSample(), **options)
        model.image_shape = (1, 4, 4)
        model.sample(seeds, num_steps=2)
        assert all(torch.equal(labels, net.labels[0]) for labels in net.labels)
        return net.labels[0]

    drawn = classes(range(300))
    assert torch.equal(classes([7, 234]), drawn[[7, 234]])
    # Uniform over three classes: 100 ± 8.2 each.
    assert (drawn.bincount(minlength=3) - 100).abs().max() < 40
    for chosen in (0, 2):
        assert classes([7, 234], sampling_class=chosen).tolist() == [chosen, chosen]


NUMBERED = ["01", "1", "1e3", "null", "two words"]
ACCENTED = unicodedata.normalize("NFD", "café")


@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        (NUMBERED, "1", 1),
        (NUMBERED, 1, 1),
        (NUMBERED, "01", 0),
        (NUMBERED, "1e3", 2),
        (NUMBERED, "'null'", 3),
        (NUMBERED, "two words", 4),
        (["a", "b", "c"], "1", 1),
        (["a", "b", "'b'"], "'b'", 2),
        (["a", "b", ACCENTED], "café", 2),
    ],
)
def test_an_exact_name_wins_over_a_number(names, text, expected):
    net = SimpleNamespace(num_classes=len(names))
    conditioning = Conditioning(net, class_conditional=True, sampling_class=text)
    name_classes(net, names)
    assert conditioning.chosen_class() == expected


@pytest.mark.parametrize(
    ("names", "text", "words"),
    [
        (NUMBERED, "2", "sampling_class='2' is no class"),
        (NUMBERED, "1_000", "sampling_class='1_000' is no class"),
        (["001", "010"], 10, r"sampling_class='10' is no class; did you mean 010\?"),
        (["a", "b"], "2", "sampling_class=2, .*: give a number from 0 to 1"),
        (["a", "b"], "true", "sampling_class='true' is no class"),
    ],
)
def test_a_text_that_is_no_name_is_no_other_class(names, text, words):
    net = SimpleNamespace(num_classes=len(names))
    name_classes(net, names)
    with pytest.raises(InputError, match=words):
        Conditioning(net, class_conditional=True, sampling_class=text).chosen_class()


def test_a_name_that_the_command_line_hides_is_told():
    data = Labelled(class_names=["a", "b", "None"])
    for chosen, count in ((None, 1), ("a", 0)):
        net = WatchedNet(num_classes=3)
        model = LitEDM(net, OneSample(), class_conditional=True, sampling_class=chosen)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(model, data, 1)
        assert (
            sum(
                "the class None is --model.sampling_class \"'None'\"" in str(w.message)
                for w in told
            )
            == count
        )
