"""Values that were taken in silence: ids and labels outside their range, sources that are no clean images, extremes."""

import math

import numpy as np
import pytest
import torch

from lit_knn.estimators import KNN, STF, Exact, MonteCarlo, OneSample, SubspaceKNN, UniformSNIS, Wiener
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


def references():
    """The same images, whole and as the only shard."""
    return [ReferenceSet(pixels(N), hflip=True), ShardedReferenceSet(pixels(N), hflip=True)]


@pytest.mark.parametrize("bad", [-1, 2 * N, 10**12, -(10**12)])
def test_ids_outside_the_set_are_refused(bad):
    for reference in references():
        message = refusal(reference.gather, torch.tensor([[0, 2 * N - 1], [bad, 3]]))
        assert f"between 0 and {2 * N - 1}, got" in message
        assert str(bad) in message


@pytest.mark.parametrize(
    "labels",
    [
        torch.full((N,), 0.5),
        np.full(N, 3.0),
        np.full(N, -1),
        np.full(N, 2**63, np.uint64),
        np.full(N, 2**64 - 1, np.uint64),
    ],
)
def test_labels_of_a_set_are_integers_from_0(labels):
    assert "labels must be" in refusal(ReferenceSet, pixels(N), labels=labels)


def test_a_source_is_a_clean_image_in_model_space():
    x = pixels(3)
    z = x.float() / 127.5 - 1
    for estimator in (OneSample(), STF(4).bind(ReferenceSet(pixels(N)))):
        assert "x_source must be float, in model space, got torch.uint8" in refusal(
            estimator.posterior_mean, z, 1.0, x_source=x
        )
        for value in (math.nan, math.inf, -math.inf):
            bad = z.clone()
            bad[1, 0, 2, 3] = value
            assert "x_source holds a value that is not finite" in refusal(
                estimator.posterior_mean, z, 1.0, x_source=bad
            )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_ends_of_float32_give_the_nearest_image_and_the_mean(name):
    reference = ReferenceSet(pixels(N, (1, 3, 4)))
    x = reference.gather(torch.tensor([3, 11, 30]))
    z, estimator = x + 0.01 * torch.randn(x.shape), ESTIMATORS[name]().bind(reference)
    torch.testing.assert_close(estimator.posterior_mean(z, 2e-38, x), x, atol=1e-5, rtol=0)
    # The mean of all images is estimated from 400 draws at least: the error is below 4σ/√400.
    mean = reference.mean().reshape(1, 3, 4).expand_as(x)
    torch.testing.assert_close(estimator.posterior_mean(z, 3e38, x), mean, atol=0.25, rtol=0)


@pytest.mark.parametrize("name", [*ESTIMATORS, "Wiener"])
@pytest.mark.parametrize(
    ("z", "t"),
    [(1.0, 1e-200), (1.0, 1e-39), (1.0, 1e39), (1e19, 1.0), (-3e19, 1e19), (1e16, 1.0), (3e38, 3e38)],
)
def test_what_float32_cannot_hold_is_refused_with_its_value(name, z, t):
    reference = ReferenceSet(pixels(N, (1, 3, 4)))
    estimator = {**ESTIMATORS, "Wiener": lambda: Wiener(4)}[name]().bind(reference)
    latents = torch.zeros(3, 1, 3, 4)
    latents[1, 0, 1, 2] = z
    message = refusal(estimator.posterior_mean, latents, torch.tensor([1.0, t, 1.0], dtype=torch.float64))
    assert f"z holds {abs(z):.3g}" in message or f"got {t}" in message
    if hasattr(estimator, "certified_mean"):
        refusal(estimator.certified_mean, latents, t)


def test_images_whose_squares_float32_cannot_hold_are_refused():
    for value in (1e16, -1e19, 3e38):
        assert f"{abs(value):.3g}" in refusal(ReferenceSet, torch.tensor([[0.0, 1.0], [value, 0.0]]))
    ReferenceSet(torch.tensor([[0.0, 1.0], [1e15, 0.0]]))
