"""The draws behind Figure 5: start images, levels, and random draws of each batch."""

import pytest
import torch

from lit_knn.metrics.hybrid import HybridSamples
from lit_knn.metrics.samples import draw_samples
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.sampling.schedules import NoiseGrid
from tests.watched import Asked, heun_levels, karras

GRID = {"sigma_min": 0.03, "sigma_max": 12.0, "rho": 4.0}
DATA = ReferenceSet(torch.arange(200.0).reshape(200, 1))


def samples(seed=0, steps=5):
    return HybridSamples(Asked(), DATA, steps, NoiseGrid(**GRID), seed)


def starts(seeds, seed=0, t=0.5):
    """The images that forward samples start from."""
    drawing = samples(seed)
    drawing.draw(None, t, seeds)
    return drawing.network.points[0] - t * seeded_noise(seeds, (1,))


def test_forward_samples_start_from_noisy_images_of_the_whole_set_and_each_batch_from_its_own():
    one, two, again = (starts(torch.arange(first, first + 60)) for first in (0, 60, 0))
    for x in (one, two):
        torch.testing.assert_close(x, x.round(), rtol=0, atol=1e-3)
        assert x.min() > -0.5
        assert x.min() < 20
        assert 180 < x.max() < 199.5
    assert torch.equal(one, again)
    assert (one.round() == two.round()).float().mean() < 0.1
    assert (one.round() == starts(torch.arange(60), seed=1).round()).float().mean() < 0.1


@pytest.mark.parametrize("t_switch", [0.5, 3.0])
def test_both_parts_go_through_the_grid_of_the_options_cut_at_t_switch(t_switch):
    grid = karras(5, **GRID)
    above = torch.cat([grid[grid > t_switch], torch.tensor([t_switch])])
    below = torch.cat([torch.tensor([t_switch]), grid[grid < t_switch]])
    for estimator in (Asked(), None):
        drawing = samples()
        drawing.draw(estimator, t_switch, torch.arange(4))
        assert drawing.network.levels == pytest.approx(heun_levels(below), rel=1e-6)
        if estimator is not None:
            assert estimator.levels == pytest.approx(heun_levels(above)[:-1], rel=1e-6)
            torch.testing.assert_close(estimator.points[0], 12 * seeded_noise(range(4), (1,)))


def test_an_estimator_draws_anew_in_each_batch_and_for_each_seed_of_the_run_and_repeats_itself():
    def drawn(first, seed=0):
        estimator = Asked()
        samples(seed).draw(estimator, 3.0, torch.arange(first, first + 4))
        assert not torch.equal(estimator.drawn[0], estimator.drawn[1])
        return estimator.drawn[0]

    torch.manual_seed(1)
    one = drawn(0)
    torch.manual_seed(2)
    assert torch.equal(one, drawn(0))
    assert not torch.equal(one, drawn(4))
    assert not torch.equal(one, drawn(0, seed=1))


def test_below_t_switch_the_draws_are_others_than_above_and_the_same_whatever_is_above():
    drawn = []
    for estimator in (Asked(), None):
        for seed in (0, 1):
            torch.manual_seed(len(drawn))
            drawing = samples(seed)
            drawing.draw(estimator, 3.0, torch.arange(4))
            drawn.append(drawing.network.drawn)
            if estimator is not None:
                assert not any(torch.equal(a, b) for a in drawing.network.drawn for b in estimator.drawn)
    assert all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[2], strict=True))
    assert not torch.equal(drawn[0][0], drawn[1][0])


def test_each_batch_has_seeds_of_its_own():
    given = [(seeds.tolist(), images) for seeds, images in draw_samples(lambda seeds: seeds + 100, 7, 3)]
    assert [seeds for seeds, _ in given] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [images.tolist() for _, images in given] == [[100, 101, 102], [103, 104, 105], [106]]
