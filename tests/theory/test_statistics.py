"""Means and variances of random estimates against their exact laws.

Each test compares a mean of many draws with its exact value, by the exact standard deviation. It refuses a deviation
above Z standard errors: by chance one in a million would. The draws are so many that an error of 2 % in the weights, in
the number of images outside the neighbours or in a variance deviates by 2·Z, so that one in a million would pass. Each
test shows this: it refuses the laws with these errors.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import binom

from lit_knn.estimators import KNN, STF, MonteCarlo, UniformSNIS
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import VP, forward_noise
from lit_knn.theory.proposal import neighbour_proposal, sample_proposal

FALSE_ALARM = 1e-6
Z = NormalDist().inv_cdf(1 - FALSE_ALARM / 2)

# K images lie on a circle around z and the other N − K on a larger one. The third coordinate tells the circle: 1 or −1.
N, K, NOISE = 60, 10, 1.0
NEAR, FAR = 1.0, math.sqrt(1 + 2 * math.log(4))  # An image of the larger circle has a quarter of the likelihood.
DRAWS = 4


def two_circles():
    angles = torch.arange(N) * 2.399963  # The golden angle spreads the images.
    radius = torch.where(torch.arange(N) < K, NEAR, FAR)
    circle = torch.where(torch.arange(N) < K, 1.0, -1.0)
    return torch.stack([radius * angles.cos(), radius * angles.sin(), circle], 1)


class Law(NamedTuple):
    """Exact moments of a random number: mean, variance and fourth central moment."""

    mean: float
    variance: float
    fourth: float

    @classmethod
    def of(cls, values, probabilities):
        mean = float(np.sum(probabilities * values))
        central = values - mean
        return cls(mean, *(float(np.sum(probabilities * central**power)) for power in (2, 4)))

    def deviations(self, numbers):
        """How many standard errors the mean and the variance of the numbers are off."""
        central = numbers.double() - self.mean
        errors = math.sqrt(self.variance), math.sqrt(self.fourth - self.variance**2)
        sums = central.mean(), central.square().mean() - self.variance
        return [float(off) * math.sqrt(len(numbers)) / error for off, error in zip(sums, errors, strict=True)]

    def accepts(self, numbers):
        return max(map(abs, self.deviations(numbers))) < Z

    def refuses(self, numbers, law):
        """Whether numbers of another law are refused, as all but one in a million would be."""
        off = law.mean - self.mean
        mean = off / math.sqrt(self.variance)
        variance = (law.variance + off**2 - self.variance) / math.sqrt(self.fourth - self.variance**2)
        is_sure = max(abs(mean), abs(variance)) * math.sqrt(len(numbers)) > 2 * Z
        return is_sure and not self.accepts(numbers)


def law_of(kind, weight=0.25, far=N - K):
    """The law of the estimate's third coordinate, from the number of far images among the draws.

    Args:
        kind: the estimator.
        weight: likelihood of a far image relative to a near one.
        far: number of far images.
    """
    share = far / (K + far)  # The farthest neighbour's likelihood is that of all neighbours here, so q is uniform.
    if kind is MonteCarlo:
        share, weight = far * weight / (K + far * weight), 1.0
    random = DRAWS - (kind is STF)  # The source of STF is a near image.
    number = np.arange(random + 1)
    mass = number * weight
    return Law.of((DRAWS - number - mass) / (DRAWS - number + mass), binom.pmf(number, random, share))


@pytest.mark.parametrize("kind", [KNN, UniformSNIS, STF, MonteCarlo], ids=lambda kind: kind.__name__)
def test_estimates_follow_their_law(kind):
    estimator = (KNN(K, DRAWS) if kind is KNN else kind(DRAWS)).bind(ReferenceSet(two_circles()))
    z = torch.zeros(50_000, 3)
    source = two_circles()[:1].expand(len(z), -1)
    generator = torch.Generator().manual_seed(0)
    estimates = [estimator.posterior_mean(z, NOISE, source, generator)[:, 2] for _ in range(12)]
    numbers, law = torch.cat(estimates), law_of(kind)
    assert law.accepts(numbers)
    assert law_of(kind, weight=0.25 * 1.02).refuses(numbers, law)
    assert law_of(kind, weight=0.25 / 1.02).refuses(numbers, law)
    assert law_of(kind, far=N - K - 1).refuses(numbers, law)
    assert law._replace(variance=law.variance * 1.02).refuses(numbers, law)
    # Rows are independent: sums of pairs, across the batch and across calls, have twice the variance.
    for pairs in (numbers[::2] + numbers[1::2], numbers[: len(numbers) // 2] + numbers[len(numbers) // 2 :]):
        fourth = 2 * law.fourth + 6 * law.variance**2
        assert Law(2 * law.mean, 2 * law.variance, fourth).accepts(pairs)


def proposal_of_distances():
    """A proposal with half of its mass in the tail, its neighbours, their probabilities, and that of another image."""
    sq_dist = torch.linspace(0.0, 4.0, K)
    likelihood = np.exp(-sq_dist.double().numpy() / 2)
    tail = likelihood[-1]
    total = likelihood.sum() + (N - K) * tail
    ids = torch.arange(3, 3 + 2 * K, 2)  # The tail has gaps.
    return neighbour_proposal(sq_dist[None], ids[None], 1.0, N), ids, likelihood / total, tail / total


def test_importance_weights_average_to_the_posterior():
    # E_q[p/q] over any images is their posterior probability, whatever q is.
    proposal, ids, near, tail = proposal_of_distances()
    drawn, log_q = sample_proposal(proposal, 1_000_000, torch.Generator().manual_seed(1))
    q = np.full(N, tail)
    q[ids] = near
    p = q * np.linspace(0.5, 1.5, N)
    p /= p.sum()
    weights = torch.tensor(p)[drawn[0]] * (-log_q[0]).exp()
    for some in (np.arange(N), ids.numpy(), np.setdiff1d(np.arange(N), ids.numpy())):
        values, others = np.append((p / q)[some], 0.0), 1 - q[some].sum()
        law = Law.of(values, np.append(q[some], others))
        numbers = weights * torch.isin(drawn[0], torch.tensor(some))
        assert law.accepts(numbers)
        for factor in (1.02, 1 / 1.02):
            assert law.refuses(numbers * factor, Law(law.mean * factor, law.variance * factor**2, 0.0))


@pytest.mark.parametrize(("process", "scale", "sigma"), [(None, 1.0, 0.7), (VP(), 0.5, math.sqrt(3))])
def test_noise_has_its_variance(process, scale, sigma):
    x = torch.full((1_000_000, 1), 0.3)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    # At this time VP's scale is 1/2, and 1/4 + (σ/2)² = 1.
    t = 0.7 if process is None else process.t_of_sigma(torch.tensor(sigma, dtype=torch.float64)).item()
    z = forward_noise(x, t, noise) if process is None else forward_noise(x, t, noise, process)
    deviation = scale * sigma
    law = Law(scale * 0.3, deviation**2, 3 * deviation**4)
    assert law.accepts(z[:, 0])
    for wrong in (law.variance * 1.02, law.variance / 1.02):
        assert law._replace(variance=wrong).refuses(z[:, 0], law)
    assert law._replace(mean=law.mean + 0.02).refuses(z[:, 0], law)
