"""Shares of one sample's noise: when they can be told, and whether their intervals hold the truth."""

import math

import numpy as np
import pytest
import torch

from lit_knn.estimators import KNN, STF, Wiener
from lit_knn.metrics import probe
from lit_knn.metrics.estimator_error import share_and_error
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.probe_level import measure_level
from lit_knn.metrics.probe_shares import (
    Remainder,
    Training,
    carrying_latents,
    cheapest,
    last_level,
    level_weights,
    remainders_of,
    share_left,
)
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors, rng


@pytest.mark.filterwarnings("ignore:.*going on with")
def test_intervals_of_shares_hold_the_truth_near_the_collapse():
    # The truth is known: it is the share over a pool of latents, from which each probe draws 128.
    reference = ReferenceSet(low_rank_vectors(60))
    pool = NoisyLatents(reference, 60, 0)
    pool.ids = pool.ids.repeat(50)
    estimators = {"STF": STF(8), "KNN": KNN(16, 4), "wiener": Wiener()}
    bound = {name: {0: made.bind(reference)} for name, made in estimators.items()}

    generator = rng()
    shown, empty = [], []
    # The collapse is at 0.15; at 0.2 some 3 of 128 latents carry the noise.
    for number, t in enumerate([0.2, 0.5, 0.8]):
        columns = measure_level(pool, False, bound, number, t)
        noise = columns["irreducible"]
        for name in ("STF", "KNN"):
            truth = (columns[name].mean() / noise.mean()).item()
            for _ in range(100):
                rows = torch.randint(len(noise), (128,), generator=generator)
                errors, of = columns[name][rows], noise[rows]
                plain, share = share_and_error(errors, of), share_left(name, errors, of)
                holds = abs(plain.mean - truth) < 1.96 * plain.standard_error
                (empty if math.isnan(share.mean) else shown).append(holds)
                assert math.isnan(share.mean) == (t < 0.3)
                assert name != "STF" or not share.mean > 1

    # Intervals of 95 % from skewed errors hold the truth in some 91 %.
    assert 0.87 < np.mean(shown) < 0.96
    assert np.mean(empty) < 0.8


def test_latents_that_carry_a_sum_are_counted():
    assert carrying_latents(torch.full((50,), 0.3)) == pytest.approx(50)
    assert carrying_latents(torch.tensor([0.0, 5.0, 0.0, 5.0])) == pytest.approx(2)
    assert carrying_latents(torch.zeros(9)) == 0


def test_shares_are_empty_below_twenty_latents():
    errors = torch.ones(100, dtype=torch.float64)
    for carrying, shown in ((19, False), (20, True)):
        noise = torch.zeros(100, dtype=torch.float64)
        noise[:carrying] = 4.0
        share = share_left("KNN", errors, noise)
        assert (share.mean == pytest.approx(25 / carrying)) == shown
        assert math.isnan(share.mean) == (not shown)

        # Few latents carry the estimator's error: the share has no standard error.
        share = share_left("KNN", noise, errors)
        assert share.mean == pytest.approx(4 * carrying / 100)
        assert math.isnan(share.standard_error) == (not shown)

    assert share_left("Exact", 0 * errors, errors) == (0, 0)
    # STF is never worse than one sample (Rao-Blackwell); another estimator may be.
    assert share_left("STF", 1.2 * errors, errors).mean == 1
    assert share_left("KNN", 1.2 * errors, errors).mean == pytest.approx(1.2)


def test_a_curve_is_left_where_it_falls_for_the_last_time():
    t = np.array([1.0, 10.0, 100.0, 1000.0])
    # From 3 to 1 between 10 and 100: 2 lies halfway in ln t.
    assert last_level(t, np.array([0.0, 3.0, 1.0, 0.0]), 2.0) == pytest.approx(10**1.5)
    assert last_level(t, np.array([3.0, 0.0, 2.0, 0.0]), 2.0) == pytest.approx(100)
    assert last_level(t, np.array([1.0, 1.0, 1.0, 1.9]), 2.0) == 0
    assert last_level(t, np.array([0.0, 0.0, 0.0, 2.0]), 2.0) == math.inf


def test_levels_between_are_interpolated_and_outside_are_ends():
    t, sigma = np.array([0.1, 1.0, 10.0]), np.array([0.01, 0.1, 10**-0.25, 10**0.75, 99.0])
    expected = [[1, 0, 0], [1, 0, 0], [0.25, 0.75, 0], [0, 0.25, 0.75], [0, 0, 1]]
    np.testing.assert_allclose(level_weights(t, sigma), expected, atol=1e-12)


def test_what_is_left_is_weighted_and_its_time_is_not():
    ones = torch.ones(40, dtype=torch.float64)
    table = {"irreducible": torch.stack([ones, 2 * ones])}
    for name in probe.TARGETS:
        table |= {name: torch.stack([0 * ones, ones]), f"{name}_ms": torch.stack([ones, 5 * ones])}
    # Two of three draws are at the first level, and the one at the second counts four times.
    training = Training("a run", np.array([1.0, 1.0, 8.0]), np.array([1.0, 1.0, 4.0]), None)
    left = remainders_of(table, training, level_weights(np.array([1.0, 8.0]), training.sigma))
    assert left["KNN"] == Remainder(pytest.approx(4 / 10), pytest.approx(0), pytest.approx(7 / 3))


def test_the_cheapest_estimator_leaves_less_than_a_hundredth():
    left = {"a": Remainder(0.01, 0, 1.0), "b": Remainder(0.009, 0, 2.0), "c": Remainder(0, 0, 3.0)}
    assert cheapest(left) == "b"
    assert cheapest({"a": left["a"], "d": Remainder(math.nan, math.nan, 0.1)}) is None
