"""Properties of estimators over data of any shape, type, size and noise level."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_knn.estimators import (
    KNN,
    STF,
    Exact,
    MonteCarlo,
    OneSample,
    SubspaceKNN,
    UniformSNIS,
    Wiener,
)
from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.theory.proposal import dense_log_q
from tests.any_data import all_images, enumerated_mean, log_posterior, problems, tolerance
from tests.toys import rng


@given(problems())
def test_exact_means_are_the_enumerated_ones(problem):
    reference, z, t, _ = problem
    expected, most = enumerated_mean(reference, z, t), tolerance(reference)
    N, d = reference.N, reference.d
    for estimator in (Exact(), SubspaceKNN(min(N, d), N, "float32")):
        mean = estimator.bind(reference).posterior_mean(z, t, generator=rng())
        torch.testing.assert_close(
            mean.double(), expected, atol=most, rtol=0, msg=lambda m, e=estimator: f"{e}: {m}"
        )
    q = dense_log_q(KNN(N, 1).bind(reference).proposal(z.double(), t)).exp()
    torch.testing.assert_close(q.sum(1), torch.ones(len(z), dtype=torch.float64))
    # All neighbours make the proposal the posterior. A search rounds the distances beyond the 16 nearest images.
    if N <= 16:
        torch.testing.assert_close(q, log_posterior(reference, z, t).exp(), atol=1e-4, rtol=0)


@given(problems(), st.data())
def test_sampled_means_are_finite_repeatable_and_in_the_hull(problem, data):
    reference, z, t, source = problem
    k, n = (data.draw(st.integers(1, reference.N)) for _ in range(2))
    r = data.draw(st.integers(1, min(reference.N, reference.d)))
    x, most = all_images(reference), tolerance(reference)
    low, high = x.amin(0) - most, x.amax(0) + most
    # The means of weighted images are convex combinations.
    weighted = [KNN(k, n), UniformSNIS(n), STF(n), MonteCarlo(n), KNN(k, n, include_source=True)]
    for estimator in [*weighted, SubspaceKNN(r, n, "float32"), Wiener(r), OneSample()]:
        mean = estimator.bind(reference).posterior_mean(z, t, source, rng(1))
        assert mean.shape == z.shape
        assert mean.isfinite().all(), estimator
        assert torch.equal(mean, estimator.posterior_mean(z, t, source, rng(1))), estimator
        if estimator in weighted:
            assert ((low <= mean) & (mean <= high)).all(), estimator
        if hasattr(estimator, "certified_mean"):
            certificate = estimator.certified_mean(z, t, source, rng(1))
            assert torch.equal(certificate.mean, mean), estimator
            assert (certificate.sq_error >= 0).all(), estimator
            assert (certificate.largest_weight <= 1 + 1e-9).all(), estimator
            assert (certificate.effective_sample_size >= 1 - 1e-9).all(), estimator


@pytest.mark.parametrize(("least", "most"), [(-129, 127), (-128, 128), (-300, 400), (-127, 127)])
def test_floats_on_the_grid_of_pixels_but_beyond_it_do_not_wrap(least, most):
    # Pixel p is the code p − 128, so that float data may have the steps of pixels and codes beyond 8 bits.
    steps = torch.tensor([[least, 0.0], [most, 5.0], [1.0, -3.0]]) + 0.5
    x = steps / 127.5
    sq_dist, found = ReferenceSet(x, TorchIndex("float32")).search(x, 1)
    # Codes of 8 bits are half a step off at most, in each of two dimensions.
    assert sq_dist.max() <= 2 * (x.abs().max() / 127 / 2 * 1.01) ** 2
    assert found[:, 0].tolist() == [0, 1, 2]
