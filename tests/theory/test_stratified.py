"""Draws without repetition; each row has one random number, and the tests enumerate it."""

import math

import pytest
import torch

from lit_knn.theory.stratified import stratified_draws

N = 40
KINDS = pytest.mark.parametrize("spread", [0.1, 2.0, 6.0], ids=["flat", "spread", "peaked"])


def log_probabilities(spread, rows=3):
    return torch.randn(rows, N, generator=torch.Generator().manual_seed(1)) * spread


def used(draws):
    return (draws.log_correction > -math.inf).sum(1)


@pytest.fixture
def outcomes(every_u):
    """The draws of one row for every u, and the base weights they give to the images, (grid, N)."""

    def enumerate_draws(log_q, n, grid=4000):
        with every_u(grid):
            draws = stratified_draws(log_q.expand(grid, -1).clone(), n, torch.full((grid,), -1e9))
        # The correction is log(base weight / probability).
        base = log_q.double().softmax(0)[draws.ids] * draws.log_correction.exp()
        return draws, torch.zeros(grid, N, dtype=torch.float64).scatter_add_(1, draws.ids, base)

    return enumerate_draws


@KINDS
def test_base_weights_sum_to_one_and_are_the_probabilities_in_expectation(outcomes, spread):
    for row in log_probabilities(spread):
        _, weights = outcomes(row, n=12)
        q = row.double().softmax(0)
        torch.testing.assert_close(weights.mean(0), q, rtol=0.02, atol=2e-4)
        torch.testing.assert_close(weights.sum(1), torch.ones(len(weights), dtype=torch.float64), rtol=1e-5, atol=0)


@KINDS
def test_no_image_is_drawn_twice_and_the_likely_ones_are_kept(outcomes, spread):
    for row in log_probabilities(spread):
        draws, weights = outcomes(row, n=12)
        assert (draws.ids.sort(1).values.diff(dim=1) > 0).all()
        # An image is kept if its probability is larger than the weight that each drawn image represents.
        q = row.double().softmax(0)
        kept = int((~draws.sampled[0]).sum())
        even_share = q.sort(descending=True).values[kept:].sum() / (12 - kept)
        assert (q > even_share).sum() == kept
        torch.testing.assert_close(weights[weights > 0].min(), even_share, rtol=1e-4, atol=0)


@pytest.mark.parametrize("spread", [0.1, 6.0])
def test_all_places_represent_the_distribution_exactly(outcomes, spread):
    for row in log_probabilities(spread):
        _, weights = outcomes(row, n=N, grid=50)
        expected = row.double().softmax(0).expand(50, -1)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-9)


def test_a_height_that_rounds_up_to_the_whole_mass_draws_nothing(monkeypatch):
    # After 300 equal images come images with probability 0; the last draw must not take one of them.
    log_q = torch.cat([torch.zeros(1, 300), torch.full((1, 300), -1e4)], dim=1)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([[1 - 2**-53]], dtype=torch.float64))
    draws = stratified_draws(log_q, 256, torch.tensor([-1e9]))
    assert draws.sampled.sum() == 255
    weights = draws.log_correction.exp() / 300
    assert weights.sum().item() == pytest.approx(1, abs=1 / 256 + 1e-9)


@pytest.mark.parametrize("n", [1, 2, 7, 10])
def test_what_is_left_out_is_negligible_however_many_images_there_are(n):
    # Each image beyond the first few is negligible, all of them together are not.
    many, negligible = 3000, 1e-8
    level = -torch.linspace(14, 32, 60)
    log_q = level[:, None].repeat(1, many)
    log_q[:, :3] = torch.tensor([0.0, -1.0, -2.0])
    q = log_q.double().softmax(1).sort(dim=1, descending=True).values
    draws = stratified_draws(log_q, n, torch.full((60,), math.log(negligible)))
    left_out = torch.stack([row[count:].sum() for row, count in zip(q, used(draws), strict=True)])
    assert (left_out[used(draws) < n] <= negligible).all()
    # Where the first few hold all but a tenth of it, no more are used.
    few = (q[:, 3:].sum(1) < negligible / 10) & torch.tensor(n > 3)
    assert (used(draws)[few] == 3).all()
    assert few.any() == (n > 3)


@pytest.mark.parametrize("n", [3, 7, 49])
def test_with_all_places_no_image_is_random_even_where_all_are_equal(n):
    draws = stratified_draws(torch.zeros(4, n), n, torch.full((4,), -1e9))
    assert not draws.sampled.any()
    assert (draws.ids.sort(1).values == torch.arange(n)).all()


@pytest.mark.parametrize("spread", [0.2, 3.0])
def test_in_long_rows_each_image_is_drawn_as_often_as_its_probability_says(every_u, spread):
    # Blocks have 9 columns here, and the last one has fewer.
    N, n, grid = 1003, 12, 20_000
    log_q = spread * torch.randn(N, generator=torch.Generator().manual_seed(N))
    with every_u(grid):
        draws = stratified_draws(log_q.expand(grid, -1).clone(), n, torch.full((grid,), -1e9))
    q = log_q.double().softmax(0)
    base = q[draws.ids] * draws.log_correction.exp()
    mean = torch.zeros(N, dtype=torch.float64).index_add_(0, draws.ids.flatten(), base.flatten()) / grid
    # The grid shifts the ends of an image's interval by less than one step of all places together.
    torch.testing.assert_close(mean, q, rtol=0, atol=1.0 / grid)
    assert (draws.ids.sort(1).values.diff(dim=1) > 0).all()
