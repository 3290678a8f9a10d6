"""Uniform draws, and the error that draws without repetition tell of their mean."""

import pytest
import torch

from lit_knn.estimators.drawn_images import Gathered
from lit_knn.estimators.draws import Draws, sq_error, uniform_ids
from lit_knn.reference import ReferenceSet


def pixels(N):
    return torch.randint(0, 256, (N, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("hflip", [False, True])
def test_uniform_draws_take_all_images_equally_often(hflip):
    reference = ReferenceSet(pixels(20), hflip=hflip)
    ids = uniform_ids(reference, 2000, 100, torch.Generator().manual_seed(0))
    expected = ids.numel() / reference.N
    counts = torch.bincount(ids.flatten(), minlength=reference.N)
    assert len(counts) == reference.N
    assert ((counts - expected).abs() < 5 * expected**0.5).all()


@pytest.mark.parametrize("inclusion", [[1.0, 0.5, 0.4, 0.3], [0.9, 0.5, 0.2, 0.6], [1.0, 1.0, 1.0, 0.3]])
def test_the_error_of_draws_without_repetition_is_hajek_s(inclusion):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 3, generator=generator, dtype=torch.float64)
    weights = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    mean = (weights.unsqueeze(2) * x).sum(1)
    chances = 1 - torch.tensor(inclusion, dtype=torch.float64)
    draws = Draws(torch.arange(4)[None], torch.zeros(1, 4), inclusion=1 - chances[None])
    random = [i for i in range(4) if chances[i] > 0]
    parts = {i: weights[0, i] * (x[0, i] - mean[0]) for i in random}
    if len(random) == 1:
        expected = sum(chances[i] * parts[i].square().sum() for i in random)
    else:
        centre = sum(chances[i] * parts[i] for i in random) / sum(chances[i] for i in random)
        expected = sum(chances[i] * (parts[i] - centre).square().sum() for i in random)
        expected = expected * len(random) / (len(random) - 1)
    found = sq_error(draws, weights, Gathered(x), mean)
    torch.testing.assert_close(found[0], expected / 3)
