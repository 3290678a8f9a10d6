"""Self-normalised importance sampling (Eq. 11, eq:SNIS_estimator): its variance (Eq. 12), its law and the theorems."""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import binom

from lit_knn.estimators import KNN, STF, MonteCarlo, UniformSNIS
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
from lit_knn.theory.snis import centred_sum

# Weights and means


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 64, 1000])
def test_weighted_mean_is_the_sum_and_keeps_bits_of_copies(dtype, n):
    generator = torch.Generator().manual_seed(n)
    weights = torch.softmax(4 * torch.randn(5, n, dtype=torch.float64, generator=generator), dim=1)
    weights[0] = 1 / n
    for scale in (1e-4, 1.0, 300.0):
        x = (scale * torch.randn(5, n, 3, 4, generator=generator)).to(dtype)
        mean = centred_sum(weights, x)
        expected = (weights[..., None, None] * x.double()).sum(1)
        # Weights and deviations are rounded to the type of the images.
        torch.testing.assert_close(mean, expected, rtol=0, atol=20 * scale * torch.finfo(dtype).eps)
        copies = x[:, :1].expand(-1, n, -1, -1)
        assert torch.equal(centred_sum(weights, copies), copies[:, 0].double())
    # Rounded to float32, numbers near 1000 have steps of 6e-5.
    x = 1000 + torch.tensor([0.0, 2**-13, 2**-12]).reshape(1, 3, 1)
    mean = centred_sum(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64), x)
    assert mean.item() == pytest.approx(1000 + 0.7 * 2**-13, abs=1e-8)


# The laws of estimates. K images lie on a circle around z and the other N − K on a larger one, where an image has a
# quarter of the likelihood. The third coordinate tells the circle: 1 or −1.

N, K, DRAWS, NOISE = 60, 10, 4, 1.0
# A deviation above so many standard errors comes by chance once in a million.
LIMIT = NormalDist().inv_cdf(1 - 0.5e-6)


def two_circles():
    # The golden angle spreads the images.
    angles, near = torch.arange(N) * 2.399963, torch.arange(N) < K
    radius = torch.where(near, 1.0, math.sqrt(1 + 2 * math.log(4)))
    return torch.stack(
        [radius * angles.cos(), radius * angles.sin(), torch.where(near, 1.0, -1.0)], 1
    )


class Law(NamedTuple):
    """Exact moments of a random number: mean, variance and fourth central moment."""

    mean: float
    variance: float
    fourth: float

    def accepts(self, numbers):
        """Whether mean and variance of the numbers are those of the law."""
        central = numbers.double() - self.mean
        mean = central.mean() / math.sqrt(self.variance)
        variance = (central.square().mean() - self.variance) / math.sqrt(
            self.fourth - self.variance**2
        )
        return max(abs(mean), abs(variance)) * math.sqrt(len(numbers)) < LIMIT


def law_of(kind, weight=0.25, far=N - K):
    """The law of the estimate's third coordinate, from the number of far images among the draws.

    Args:
        kind: the estimator.
        weight: likelihood of a far image relative to a near one.
        far: number of far images.
    """
    # The farthest neighbour's likelihood is that of all neighbours here, so q is uniform.
    share = far / (K + far)
    if kind is MonteCarlo:
        share, weight = far * weight / (K + far * weight), 1.0
    random = DRAWS - (kind is STF)  # The source of STF is a near image.
    number = np.arange(random + 1)
    mass, probability = number * weight, binom.pmf(number, random, share)
    values = (DRAWS - number - mass) / (DRAWS - number + mass)
    mean = probability @ values
    return Law(mean, *(probability @ (values - mean) ** power for power in (2, 4)))


@pytest.mark.parametrize(
    "kind", [KNN, UniformSNIS, STF, MonteCarlo], ids=lambda kind: kind.__name__
)
def test_estimates_follow_their_law_and_none_2_percent_off(kind):
    estimator = (KNN(K, DRAWS) if kind is KNN else kind(DRAWS)).bind(ReferenceSet(two_circles()))
    z, source = torch.zeros(50_000, 3), two_circles()[:1].expand(50_000, -1)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.cat(
        [estimator.posterior_mean(z, NOISE, source, generator)[:, 2] for _ in range(12)]
    )
    law = law_of(kind)
    assert law.accepts(numbers)
    others = [law_of(kind, 0.25 * 1.02), law_of(kind, 0.25 / 1.02), law_of(kind, far=N - K - 1)]
    assert not any(
        other.accepts(numbers) for other in [*others, law._replace(variance=law.variance * 1.02)]
    )
    # Rows are independent: sums of pairs, across the batch and across calls, have twice the variance.
    for pairs in (
        numbers[::2] + numbers[1::2],
        numbers[: len(numbers) // 2] + numbers[len(numbers) // 2 :],
    ):
        assert Law(2 * law.mean, 2 * law.variance, 2 * law.fourth + 6 * law.variance**2).accepts(
            pairs
        )


# Theorems 4.1 (thm:knn_bound) and 4.2 (thm:knn_vs_stf)


class Case:
    """N random points, latents at noise t, and both sides of the theorems with k nearest neighbours and one draw."""

    def __init__(self, N, k, t):
        rng = np.random.default_rng((0, N, k))
        x = torch.tensor(rng.normal(size=(N, 3)))
        z = x[rng.integers(N, size=8)] + t * torch.tensor(rng.normal(size=(8, 3)))
        sq_dist = (z[:, None] - x).square().sum(2)
        found, ids = sq_dist.topk(k, largest=False)
        log_p, proposal = log_posterior(sq_dist, t), neighbour_proposal(found, ids, t, N)
        deviation = (x - (log_p.exp() @ x)[:, None]).square().sum(2)
        self.left = snis_trace(log_p, dense_log_q(proposal), deviation, 1)
        self.trace = monte_carlo_trace(log_p, deviation, 1)
        ratio = normaliser_ratio(unnormalised_log_likelihood(sq_dist, t), proposal.log_Zq)
        self.bound_4_1 = theorem_4_1_bound(ratio, self.trace)
        uniform, mass = uniform_trace(log_p, deviation, 1), log_p.exp().gather(1, ids).sum(1)
        self.bound_4_2 = theorem_4_2_bound(mass, self.trace, uniform, k, N)


@pytest.mark.parametrize("t", [0.05, 0.3, 1.0, 3.0, 30.0])
def test_theorems_hold_as_equalities_if_all_are_neighbours(t):
    for N in (5, 30, 60):
        for k in (1, 3, N // 2, N - 1):
            case = Case(N, k, t)
            for bound in (case.bound_4_1, case.bound_4_2):
                # The absolute tolerance is for posteriors on one image: their variances are only rounding errors.
                assert (case.left <= bound * (1 + 1e-9) + 1e-30).all()
        case = Case(N, N, t)
        for side in (case.trace, case.bound_4_1, case.bound_4_2):
            torch.testing.assert_close(case.left, side)


@pytest.mark.parametrize(
    "index", [FaissIndex("Flat"), FaissIndex("IVF8,Flat", nprobe=1)], ids=["exact", "lists"]
)
@pytest.mark.parametrize("t", [0.5, 0.2])
def test_diagnostics_of_a_search_are_those_of_plain_enumeration(index, t):
    N, B, d, k, n = 60, 40, 8, 7, 5
    x = torch.randn(N, d, generator=torch.Generator().manual_seed(0))
    z = x[:B] + 0.5 * torch.randn(B, d, generator=torch.Generator().manual_seed(1))
    reference, mu = ReferenceSet(x, index), posterior_mean(z, x, t)
    found = search_diagnostics(KNN(k, n).bind(reference), z, t, mu)
    sq_dist = (z.double()[:, None] - x.double()).square().sum(2)
    for row, ids in enumerate(reference.search(z, k)[1].tolist()):
        near = [i for i in ids if i >= 0]
        far = [i for i in range(N) if i not in near]
        q = likelihood = ((sq_dist[row].min() - sq_dist[row]) / (2 * t**2)).exp()
        q = q.index_fill(0, torch.tensor(far), likelihood[near].min().item())
        ratio, p, q = q.sum() / likelihood.sum(), likelihood / likelihood.sum(), q / q.sum()
        deviation, mass = (x - mu[row]).square().sum(1), p[near].sum()
        # It cancels against its own share.
        deviation[p.argmax()] = (p @ (x[p.argmax()] - x).double()).square().sum()
        monte_carlo, uniform = p @ deviation / n, (p**2 * N) @ deviation / n
        recall = len({*near} & {*sq_dist[row].topk(k, largest=False).indices.tolist()}) / k
        eq_12, bound_4_1 = (p**2 / q) @ deviation / n, ratio * monte_carlo
        bound_4_2 = mass * monte_carlo + (N - k) / N * uniform
        expected = [recall, mass, ratio, eq_12 / d, bound_4_1 / d, bound_4_2 / d]
        # The search is in float32.
        assert [values[row].item() for values in found] == pytest.approx(
            [*map(float, expected)], rel=1e-4, abs=0
        )
    assert found.recall.mean() == 1 if index.nprobe is None else found.recall.mean() < 0.95
