"""The description of an object's settings, by which stored results are recognised."""

import copy
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lit_knn.common.settings import describe, fingerprint
from lit_knn.estimators import KNN, Estimator, Smoothed, SubspaceKNN
from lit_knn.index import FaissIndex


class Own(Estimator):
    """A user's estimator; it stores its options under any names, and reads a network from a file."""

    k = 10

    def __init__(self, k=10, width=0.5, hook=None, levels=(), path=None):
        self._k, self.wide, self.kept = k, 2 * width, hook
        self.levels = len(levels)
        self._first = levels.pop(0) if isinstance(levels, list) else None
        self.network = None if path is None else torch.load(path, weights_only=False)

    def _posterior_mean(self, z, t, x_source, generator):
        return z / self._k


def same(a, b):
    return fingerprint(describe(a)) == fingerprint(describe(b))


def test_arguments_count_whatever_attributes_keep_of_them():
    assert same(Own(10, 0.5), Own(width=0.5, k=10))
    assert same(Own(), Own(k=10))
    for other in (Own(k=1000), Own(width=0.25), Own(levels=(1, 3))):
        assert not same(Own(levels=(1, 2)) if other.levels else Own(), other)
    assert not same(Own(levels=[1, 2]), Own(levels=[3, 2]))
    # Classes of equal names are told apart.
    assert not same(KNN(8, 4), type("KNN", (KNN,), {})(8, 4))


def test_equal_options_are_known_again_and_others_are_told_apart():
    """tests/common/test_files.py has more values, which are equal in Python."""
    shifted = nn.BatchNorm1d(2)
    shifted.running_mean += 1
    for value, other in (
        (nn.BatchNorm1d(2), shifted),
        ({"a": KNN(8)}, {"a": KNN(9)}),
        ({1: "a"}, {"1": "a"}),
        (Path("a"), Path("b")),
        (torch.device("cpu"), torch.device("cuda", 1)),
        (same, copy.copy),
        (nn.ReLU, nn.GELU),
    ):
        assert same(Own(hook=value), Own(hook=copy.deepcopy(value)))
        assert not same(Own(hook=value), Own(hook=other))


def test_what_cannot_be_told_is_never_taken_for_anything_else():
    for untold in (lambda: None, object(), {1, 2}, np.arange(3)):
        assert not same(Own(hook=untold), Own(hook=untold))


def test_a_copy_tells_the_same():
    for made in (Own(k=3), KNN(8, 4), Smoothed(SubspaceKNN(n=8), 1e-3), FaissIndex("SQ8")):
        assert same(made, copy.copy(made))
        assert same(made, copy.deepcopy(made))


def test_a_network_that_an_estimator_reads_itself_counts(tmp_path):
    made, path = [], tmp_path / "net.pt"
    for net in (nn.Linear(2, 2), nn.Linear(2, 2)):  # Another training overwrites the file.
        torch.save(net, path)
        made += [Own(path=path), Own(path=path)]
    assert [same(made[0], other) for other in made] == [True, True, False, False]
