"""Draws without repetition, by enumeration of the one random number of each row."""

import pytest
import torch

from lit_knn.stratified import stratified_draws


def distribution(kind, rows=3, N=40):
    generator = torch.Generator().manual_seed(1)
    log_q = torch.randn(rows, N, generator=generator) * {"flat": 0.1, "spread": 2.0, "peaked": 6.0}[kind]
    return log_q


def outcomes(log_q, n, m=None, grid=4000):
    """All outcomes of one row over an even grid of u: base weights (grid, N), draws."""
    repeated = log_q.expand(grid, -1).clone()
    u = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid

    class Grid(torch.Generator):
        pass

    rand, torch.rand = torch.rand, lambda *_, **__: u.unsqueeze(1)
    try:
        draws = stratified_draws(repeated, n, torch.full((grid,), -1e9), m)
    finally:
        torch.rand = rand
    q = log_q.double().softmax(0)
    # Base weight = correction times q, up to the constant that makes kept images weigh q.
    weights = torch.zeros(grid, log_q.numel(), dtype=torch.float64)
    return weights.scatter_add_(1, draws.ids, q[draws.ids] * draws.log_correction.exp()), draws, q


@pytest.mark.parametrize("m", [None, 1, 5])
@pytest.mark.parametrize("kind", ["flat", "spread", "peaked"])
def test_expected_base_weights_are_the_probabilities(kind, m):
    for row in distribution(kind):
        weights, draws, q = outcomes(row, n=12, m=m)
        # The correction holds 1/q in the scale of the row's maximum.
        drawn = draws.sampled
        kept = (~drawn).sum(1)
        assert (kept == kept[0]).all()
        weights = torch.zeros_like(weights)
        mass = draws.rest.double().sum(1) / row.double().sub(row.max().double()).exp().sum()
        base = torch.where(drawn, mass.unsqueeze(1) / drawn.sum(1, keepdim=True), q[draws.ids])
        weights.scatter_add_(1, draws.ids, base)
        torch.testing.assert_close(weights.mean(0), q, rtol=0.02, atol=2e-4)
        torch.testing.assert_close(weights.sum(1), torch.ones(len(weights), dtype=torch.float64))
        # The correction gives each image that base weight over its probability, up to a constant.
        expected = (base / q[draws.ids]).log()
        difference = (draws.log_correction - expected)[:, 0:1]
        torch.testing.assert_close(draws.log_correction - expected, difference.expand_as(expected), atol=1e-4, rtol=0)
