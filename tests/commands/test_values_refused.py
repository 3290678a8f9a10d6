"""Values and plug-ins at the edge: each is refused with a message that names it, and extremes give the right limits."""

import math

import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.data import ReferenceDataModule
from lit_knn.estimators import KNN, STF, Estimator, Exact, MonteCarlo, OneSample, SubspaceKNN, UniformSNIS, Wiener
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


def test_labels_and_images_of_a_set_are_numbers_that_it_can_hold():
    for labels in (torch.full((N,), 0.5), np.full(N, -1), np.full(N, 2**64 - 1, np.uint64)):
        assert "labels must be" in refusal(ReferenceSet, pixels(N), labels=labels)
    # float32 cannot hold the squares of these.
    for value in (1e16, -1e19, 3e38):
        assert f"{abs(value):.3g}" in refusal(ReferenceSet, torch.tensor([[0.0, 1.0], [value, 0.0]]))
    ReferenceSet(torch.tensor([[0.0, 1.0], [1e15, 0.0]]))


def test_a_source_is_a_clean_image_in_model_space():
    x = pixels(3)
    z = x.float() / 127.5 - 1
    for estimator in (OneSample(), STF(4).bind(ReferenceSet(pixels(N)))):
        said = refusal(estimator.posterior_mean, z, 1.0, x_source=x)
        assert "x_source must be float, in model space, got torch.uint8" in said
        for value in (math.nan, -math.inf):
            bad = z.clone()
            bad[1, 0, 2, 3] = value
            said = refusal(estimator.posterior_mean, z, 1.0, x_source=bad)
            assert "x_source holds a value that is not finite" in said


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
def test_what_float32_cannot_hold_is_refused_with_its_value(name):
    reference = ReferenceSet(pixels(N, (1, 3, 4)))
    estimator = {**ESTIMATORS, "Wiener": lambda: Wiener(4)}[name]().bind(reference)
    for z, t in ((1.0, 1e-200), (1.0, 1e-39), (1.0, 1e39), (1e19, 1.0), (-3e19, 1e19), (1e16, 1.0), (3e38, 3e38)):
        latents = torch.zeros(3, 1, 3, 4)
        latents[1, 0, 1, 2] = z
        message = refusal(estimator.posterior_mean, latents, torch.tensor([1.0, t, 1.0], dtype=torch.float64))
        assert f"z holds {abs(z):.3g}" in message or f"got {t}" in message
        if hasattr(estimator, "certified_mean"):
            refusal(estimator.certified_mean, latents, t)


@pytest.mark.parametrize("loaded", [None, (torch.zeros(3, 1),), ([1.0], None)])
def test_a_load_that_gives_no_pair_of_images_and_labels_is_refused(loaded):
    class Data(ReferenceDataModule):
        def load(self):
            return loaded

    with pytest.raises(InputError, match=r"Data\.load must return \(images, labels\)"):
        Data().setup()


class Broken(Estimator):
    needs_reference = False

    def __init__(self, estimate):
        self.estimate = estimate

    def _posterior_mean(self, z, t, x_source, generator):
        return self.estimate(z)


def test_an_estimate_that_is_not_finite_or_runs_out_is_the_fault_of_the_estimator():
    with pytest.raises(InputError, match="Broken: the estimate of the posterior mean is not finite"):
        Broken(lambda z: z / 0).posterior_mean(torch.zeros(1, 2), 1.0)
    # It would look like the end of the data.
    with pytest.raises(RuntimeError, match="Broken raised StopIteration"):
        Broken(lambda z: next(iter(()))).posterior_mean(torch.zeros(1, 2), 1.0)
