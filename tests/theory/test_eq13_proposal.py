"""The nearest-neighbour proposal of Eq. 13 (eq:proposal) against enumeration and against its own draws."""

import decimal

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from lit_knn.theory.proposal import neighbour_proposal, sample_proposal

INF = float("inf")


def enumerate_proposal(sq_dist, ids, t, N):
    """Compute Eq. 13 image by image with 60 digits: the N probabilities, and Z_q as a Decimal."""
    with decimal.localcontext() as context:
        context.prec, context.Emin, context.Emax = 60, decimal.MIN_EMIN, decimal.MAX_EMAX
        likelihood = {
            int(i): (-decimal.Decimal(float(s)) / (2 * decimal.Decimal(t) ** 2)).exp()
            for s, i in zip(sq_dist, ids, strict=True)
            if i >= 0
        }
        farthest = min(likelihood.values()) if likelihood else decimal.Decimal(1)
        values = [likelihood.get(i, farthest) for i in range(N)]
        Z = sum(values)
        return np.array([float(v / Z) for v in values]), Z


def dense(proposal):
    """The proposal's probabilities of all N images, (B, N)."""
    rows = []
    for ids, log_q, tail in zip(proposal.ids, proposal.log_q, proposal.log_q_tail, strict=True):
        q = np.full(proposal.N, np.exp(tail.item()))
        for i, value in zip(ids.tolist(), log_q.tolist(), strict=True):
            if i >= 0:
                q[i] = np.exp(value)
        rows.append(q)
    return np.array(rows)


def neighbours(N, k, seed=0, d=3, B=3):
    """Find the k nearest of N points for B latents by brute force: squared distances to all, and the search result."""
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(N, d)), rng.normal(size=(B, d))
    all_sq = ((z[:, None] - x) ** 2).sum(-1)
    ids = np.argsort(all_sq, axis=1)[:, :k]
    return all_sq, torch.tensor(np.take_along_axis(all_sq, ids, 1)), torch.tensor(ids)


def assert_frequencies(proposal, n=40_000, seed=0):
    """Check that draws follow q (chi-square), and that each draw has the log_q of its id."""
    q = dense(proposal)
    ids, log_q = sample_proposal(proposal, n, torch.Generator().manual_seed(seed))
    assert ids.shape == log_q.shape == (len(q), n)
    assert ids.min() >= 0
    assert ids.max() < proposal.N
    for row in range(len(q)):
        drawn = ids[row].numpy()
        np.testing.assert_allclose(np.exp(log_q[row].numpy()), q[row][drawn], rtol=1e-9)
        counts = np.bincount(drawn, minlength=proposal.N)
        assert counts[q[row] == 0].sum() == 0
        # A chi-square test needs an expected count of 5 in each cell, so rare ids share a cell.
        common = q[row] * n >= 5
        observed, expected = counts[common], q[row][common] * n
        if (~common).any() and q[row][~common].sum() * n >= 5:
            observed = np.append(observed, counts[~common].sum())
            expected = np.append(expected, q[row][~common].sum() * n)
        if len(observed) > 1:
            assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4
        assert counts[~common].sum() <= 30 + 2 * q[row][~common].sum() * n


@pytest.mark.parametrize("t", [0.002, 0.1, 0.5, 2.0, 80.0])
@pytest.mark.parametrize("k", [1, 2, 7, 20])
def test_probabilities_and_normaliser_match_enumeration(t, k):
    N = 20
    all_sq, sq_dist, ids = neighbours(N, k)
    proposal = neighbour_proposal(sq_dist, ids, t, N)
    q = dense(proposal)
    np.testing.assert_allclose(q.sum(1), 1.0, rtol=1e-9)  # log q is near 1e5, so ten digits are left
    for row in range(len(q)):
        expected, Z = enumerate_proposal(sq_dist[row], ids[row], t, N)
        np.testing.assert_allclose(q[row], expected, rtol=1e-8, atol=1e-300)
        assert proposal.log_Zq[row].item() == pytest.approx(float(Z.ln()), rel=1e-10, abs=1e-10)
        # The tail bounds the likelihoods it replaces, so Z_q is at least their sum (below Eq. 13).
        total = float(enumerate_proposal(all_sq[row], range(N), t, N)[1].ln())
        assert proposal.log_Zq[row].item() >= total - 1e-9 * abs(total)


def test_per_item_noise_levels():
    _, sq_dist, ids = neighbours(20, 4)
    t = [0.05, 0.8, 30.0]
    proposal = neighbour_proposal(sq_dist, ids, torch.tensor(t, dtype=torch.float64), 20)
    for row, level in enumerate(t):
        expected, _ = enumerate_proposal(sq_dist[row], ids[row], level, 20)
        np.testing.assert_allclose(dense(proposal)[row], expected, rtol=1e-8, atol=1e-300)


@pytest.mark.parametrize(
    ("N", "k", "t"),
    [
        (20, 5, 1.0),  # neighbours and tail have mass
        (20, 5, 80.0),  # nearly uniform: most draws are from the tail
        (20, 5, 0.002),  # one image
        (20, 1, 1.0),  # the tail has all images but one
        (20, 19, 2.0),  # the tail is one image
        (20, 20, 1.0),  # no tail
        (2, 1, 1.0),
        (1, 1, 1.0),
        (1, 1, 0.002),
    ],
)
def test_draws_follow_q(N, k, t):
    _, sq_dist, ids = neighbours(N, k, seed=N + k)
    assert_frequencies(neighbour_proposal(sq_dist, ids, t, N))


@pytest.mark.parametrize(
    ("sq_dist", "ids", "N"),
    [
        pytest.param([1.0, 1.0, 1.0], [4, 0, 2], 8, id="all distances equal"),
        pytest.param([0.0, 0.0], [1, 3], 6, id="all distances zero"),
        pytest.param([0.5], [3], 4, id="k=1"),
        pytest.param([0.5, 1.0, INF, INF], [5, 2, -1, -1], 9, id="some missing"),
        pytest.param([INF, 0.5, INF, 1.0], [-1, 5, -1, 2], 9, id="missing in front and between"),
        pytest.param([INF, INF, INF], [-1, -1, -1], 7, id="none found"),
        pytest.param([INF], [-1], 1, id="none found in one"),
        pytest.param([3.0, 0.2, 1.0, 0.1], [0, 7, 3, 6], 8, id="unsorted approximate distances"),
        pytest.param([0.3, 0.6, 0.9], [0, 1, 2], 9, id="neighbours are the first ids"),
        pytest.param([0.3, 0.6, 0.9], [8, 7, 6], 9, id="neighbours are the last ids"),
        pytest.param([0.3, 0.6, 0.9, 1.0], [1, 3, 5, 7], 9, id="neighbours and tail interleaved"),
        pytest.param([-1e-6, 0.5], [1, 3], 5, id="distance a little below zero"),
    ],
)
@pytest.mark.parametrize("t", [0.7, 80.0])
def test_draws_follow_q_in_special_cases(sq_dist, ids, N, t):
    proposal = neighbour_proposal(torch.tensor([sq_dist]), torch.tensor([ids]), t, N)
    expected, _ = enumerate_proposal(np.float32(sq_dist), ids, t, N)
    np.testing.assert_allclose(dense(proposal)[0], expected, rtol=1e-8)
    assert_frequencies(proposal)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("t", [0.002, 80.0])
def test_extreme_uniform_numbers_stay_in_the_support(monkeypatch, u, missing, t):
    N = 1000
    ids = torch.tensor([[-1, 0, 998, 999, 500] if missing else [3, 0, 998, 999, 500], [0, 1, 2, 3, 4]])
    sq_dist = torch.where(ids < 0, INF, torch.tensor([0.1, 0.5, 0.9, 1.0, 2.0]))
    proposal = neighbour_proposal(sq_dist, ids, t, N)
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(shape, u, dtype=torch.float64))
    drawn, log_q = sample_proposal(proposal, 2)
    assert drawn.min() >= 0
    assert drawn.max() < N
    assert log_q.isfinite().all()
    q = dense(proposal)
    for row in range(2):
        np.testing.assert_allclose(log_q[row], np.log(q[row][drawn[row].numpy()]), rtol=1e-9)


def test_rounding_of_the_probabilities_leaves_no_gap_at_the_end(monkeypatch):
    # log q near 6e5 has ten digits after exp, so the probabilities of some rows sum to less than the largest u.
    sq_dist = 5 + 8e-6 * torch.rand(200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    proposal = neighbour_proposal(sq_dist, torch.arange(4).expand(200, 4), 0.002, 4)
    assert (proposal.log_q.exp().sum(1) < 1 - 2**-52).any()
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(shape, 1 - 2**-53, dtype=torch.float64))
    ids, log_q = sample_proposal(proposal, 1)
    assert (ids == 3).all()
    np.testing.assert_array_equal(log_q[:, 0], proposal.log_q[:, 3])
