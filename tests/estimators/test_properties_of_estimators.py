"""Properties of estimators, proposals and draws over data of any shape, type, size and noise level."""

import math

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
from lit_knn.theory.proposal import dense_log_q, neighbour_proposal, sample_proposal
from lit_knn.theory.stratified import stratified_draws
from tests.any_data import all_images, enumerated_mean, log_posterior, problems, tolerance

# Rounding of Σq in float32 may put two draws on an image of less probability.
NEGLIGIBLE = 1e-6


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


def estimators(k, n, r):
    """Every estimator of weighted images, whose means are convex combinations."""
    return [KNN(k, n), UniformSNIS(n), STF(n), MonteCarlo(n), KNN(k, n, include_source=True)]


@given(problems(), st.data())
def test_sampled_means_are_finite_repeatable_and_among_the_images(problem, data):
    reference, z, t, source = problem
    k, n = (data.draw(st.integers(1, reference.N)) for _ in range(2))
    r = data.draw(st.integers(1, min(reference.N, reference.d)))
    x, most = all_images(reference), tolerance(reference)
    low, high = x.amin(0) - most, x.amax(0) + most
    weighted = estimators(k, n, r)
    others = [SubspaceKNN(r, n, "float32"), Wiener(r), OneSample()]
    for estimator in [*weighted, *others]:
        estimator.bind(reference)
        mean = estimator.posterior_mean(z, t, source, seeded(1))
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


@given(problems())
def test_all_neighbours_make_the_proposal_the_posterior(problem):
    reference, z, t, _ = problem
    q = dense_log_q(KNN(reference.N, 1).bind(reference).proposal(z.double(), t)).exp()
    # A search rounds the distances beyond the 16 nearest images to eight bits.
    if reference.N <= 16:
        torch.testing.assert_close(q, log_posterior(reference, z, t).exp(), atol=1e-4, rtol=0)
    torch.testing.assert_close(q.sum(1), torch.ones(len(z), dtype=torch.float64))


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


@given(searches())
def test_the_proposal_of_eq_13_is_a_distribution_with_a_flat_tail(search):
    sq_dist, ids, t, N = search
    q = dense_log_q(neighbour_proposal(sq_dist, ids, t, N)).exp()
    torch.testing.assert_close(q.sum(1), torch.ones(len(ids), dtype=torch.float64))
    for row in range(len(ids)):
        found = ids[row][ids[row] >= 0]
        tail = q[row][[i not in found for i in range(N)]]
        assert (tail == tail[:1]).all()
        if len(found) and len(tail):
            # The tail has the likelihood of the farthest neighbour that was found.
            torch.testing.assert_close(tail[0], q[row, found].min(), rtol=1e-9, atol=0)
        if len(found) > 1:
            near, far = sq_dist[row][ids[row] >= 0].aminmax()
            ratio = q[row, found].max().log() - q[row, found].min().log()
            if q[row, found].min() > 1e-200:
                torch.testing.assert_close(ratio, (far - near) / (2 * t * t), rtol=1e-6, atol=1e-6)


@given(searches(), st.integers(1, 40))
def test_draws_of_the_proposal_are_images_with_their_probabilities(search, n):
    sq_dist, ids, t, N = search
    proposal = neighbour_proposal(sq_dist, ids, t, N)
    drawn, log_q = sample_proposal(proposal, n, seeded())
    assert drawn.shape == log_q.shape == (len(ids), n)
    assert ((drawn >= 0) & (drawn < N)).all()
    assert log_q.isfinite().all()
    torch.testing.assert_close(log_q, dense_log_q(proposal).gather(1, drawn), rtol=0, atol=1e-9)


@given(st.integers(1, 3), st.integers(1, 30), st.integers(0, 2**31), st.floats(0, 60), st.data())
def test_stratified_draws_stand_for_the_whole_distribution(B, N, seed, spread, data):
    log_q = torch.randn(B, N, generator=seeded(seed)) * spread
    n = data.draw(st.integers(1, N))
    never = torch.full((B,), -math.inf, dtype=torch.float64)
    draws = stratified_draws(log_q.clone(), n, never, seeded())
    log_q = torch.log_softmax(log_q.double(), 1)
    # The base weights of the used places sum to 1, and no image takes two places.
    weights = (log_q.gather(1, draws.ids) + draws.log_correction).exp()
    torch.testing.assert_close(weights.sum(1), torch.ones(len(weights), dtype=torch.float64), atol=1e-5, rtol=0)
    for row, ids in enumerate(draws.ids):
        places = ids[draws.log_correction[row] > -math.inf]
        places = places[log_q[row, places] > math.log(NEGLIGIBLE)]
        assert len(places.unique()) == len(places)
