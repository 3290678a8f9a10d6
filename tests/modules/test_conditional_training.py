"""Class-conditional training: labels reach network and estimator, and samples have a class."""

from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import KNN, STF, Exact, OneSample
from lit_knn.modules import LitEDM, LitFlow, LitICT, LitMeanFlow
from lit_knn.modules.conditioning import Conditioning
from lit_knn.nets.base import name_classes
from lit_knn.reference.classes import classes_of
from tests.short_training import TRAINER, train
from tests.watched import Asked, Labelled, WatchedNet

KINDS = pytest.mark.parametrize("kind", [LitICT, LitEDM, LitFlow, LitMeanFlow])


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
    return net, kind(net, estimator, class_conditional=True, **options)


@KINDS
def test_network_and_estimator_are_given_the_labels_of_the_batch(kind):
    data, estimator = Labelled(), Asked()
    net, model = conditional(kind, estimator)
    train(model, data, 1)
    given = net.labels[-2:] if kind is LitICT else net.labels[-1:]  # student and teacher
    assert all(torch.equal(labels, data.labels) for labels in given)
    assert estimator.labels
    assert all(labels == data.labels.tolist() for labels in estimator.labels)


@pytest.mark.parametrize(
    ("kind", "more"),
    [(LitEDM, {}), (LitMeanFlow, {"tangent": OneSample()})],
    ids=["EDM", "MeanFlow"],
)
@pytest.mark.parametrize("by_class", [True, False])
def test_the_targets_error_is_against_the_exact_mean_of_its_class(by_class, kind, more):
    def target_mse(estimator, **options):
        net = watched_net(kind, 3 if by_class else 0)
        options |= more
        model = kind(net, estimator, class_conditional=by_class, **options)
        return train(model, Labelled(), 1, limit_val_batches=1).callback_metrics.get("val/target_mse")

    assert target_mse(Exact()) < 1e-12
    assert 0 < target_mse(STF(n=16)) < target_mse(OneSample())
    assert target_mse(Exact(), measure_target=False) is None


def test_the_estimator_is_bound_to_the_classes_before_training_and_not_for_sampling():
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


def test_a_number_that_is_the_name_of_a_class_chooses_this_class():
    net, names = SimpleNamespace(num_classes=12), sorted(map(str, range(1, 13)))  # as folders sort: 1, 10, 11, 12, 2
    chosen = [Conditioning(net, class_conditional=True, sampling_class=number) for number in (10, 12, 0)]
    name_classes(net, names)
    assert [one.chosen_class() for one in chosen[:2]] == [1, 3]
    with pytest.raises(InputError, match="sampling_class='0' is no class"):
        chosen[2].chosen_class()
    name_classes(net, [f"{int(name):03}" for name in names])
    assert chosen[0].chosen_class() == 1
