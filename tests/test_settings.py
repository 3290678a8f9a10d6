"""The description of an object's settings, by which stored results are recognised."""

import copy

import pytest
import torch
from torch import nn

from lit_knn.estimators import KNN, Adaptive, Estimator, SubspaceKNN
from lit_knn.index import FaissIndex
from lit_knn.settings import describe, fingerprint


class Own(Estimator):
    """A user's estimator; it stores its options under any names."""

    def __init__(self, k=10, width=0.5, net=None, hook=None, inner=None, levels=()):
        self._k = k
        self.wide = 2 * width
        self._rest = net, hook, inner, levels

    def _posterior_mean(self, z, t, x_source, generator):
        return z / self._k


def same(a, b):
    return fingerprint(describe(a)) == fingerprint(describe(b))


def test_options_kept_in_private_attributes_count():
    assert same(Own(), Own(k=10))
    assert not same(Own(k=10), Own(k=1000))
    assert not same(Own(width=0.5), Own(width=0.25))
    assert same(Own(10, 0.5), Own(width=0.5, k=10))


def test_own_classes_of_equal_names_are_told_apart():
    assert not same(KNN(8, 4), type("KNN", (KNN,), {})(8, 4))


def test_weights_tensors_estimators_and_lists_count():
    nets = [nn.Linear(2, 2) for _ in range(2)]
    assert same(Own(net=nets[0]), Own(net=copy.deepcopy(nets[0])))
    assert not same(Own(net=nets[0]), Own(net=nets[1]))
    assert same(Own(net=torch.arange(3)), Own(net=torch.arange(3)))
    assert not same(Own(net=torch.arange(3)), Own(net=torch.arange(1, 4)))
    assert same(Own(inner=KNN(8)), Own(inner=KNN(8)))
    assert not same(Own(inner=KNN(8)), Own(inner=KNN(9)))
    assert not same(Own(levels=[1.0, 2.0]), Own(levels=[1.0, 3.0]))
    assert not same(Own(inner={"a": KNN(8)}), Own(inner={"a": KNN(9)}))


def test_what_cannot_be_told_is_never_taken_for_anything_else():
    def hook():
        pass

    for untold in (hook, object(), {1, 2}):
        assert not same(Own(hook=untold), Own(hook=untold))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_tells_the_same(copied):
    for made in (Own(k=3), KNN(8, 4), Adaptive(SubspaceKNN(n=8), 1e-3), FaissIndex("SQ8")):
        assert same(made, copied(made))


def test_an_index_tells_its_settings():
    assert not same(FaissIndex("Flat"), FaissIndex("SQ8"))
    assert not same(FaissIndex("IVF8,Flat", 1), FaissIndex("IVF8,Flat", 2))


def test_a_wrong_argument_is_still_reported_by_the_constructor():
    with pytest.raises(TypeError, match="no_such_option"):
        KNN(no_such_option=1)
