"""Properties of estimators, proposals and draws over data of any shape, type, size and noise level."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_knn.estimators import KNN, STF, Exact, MonteCarlo, OneSample, SubspaceKNN, UniformSNIS, Wiener
from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.theory.proposal import dense_log_q, neighbour_proposal, sample_proposal
from tests.any_data import all_images, enumerated_mean, log_posterior, problems, tolerance


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@given(problems())
def test_exact_means_are_the_enumerated_ones(problem):
    reference, z, t, _ = problem
    expected, most = enumerated_mean(reference, z, t), tolerance(reference)
    N, d = reference.N, reference.d
    for estimator in (Exact(), SubspaceKNN(min(N, d), N, "float32")):
        mean = estimator.bind(reference).posterior_mean(z, t, generator=seeded())
        torch.testing.assert_close(mean.double(), expected, atol=most, rtol=0, msg=lambda m, e=estimator: f"{e}: {m}")
    q = dense_log_q(KNN(N, 1).bind(reference).proposal(z.double(), t)).exp()
    torch.testing.assert_close(q.sum(1), torch.ones(len(z), dtype=torch.float64))
    # All neighbours make the proposal the posterior. A search rounds the distances beyond the 16 nearest images.
    if N <= 16:
        torch.testing.assert_close(q, log_posterior(reference, z, t).exp(), atol=1e-4, rtol=0)


@given(problems(), st.data())
def test_sampled_means_are_finite_repeatable_and_among_the_images(problem, data):
    reference, z, t, source = problem
    k, n = (data.draw(st.integers(1, reference.N)) for _ in range(2))
    r = data.draw(st.integers(1, min(reference.N, reference.d)))
    x, most = all_images(reference), tolerance(reference)
    low, high = x.amin(0) - most, x.amax(0) + most
    # The means of weighted images are convex combinations.
    weighted = [KNN(k, n), UniformSNIS(n), STF(n), MonteCarlo(n), KNN(k, n, include_source=True)]
    for estimator in [*weighted, SubspaceKNN(r, n, "float32"), Wiener(r), OneSample()]:
        mean = estimator.bind(reference).posterior_mean(z, t, source, seeded(1))
        assert mean.shape == z.shape
        assert mean.isfinite().all(), estimator
        assert torch.equal(mean, estimator.posterior_mean(z, t, source, seeded(1))), estimator
        if estimator in weighted:
            assert ((low <= mean) & (mean <= high)).all(), estimator
        if hasattr(estimator, "certified_mean"):
            certificate = estimator.certified_mean(z, t, source, seeded(1))
            assert torch.equal(certificate.mean, mean), estimator
            assert (certificate.sq_error >= 0).all(), estimator
            assert (certificate.largest_weight <= 1 + 1e-9).all(), estimator
            assert (certificate.effective_sample_size >= 1 - 1e-9).all(), estimator


@st.composite
def searches(draw):
    """Results of a search: distances and distinct ids, some missing, of any size."""
    B, N = draw(st.integers(1, 3)), draw(st.integers(1, 30))
    k = draw(st.integers(1, N))
    generator = seeded(draw(st.integers(0, 2**31)))
    ids = torch.stack([torch.randperm(N, generator=generator)[:k] for _ in range(B)])
    scale = 10 ** draw(st.floats(-20, 20))
    sq_dist = torch.rand(B, k, generator=generator, dtype=torch.float64) * scale
    if draw(st.booleans()):
        sq_dist = sq_dist[:, :1].expand(B, k).clone()
    missing = torch.rand(B, k, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    t = math.sqrt(scale) * 10 ** draw(st.floats(-3, 3))
    return sq_dist.masked_fill(missing, math.inf), ids.masked_fill(missing, -1), t, N


@given(searches(), st.integers(1, 40))
def test_the_proposal_of_eq_13_is_a_distribution_with_a_flat_tail_that_draws_follow(search, n):
    sq_dist, ids, t, N = search
    proposal = neighbour_proposal(sq_dist, ids, t, N)
    dense = dense_log_q(proposal)
    torch.testing.assert_close(dense.exp().sum(1), torch.ones(len(ids), dtype=torch.float64))
    for q, own, distances in zip(dense.exp(), ids, sq_dist, strict=True):
        found, distances = own[own >= 0], distances[own >= 0]
        tail = q[[i not in found for i in range(N)]]
        assert (tail == tail[:1]).all()
        if len(found) and len(tail):
            # The tail has the likelihood of the farthest neighbour that was found.
            torch.testing.assert_close(tail[0], q[found].min(), rtol=1e-9, atol=0)
        if len(found) > 1 and q[found].min() > 1e-200:
            ratio, (near, far) = q[found].max().log() - q[found].min().log(), distances.aminmax()
            torch.testing.assert_close(ratio, (far - near) / (2 * t * t), rtol=1e-6, atol=1e-6)
    drawn, log_q = sample_proposal(proposal, n, seeded())
    assert drawn.shape == (len(ids), n)
    assert ((drawn >= 0) & (drawn < N)).all()
    assert log_q.isfinite().all()
    torch.testing.assert_close(log_q, dense.gather(1, drawn), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("least", "most"), [(-129, 127), (-128, 128), (-300, 400), (-127, 127)])
def test_floats_on_the_grid_of_pixels_but_beyond_it_do_not_wrap(least, most):
    # Pixel p is the code p − 128, so that float data may have the steps of pixels and codes beyond 8 bits.
    steps = torch.tensor([[least, 0.0], [most, 5.0], [1.0, -3.0]]) + 0.5
    x = steps / 127.5
    sq_dist, found = ReferenceSet(x, TorchIndex("float32")).search(x, 1)
    # Codes of 8 bits are half a step off at most, in each of two dimensions.
    assert sq_dist.max() <= 2 * (x.abs().max() / 127 / 2 * 1.01) ** 2
    assert found[:, 0].tolist() == [0, 1, 2]
