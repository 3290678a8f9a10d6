"""Values and plug-ins at the edge: each is refused with a message that names it, and extremes give the right limits."""

import numpy as np
import pytest
import torch

from lit_knn.estimators import KNN, STF, ByClass, Exact, MonteCarlo, SubspaceKNN, UniformSNIS
from lit_knn.reference import ReferenceSet, ShardedReferenceSet
from tests.image_files import refusal
from tests.toys import pixels

N = 40
ESTIMATORS = {
    "Exact": Exact,
    "KNN": lambda: KNN(10, 400),
    "UniformSNIS": lambda: UniformSNIS(4000),
    "STF": lambda: STF(4000),
    "SubspaceKNN": lambda: SubspaceKNN(6, N),
    "MonteCarlo": lambda: MonteCarlo(4000),
}


@pytest.mark.parametrize("kind", [ReferenceSet, ShardedReferenceSet])
def test_ids_outside_the_set_are_refused(kind):
    reference = kind(pixels(N), hflip=True)
    for bad in (-1, 2 * N, 10**12):
        message = refusal(reference.gather, torch.tensor([[0, 2 * N - 1], [bad, 3]]))
        assert f"between 0 and {2 * N - 1}, got" in message
        assert str(bad) in message


def test_labels_of_a_set_are_integers_from_0():
    for labels in (torch.full((N,), 0.5), np.full(N, -1), np.full(N, 2**64 - 1, np.uint64)):
        assert "labels must be" in refusal(ReferenceSet, pixels(N), labels=labels)
    assert "got (0,) torch.float32" in refusal(ReferenceSet, pixels(N), labels=torch.zeros(0))
    by_class = ByClass(Exact()).bind(ReferenceSet(pixels(N), labels=torch.arange(N) % 2))
    message = refusal(by_class.posterior_mean, torch.zeros(2, 3, 6, 6), 1.0, labels=[0, 1])
    assert "labels must be (2,) int64, got list" in message


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_ends_of_float32_give_the_nearest_image_and_the_mean(name):
    reference = ReferenceSet(pixels(N, (1, 3, 4)))
    x = reference.gather(torch.tensor([3, 11, 30]))
    z, estimator = x + 0.01 * torch.randn(x.shape), ESTIMATORS[name]().bind(reference)
    torch.testing.assert_close(estimator.posterior_mean(z, 2e-38, x), x, atol=1e-5, rtol=0)
    # The mean of all images is estimated from 400 draws at least: the error is below 4σ/√400.
    mean = reference.mean().reshape(1, 3, 4).expand_as(x)
    torch.testing.assert_close(estimator.posterior_mean(z, 3e38, x), mean, atol=0.25, rtol=0)
