"""Searches by blocks against sorts and cumulative sums of whole rows."""

import math

import pytest
import torch

from lit_knn.theory.blocks import Cumulated, largest
from lit_knn.theory.stratified import stratified_draws

SIZES = pytest.mark.parametrize(("N", "n"), [(1, 1), (7, 7), (10, 3), (99, 3), (1000, 8), (5003, 256), (4096, 1)])


def rows(N, dtype=torch.float32):
    return torch.randn(4, N, generator=torch.Generator().manual_seed(N)).to(dtype)


@SIZES
def test_the_largest_values_are_those_of_a_sort(N, n):
    values = rows(N)
    found, columns = largest(values, n)
    assert torch.equal(found, values.sort(1, descending=True).values[:, :n])
    assert torch.equal(values.gather(1, columns), found)
    assert all(len(set(row)) == n for row in columns.tolist())


@SIZES
def test_equal_and_impossible_values_are_found_once(N, n):
    values = torch.full((2, N), -math.inf)
    values[0] = 1.0
    values[1, -1] = 0.0
    found, columns = largest(values, n)
    assert (found[0] == 1).all()
    assert columns[1, 0] == N - 1
    assert all(len(set(row)) == n for row in columns.tolist())


@SIZES
@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_columns_are_those_of_a_cumulative_sum(N, n, spread):
    values = (spread * rows(N)).exp()
    values[:, ::3] = 0.0
    values[:, -1] = 1.0
    cdf = values.double().cumsum(1)
    found = Cumulated(values, n)
    torch.testing.assert_close(found.total, cdf[:, -1:], rtol=1e-6, atol=0)
    # These are middles of the largest steps, so that rounding cannot matter.
    wanted = values.topk(n, dim=1).indices
    heights = (cdf - values.double() / 2).gather(1, wanted)
    clear = values.gather(1, wanted) > 1e-5 * cdf[:, -1:]
    assert clear[:, 0].all()
    columns = found.columns(heights * (found.total / cdf[:, -1:]))
    assert torch.equal(columns[clear], wanted[clear])


@pytest.mark.parametrize("spread", [0.2, 3.0])
def test_in_long_rows_each_image_is_drawn_as_often_as_its_probability_says(every_u, spread):
    # Blocks have 9 columns here, and the last one has fewer.
    N, n, grid = 1003, 12, 20_000
    log_q = spread * rows(N)[0]
    with every_u(grid):
        draws = stratified_draws(log_q.expand(grid, -1).clone(), n, torch.full((grid,), -1e9))
    q = log_q.double().softmax(0)
    base = q[draws.ids] * draws.log_correction.exp()
    mean = torch.zeros(N, dtype=torch.float64).index_add_(0, draws.ids.flatten(), base.flatten()) / grid
    # The grid shifts the ends of an image's interval by less than one step of all places together.
    torch.testing.assert_close(mean, q, rtol=0, atol=1.0 / grid)
    assert (draws.ids.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize(("kept", "only_the_next"), [(149, False), (174, True)])
def test_values_that_float32_cannot_hold_are_never_drawn(every_u, kept, only_the_next):
    # Neighbours differ by e^0.5, so the images from number 173 on are below e^-86. All logarithms may be shifted. The
    # images of all places, of which one is drawn here, have their exact values.
    log_q = -0.5 * torch.arange(400.0) + torch.tensor([-1e3, 0.0, 1e3]).repeat_interleave(50)[:, None]
    with every_u(150):
        draws = stratified_draws(log_q.clone(), kept + 1, torch.full((150,), -1e9), kept)
    drawn = draws.ids[draws.sampled]
    assert len(drawn) == 150
    assert (drawn == kept).all() == only_the_next
    assert (drawn >= kept).all()
