"""The description of an object's settings, by which stored results are recognised."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lit_knn.common.settings import describe, fingerprint
from lit_knn.estimators import KNN, Estimator, Smoothed, SubspaceKNN
from lit_knn.index import FaissIndex


class Own(Estimator):
    """A user's estimator; it stores its options under any names."""

    def __init__(self, k=10, width=0.5, hook=None):
        self._k = k
        self.wide = 2 * width
        self.kept = hook

    def _posterior_mean(self, z, t, x_source, generator):
        return z / self._k


class Scale(nn.Module):
    """A module whose attributes, no parameters, decide what it computes."""

    def __init__(self, factor=1.0, mode="plain", buffer=0.0):
        super().__init__()
        self.factor, self._mode = factor, mode
        self.register_buffer("buffer", torch.tensor(buffer), persistent=False)


def same(a, b):
    return fingerprint(describe(a)) == fingerprint(describe(b))


def test_options_kept_in_private_attributes_count():
    assert same(Own(10, 0.5), Own(width=0.5, k=10))
    assert same(Own(), Own(k=10))
    assert not same(Own(k=10), Own(k=1000))
    assert not same(Own(width=0.5), Own(width=0.25))
    # Classes of equal names are told apart.
    assert not same(KNN(8, 4), type("KNN", (KNN,), {})(8, 4))


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (nn.Linear(2, 2), nn.Linear(2, 2)),
        (nn.Sequential(Scale()), nn.Sequential(Scale(factor=2.0))),
        (nn.Sequential(Scale()), nn.Sequential(Scale(mode="other"))),
        (nn.Sequential(Scale()), nn.Sequential(Scale(buffer=3.0))),
        (torch.arange(3), torch.arange(1, 4)),
        (torch.ones(2, dtype=torch.cfloat).conj(), torch.zeros(2, dtype=torch.cfloat)),
        (KNN(8), KNN(9)),
        ({"a": KNN(8)}, {"a": KNN(9)}),
        ({1: "a", "1": "b"}, {1: "c", "1": "b"}),
        ({1: "a"}, {"1": "a"}),
        ([1.0, 2.0], [1.0, 3.0]),
        (Path("a"), Path("b")),
        (torch.float32, torch.float64),
        (torch.device("cpu"), torch.device("cuda", 1)),
        (same, copy.copy),
        (nn.ReLU, nn.GELU),
    ],
)
def test_usual_kinds_of_options_are_known_again(value, other):
    assert same(Own(hook=value), Own(hook=copy.deepcopy(value)))
    assert not same(Own(hook=value), Own(hook=other))


def test_values_of_equal_bytes_and_of_equal_text_are_told_apart():
    values = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), 1, 1.0, True, "1", "True", "None"]
    values += [None, [1], [1.0], {}, [], [["mapping", []]], {"mapping": []}]
    for i, one in enumerate(values):
        assert [same(Own(hook=one), Own(hook=other)) for other in values] == [j == i for j in range(len(values))]


def test_what_cannot_be_told_is_never_taken_for_anything_else():
    def hook():
        pass

    for untold in (hook, object(), {1, 2}, np.arange(3)):
        assert not same(Own(hook=untold), Own(hook=untold))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_tells_the_same(copied):
    for made in (Own(k=3), KNN(8, 4), Smoothed(SubspaceKNN(n=8), 1e-3), FaissIndex("SQ8")):
        assert same(made, copied(made))


class OfItsClass(Own):
    """Attributes of the class, and one that holds less, have the names of the arguments."""

    k = 10

    def __init__(self, k=10, levels=(), deterministic=True):
        super().__init__()
        self._kept, self._said = k, deterministic
        self.levels = len(levels)
        self._first = levels.pop(0) if isinstance(levels, list) else None


def test_arguments_count_whatever_attributes_have_their_names():
    assert same(OfItsClass(), OfItsClass(10))
    assert not same(OfItsClass(k=10), OfItsClass(k=20))
    assert not same(OfItsClass(deterministic=False), OfItsClass(deterministic=True))
    assert not same(OfItsClass(levels=(1, 2)), OfItsClass(levels=(1, 3)))
    assert not same(OfItsClass(levels=[1, 2]), OfItsClass(levels=[3, 2]))


class FromFile(Own):
    """A network that is read from a file, which another training may overwrite."""

    def __init__(self, path):
        super().__init__()
        self.network = torch.load(path, weights_only=False)


def test_a_network_that_an_estimator_reads_itself_counts(tmp_path):
    made = []
    for net in (nn.Linear(2, 2), nn.Linear(2, 2)):
        torch.save(net, tmp_path / "net.pt")
        made += [FromFile(tmp_path / "net.pt"), FromFile(tmp_path / "net.pt")]
    assert [same(made[0], other) for other in made] == [True, True, False, False]
