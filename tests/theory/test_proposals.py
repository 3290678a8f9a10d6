"""Draws from the proposal of Eq. 13 (eq:proposal) and draws without repetition, against enumeration."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from lit_knn.theory.proposal import dense_log_q, neighbour_proposal, sample_proposal
from lit_knn.theory.stratified import stratified_draws

# The nearest-neighbour proposal

INF = float("inf")


def enumerate_proposal(sq_dist, ids, t, N):
    """Compute Eq. 13 image by image: log q of the N images, and log Z_q."""
    found = {int(i): -float(s) / (2 * t**2) for s, i in zip(sq_dist, ids, strict=True) if i >= 0}
    values = [found.get(i, min(found.values(), default=0.0)) for i in range(N)]
    return values - logsumexp(values), logsumexp(values)


def assert_draws_follow(proposal, n=40_000):
    """Check that images are drawn as often as q says, and that each draw has the log q of its id."""
    log_q = dense_log_q(proposal)
    ids, drawn = sample_proposal(proposal, n, torch.Generator().manual_seed(0))
    assert ids.min() >= 0
    assert ids.max() < proposal.N
    torch.testing.assert_close(drawn, log_q.gather(1, ids), rtol=0, atol=0)
    share = torch.zeros_like(log_q).scatter_add_(1, ids, torch.full_like(drawn, 1 / n))
    q = log_q.exp()
    assert (share[q == 0] == 0).all()
    # Five standard errors of a frequency, and three draws for what is hardly ever drawn.
    assert ((share - q).abs() <= 5 * (q / n).sqrt() + 3 / n).all()


# one image, some images, all images nearly alike
@pytest.mark.parametrize("level", [0.002, 0.7, 80.0])
@pytest.mark.parametrize(("N", "k"), [(20, 1), (20, 5), (20, 19), (20, 20), (2, 1), (1, 1)])
def test_the_proposal_and_its_draws_are_those_of_eq_13(N, k, level):
    generator = torch.Generator().manual_seed(N + k)
    x, z = (
        torch.randn(*size, dtype=torch.float64, generator=generator) for size in ((N, 3), (3, 3))
    )
    every = (z[:, None] - x).square().sum(2)
    sq_dist, ids = every.topk(k, largest=False)
    t = level * torch.tensor([0.8, 1.0, 1.1], dtype=torch.float64)
    proposal = neighbour_proposal(sq_dist, ids, t, N)
    for row in range(3):
        log_q, log_Zq = enumerate_proposal(sq_dist[row], ids[row], t[row].item(), N)
        # Float64 keeps ten digits after the point of numbers near 1e6.
        np.testing.assert_allclose(dense_log_q(proposal)[row], log_q, rtol=1e-12, atol=1e-9)
        assert proposal.log_Zq[row].item() == pytest.approx(log_Zq, rel=1e-10, abs=1e-10)
        # The tail bounds the likelihoods it replaces, so Z_q is at least their sum (below Eq. 13).
        assert log_Zq >= torch.logsumexp(-every[row] / (2 * t[row] ** 2), 0).item() - 1e-9 * abs(
            log_Zq
        )
    assert_draws_follow(proposal)


@pytest.mark.parametrize(
    ("sq_dist", "ids", "N"),
    [
        pytest.param([1.0, 1.0, 1.0], [4, 0, 2], 8, id="all distances equal"),
        pytest.param([0.0, 0.0], [1, 3], 6, id="all distances zero"),
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
def test_special_searches_give_a_proposal_of_all_images(sq_dist, ids, N, t):
    proposal = neighbour_proposal(torch.tensor([sq_dist]), torch.tensor([ids]), t, N)
    expected, _ = enumerate_proposal(np.float32(sq_dist), ids, t, N)
    np.testing.assert_allclose(dense_log_q(proposal)[0], expected, rtol=1e-9, atol=1e-12)
    assert_draws_follow(proposal)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("t", [0.002, 80.0])
def test_extreme_uniform_numbers_stay_in_the_support(monkeypatch, u, t):
    monkeypatch.setattr(
        torch, "rand", lambda *shape, **options: torch.full(shape, u, dtype=torch.float64)
    )
    ids = torch.tensor([[-1, 0, 998, 999, 500], [3, 0, 998, 999, 500], [0, 1, 2, 3, 4]])
    sq_dist = torch.where(ids < 0, INF, torch.tensor([0.1, 0.5, 0.9, 1.0, 2.0]))
    assert_draws_follow_support(neighbour_proposal(sq_dist, ids, t, 1000))
    # log q near 6e5 has ten digits after exp, so the probabilities of some rows sum to less than the largest u.
    sq_dist = 5 + 8e-6 * torch.empty(200, 4, dtype=torch.float64).uniform_()
    proposal = neighbour_proposal(sq_dist, torch.arange(4).expand(200, 4), 0.002, 4)
    assert (proposal.log_q.exp().sum(1) < 1 - 2**-52).any()
    assert_draws_follow_support(proposal)


def assert_draws_follow_support(proposal):
    ids, log_q = sample_proposal(proposal, 2)
    assert ids.min() >= 0
    assert ids.max() < proposal.N
    assert log_q.isfinite().all()
    torch.testing.assert_close(log_q, dense_log_q(proposal).gather(1, ids), rtol=0, atol=0)


# Draws without repetition: each row has one random number, and the tests enumerate it.


def all_draws(every_u, log_q, n, grid=4000):
    """The draws of one row for every u, and the base weights they give to the images, (grid, N)."""
    with every_u(grid):
        draws = stratified_draws(log_q.expand(grid, -1).clone(), n, torch.full((grid,), -1e9))
    # The correction is log(base weight / probability).
    base = log_q.double().softmax(0)[draws.ids] * draws.log_correction.exp()
    return draws, torch.zeros(grid, len(log_q), dtype=torch.float64).scatter_add_(
        1, draws.ids, base
    )


# A row of 1,003 images is searched in blocks of 9 columns; the last one has fewer.
@pytest.mark.parametrize(
    ("N", "spread"), [(40, 0.1), (40, 2.0), (40, 6.0), (1003, 0.2), (1003, 3.0)]
)
def test_base_weights_are_probabilities_and_no_image_drawn_twice(every_u, N, spread):
    log_q, n = torch.randn(N, generator=torch.Generator().manual_seed(1)) * spread, 12
    draws, weights = all_draws(every_u, log_q, n)
    q = log_q.double().softmax(0)
    # The grid shifts the ends of an image's interval by less than one step of all places together.
    torch.testing.assert_close(weights.mean(0), q, rtol=0, atol=1 / 4000)
    torch.testing.assert_close(
        weights.sum(1), torch.ones(4000, dtype=torch.float64), rtol=1e-5, atol=0
    )
    assert (draws.ids.sort(1).values.diff(dim=1) > 0).all()
    # An image is kept if its probability is larger than the weight that each drawn image represents.
    kept = int((~draws.sampled[0]).sum())
    even_share = q.sort(descending=True).values[kept:].sum() / (n - kept)
    assert (q > even_share).sum() == kept
    torch.testing.assert_close(weights[weights > 0].min(), even_share, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "log_q", [torch.zeros(7), torch.zeros(49), torch.linspace(-20, 0, 40)], ids=len
)
def test_with_all_places_no_image_is_random(every_u, log_q):
    draws, weights = all_draws(every_u, log_q, len(log_q), grid=50)
    assert not draws.sampled.any()
    torch.testing.assert_close(
        weights, log_q.double().softmax(0).expand(50, -1), rtol=1e-4, atol=1e-9
    )


def test_a_height_that_rounds_up_to_the_whole_mass_draws_nothing(monkeypatch):
    # After 300 equal images come images with probability 0; the last draw must not take one of them.
    log_q = torch.cat([torch.zeros(1, 300), torch.full((1, 300), -1e4)], dim=1)
    monkeypatch.setattr(
        torch, "rand", lambda *_, **__: torch.tensor([[1 - 2**-53]], dtype=torch.float64)
    )
    draws = stratified_draws(log_q, 256, torch.tensor([-1e9]))
    assert draws.sampled.sum() == 255
    assert (draws.log_correction.exp() / 300).sum().item() == pytest.approx(1, abs=1 / 256 + 1e-9)


@pytest.mark.parametrize("n", [1, 2, 7, 10])
def test_left_out_weight_is_negligible_for_any_number_of_images(n):
    # Each image beyond the first few is negligible, all of them together are not.
    many, negligible = 3000, 1e-8
    log_q = -torch.linspace(14, 32, 60)[:, None].repeat(1, many)
    log_q[:, :3] = torch.tensor([0.0, -1.0, -2.0])
    q = log_q.double().softmax(1)
    draws = stratified_draws(log_q, n, torch.full((60,), math.log(negligible)))
    used = (draws.log_correction > -INF).sum(1)
    left_out = torch.stack([row[count:].sum() for row, count in zip(q, used, strict=True)])
    assert (left_out[used < n] <= negligible).all()
    # Where the first few hold all but a tenth of it, no more are used.
    few = (q[:, 3:].sum(1) < negligible / 10) & torch.tensor(n > 3)
    assert (used[few] == 3).all()
    assert few.any() == (n > 3)
