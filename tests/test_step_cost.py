"""`fit` tells the time of a step before training, and the run stays the same, bit for bit."""

import random

import pytest
import torch
from torch import nn

from lit_knn.callbacks import StepCost
from lit_knn.edm import LitEDM
from lit_knn.estimators import KNN
from lit_knn.training.augmentation import GeometricAugmentation
from tests.interrupted_runs import assert_same, fit, ict


class Normalised(nn.Module):
    """Has what a try could change: running means, random numbers of PyTorch and Python, dropout."""

    augment_dim = 9

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3, padding=1))

    def forward(self, z, noise_label, class_label=None, augment_label=None):
        shift = torch.rand(()) + random.random()
        return self.net(nn.functional.dropout(z)) + shift


def augmented():
    return LitEDM(Normalised(), KNN(k=16, n=4), lr=1e-2, augmentation=GeometricAugmentation(0.5))


@pytest.mark.parametrize("make", [ict, augmented])
def test_a_run_with_a_try_is_the_run_without_one(make, tmp_path, capsys):
    paths = []
    for name, callbacks in (("without", []), ("with", [StepCost()])):
        random.seed(0)
        model = make()
        torch.manual_seed(1)
        paths.append(fit(tmp_path / name, model, 3, accumulate_grad_batches=2, callbacks=callbacks)[1])
        told = "steps about" in capsys.readouterr().out
        assert told == (name == "with")
    assert_same(*paths)
    rows = [(path.parents[1] / "metrics.csv").read_text().splitlines()[0] for path in paths]
    assert rows[0] == rows[1]
