"""Theorems 4.1 (thm:knn_bound) and 4.2 (thm:knn_vs_stf) against Eq. 12, by enumeration in float64."""

import numpy as np
import pytest
import torch

from lit_knn.estimators import KNN
from lit_knn.index import FaissIndex
from lit_knn.metrics.diagnostics import search_diagnostics
from lit_knn.reference import ReferenceSet
from lit_knn.theory.bounds import (
    monte_carlo_trace,
    normaliser_ratio,
    snis_trace,
    theorem_4_1_bound,
    theorem_4_2_bound,
    uniform_trace,
)
from lit_knn.theory.posterior import log_posterior, posterior_mean, unnormalised_log_likelihood
from lit_knn.theory.proposal import dense_log_q, neighbour_proposal
from lit_knn.theory.snis import snis_variance

NOISE = (0.05, 0.3, 1.0, 3.0, 30.0)


class Case:
    """N random points, B latents at noise t, and Eq. 13 with given neighbours (by default the k nearest)."""

    def __init__(self, N, k, t, seed=0, farthest=False):
        rng = np.random.default_rng((seed, N, k))
        self.N, self.k, self.t = N, k, t
        self.x = torch.tensor(rng.normal(size=(N, 3)))
        self.z = self.x[rng.integers(N, size=8)] + t * torch.tensor(rng.normal(size=(8, 3)))
        self.sq_dist = (self.z[:, None] - self.x).square().sum(2)
        self.ids = self.sq_dist.argsort(1, descending=farthest)[:, :k]
        self.log_p = log_posterior(self.sq_dist, t)
        self.proposal = neighbour_proposal(self.sq_dist.gather(1, self.ids), self.ids, t, N)
        self.mu = self.log_p.exp() @ self.x
        self.deviation = (self.x - self.mu[:, None]).square().sum(2)
        self.neighbour_mass = self.log_p.exp().gather(1, self.ids).sum(1)

    def left(self, n):
        """The trace of Eq. 12 with the nearest-neighbour proposal."""
        return snis_variance(self.log_p.exp(), dense_log_q(self.proposal).exp(), self.x, n).sum(1)

    def right_4_1(self, n):
        ratio = normaliser_ratio(unnormalised_log_likelihood(self.sq_dist, self.t), self.proposal.log_Zq)
        return theorem_4_1_bound(ratio, monte_carlo_trace(self.log_p, self.deviation, n))

    def right_4_2(self, n, neighbour_mass=None):
        mass = self.neighbour_mass if neighbour_mass is None else neighbour_mass
        traces = monte_carlo_trace(self.log_p, self.deviation, n), uniform_trace(self.log_p, self.deviation, n)
        return theorem_4_2_bound(mass, *traces, self.k, self.N)


def cases(**options):
    for N in (5, 30, 60):
        for k in (1, 3, N // 2, N - 1):
            for t in NOISE:
                for n in (1, 7):
                    yield Case(N, k, t, **options), n


def holds(left, right):
    # The absolute tolerance is for posteriors on one image: their variances are only rounding errors.
    return (left <= right * (1 + 1e-9) + 1e-30).all()


def test_theorem_4_1_holds():
    assert all(holds(case.left(n), case.right_4_1(n)) for case, n in cases())


def test_theorem_4_2_holds():
    assert all(holds(case.left(n), case.right_4_2(n)) for case, n in cases())


def test_the_bounds_are_not_idle():
    # With k well below N, each bound is within 10 % of its value somewhere, and neither bound is always smaller.
    pairs = [(case.left(n), case.right_4_1(n), case.right_4_2(n)) for case, n in cases() if case.k == case.N // 2]
    left, first, second = (torch.cat(values) for values in zip(*pairs, strict=True))
    real = left > 1e-12
    assert (first < 1.1 * left)[real].any()
    assert (second < 1.1 * left)[real].any()
    assert (first < 0.9 * second)[real].any()
    assert (second < 0.99 * first)[real].any()


@pytest.mark.parametrize("t", NOISE)
def test_with_all_images_as_neighbours_both_are_equalities(t):
    case = Case(20, 20, t)
    torch.testing.assert_close(case.left(4), case.right_4_1(4))
    torch.testing.assert_close(case.left(4), case.right_4_2(4))
    torch.testing.assert_close(case.left(4), monte_carlo_trace(case.log_p, case.deviation, 4))


def test_the_traces_are_those_of_eq_12():
    case = Case(30, 5, 1.0)
    p = case.log_p.exp()
    for q, trace in (
        (dense_log_q(case.proposal).exp(), snis_trace(case.log_p, dense_log_q(case.proposal), case.deviation, 3)),
        (torch.full_like(p, 1 / 30), uniform_trace(case.log_p, case.deviation, 3)),
    ):
        torch.testing.assert_close(trace, snis_variance(p, q, case.x, 3).sum(1))


def test_the_ratio_of_normalisers():
    for t, k, expected in ((1e-3, 3, 1.0), (1e6, 3, 1.0), (1.0, 30, 1.0)):
        case = Case(30, k, t)
        ratio = normaliser_ratio(unnormalised_log_likelihood(case.sq_dist, t), case.proposal.log_Zq)
        torch.testing.assert_close(ratio, torch.full_like(ratio, expected), rtol=1e-5, atol=0)
    case = Case(30, 3, 1.0)
    likelihood = (-case.sq_dist / 2).exp()
    Zq = likelihood.gather(1, case.ids).sum(1) + 27 * likelihood.gather(1, case.ids[:, -1:])[:, 0]
    ratio = normaliser_ratio(likelihood.log(), case.proposal.log_Zq)
    torch.testing.assert_close(ratio, Zq / likelihood.sum(1))
    assert (ratio > 1.01).any()


def test_diagnostics_of_a_reference_set_are_those_of_enumeration():
    case = Case(60, 7, 1.0)
    x, z = case.x.float(), case.z.float()
    knn = KNN(k=7, n=5).bind(ReferenceSet(x))
    found = search_diagnostics(knn, z, 1.0, posterior_mean(z, x, 1.0))
    expected = {
        "recall": torch.ones(8, dtype=torch.float64),
        "found_mass": case.neighbour_mass,
        "eq12_variance": case.left(5) / 3,
        "bound_4_1": case.right_4_1(5) / 3,
        "bound_4_2": case.right_4_2(5) / 3,
    }
    for name, values in expected.items():
        torch.testing.assert_close(getattr(found, name), values, rtol=1e-4, atol=1e-7)


def test_recall_and_mass_tell_what_an_approximate_search_misses():
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(400, 3)), dtype=torch.float32)
    reference = ReferenceSet(x, index=FaissIndex("IVF8,Flat", nprobe=1))
    z = x[:40] + 0.5 * torch.tensor(rng.normal(size=(40, 3)), dtype=torch.float32)
    found = search_diagnostics(KNN(k=50, n=5).bind(reference), z, 0.5, posterior_mean(z, x, 0.5))
    _, ids = reference.search(z, 50)
    nearest = (z[:, None] - x).square().sum(2).argsort(1)[:, :50]
    for row in range(40):
        kept = set(ids[row].tolist()) - {-1}
        assert found.recall[row] == pytest.approx(len(kept & set(nearest[row].tolist())) / 50, abs=0.021)
    assert 0.2 < found.recall.mean() < 0.95
    assert 0.2 < found.found_mass.mean() < 0.99
