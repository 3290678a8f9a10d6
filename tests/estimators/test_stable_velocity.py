"""Stable Velocity's target has the law of STF above the switch, by enumeration of all its draws in float64."""

import itertools
from collections import Counter

import torch
from scipy.stats import chisquare

from lit_knn.common.settings import describe
from lit_knn.estimators import STF, OneSample, Switched, class_conditional
from lit_knn.reference import ReferenceSet
from tests.every_estimator import every_estimator

# A class has N images, of which a bank has n. A second class is far away.
N, n, T = 4, 3, 1.3
DRAWS = 40_000
Z = torch.tensor([0.4, -0.2], dtype=torch.float64)


def reference():
    own = torch.randn(N, 2, generator=torch.Generator().manual_seed(3))
    return ReferenceSet(torch.cat([own, own + 9]), labels=torch.arange(2 * N) // N)


def likelihoods(x):
    return torch.exp(-(Z - x.double()).square().sum(1) / (2 * T**2))


def law_of_stf(x):
    """The law of STF's images given z: the source comes from the posterior, and the others are independent of z."""
    p, law = likelihoods(x), Counter()
    for source, *others in itertools.product(range(N), repeat=n):
        law[tuple(sorted((source, *others)))] += p[source].item()
    return {bank: weight / law.total() for bank, weight in law.items()}


def target(x, bank):
    p = likelihoods(x)[list(bank)]
    return (p[:, None] * x[list(bank)].double()).sum(0) / p.sum()


def test_drawn_targets_have_the_enumerated_law():
    data = reference()
    made = every_estimator(n=n)["stable_velocity"]()
    assert describe(made) == describe(Switched(OneSample(), STF(n), 1.0))
    x, generator = data.images[:N], torch.Generator().manual_seed(5)
    sources = torch.multinomial(likelihoods(x), DRAWS, replacement=True, generator=generator)
    z, labels = Z.float().expand(DRAWS, 2), torch.zeros(DRAWS, dtype=torch.int64)
    bound = class_conditional(made).bind(data)
    mean = bound.posterior_mean(z, T, x[sources], generator, labels)
    expected = law_of_stf(x)
    atoms = torch.stack([target(x, bank) for bank in expected])
    distance, nearest = torch.cdist(mean.double(), atoms).min(1)
    assert distance.max() < 1e-5
    counts = torch.bincount(nearest, minlength=len(expected))
    assert chisquare(counts, torch.tensor(list(expected.values())) * DRAWS).pvalue > 1e-3
    # Below the switch it is the source, whatever the bank.
    assert torch.equal(bound.posterior_mean(z, 0.999, x[sources], generator, labels), x[sources])
