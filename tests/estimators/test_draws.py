"""Means of drawn images: their law by enumeration in float64, approximate searches, and the source as a neighbour."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from lit_knn.common.settings import describe
from lit_knn.estimators import (
    KNN,
    STF,
    Exact,
    MonteCarlo,
    OneSample,
    Switched,
    UniformSNIS,
    class_conditional,
)
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet
from lit_knn.theory.bounds import snis_trace
from lit_knn.theory.proposal import dense_log_q
from tests.any_data import all_images, enumerated_mean, log_posterior
from tests.every_estimator import every_estimator


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def vectors(N=40, index=None):
    return ReferenceSet(torch.randn(N, 3, generator=rng()), index)


def levels(t, B):
    return torch.full((B,), t, dtype=torch.float64)


def latents(reference, t, B=5):
    """Images of the set, their ids, and latents z = x + t·ε."""
    ids = torch.randint(reference.N, (B,), generator=rng(1))
    x = reference.gather(ids)
    noise = torch.randn(x.shape, generator=rng(2))
    return x, ids, x + torch.as_tensor(t, dtype=torch.float32).reshape(-1, *[1] * (x.ndim - 1)) * noise


def repeated(estimator, z, t, R):
    """Make R independent estimates for one z (1, d); returns (R, d)."""
    return estimator.posterior_mean(z.expand(R, -1), t, generator=rng()).double()


# k = N makes q the posterior. All weights are then equal, so the estimate has the bias and variance of Eq. 9.
@pytest.mark.parametrize("t", [0.002, 0.5, 1.0, 2.0, 80.0])
@pytest.mark.parametrize(("kind", "n"), [(MonteCarlo, 1), (MonteCarlo, 10), (lambda n: KNN(40, n), 10)])
def test_draws_of_the_posterior_are_unbiased_with_variance_over_n(kind, n, t):
    reference, R = vectors(), 10_000
    z = latents(reference, t, 1)[2]
    p, x = log_posterior(reference, z, levels(t, 1)).exp()[0], all_images(reference).double()
    mu = p @ x
    variance = p @ (x - mu).square() / n
    means = repeated(kind(n).bind(reference), z, t, R)
    # Five standard errors; the second from the fourth moment, which is large if few images dominate.
    assert ((means.mean(0) - mu).abs() < 5 * (variance / R).sqrt() + 1e-6).all()
    squared = (means - mu).square()
    assert ((squared.mean(0) - variance).abs() < 5 * squared.std(0) / R**0.5 + 1e-12).all()


@pytest.mark.parametrize("k", [3, 12])
def test_knn_has_the_variance_of_eq_12(k):
    reference, t, n, R = vectors(), 0.8, 400, 4000
    z, x = latents(reference, t, 1)[2], all_images(reference).double()
    likelihood = torch.exp(-(x - z.double()).square().sum(1) / (2 * t**2))
    p = likelihood / likelihood.sum()
    q = likelihood.clamp(min=likelihood.topk(k).values[-1])  # Eq. 13
    predicted = (p.square() / (q / q.sum())) @ (x - p @ x).square() / n
    error = (repeated(KNN(k, n).bind(reference), z, t, R) - p @ x).square().mean(0)
    # A sample variance of 4,000 has a standard error of a few per cent.
    np.testing.assert_allclose(error, predicted, rtol=0.15)


@pytest.mark.parametrize(
    "make", [UniformSNIS, STF, MonteCarlo, lambda n: KNN(5, n), lambda n: KNN(40, n)], ids=range(5)
)
def test_sampled_means_converge_to_the_mean_at_the_level_of_each_item(make):
    reference, t = vectors(), torch.tensor([0.8, 3.0, 0.8, 1.5, 3.0, 2.0], dtype=torch.float64)
    x, _, z = latents(reference, t, len(t))
    expected = enumerated_mean(reference, z, t)
    errors = []
    for n in (16, 512, 16_384):
        estimates = make(n).bind(reference).posterior_mean(z, t, x, rng(n))
        errors.append((estimates.double() - expected).square().mean().sqrt().item())
    assert errors[0] > 2 * errors[1] > 4 * errors[2]  # 5.7 each on average
    assert errors[2] < 0.04


class Blind(FaissIndex):
    """Finds no image."""

    def search(self, queries, k):
        sq_dist, ids = super().search(queries, k)
        return torch.full_like(sq_dist, torch.inf), torch.full_like(ids, -1)


# A search of one list misses near images, and they join the tail. If the tail has no mass they are never drawn, so only
# larger t show that the weights correct the search.
@pytest.mark.parametrize(
    ("index", "t"),
    [
        (FaissIndex("SQ8"), 0.002),
        (FaissIndex("SQ8"), 1.0),
        (FaissIndex("IVF8,Flat", 8), 0.3),
        (FaissIndex("IVF8,Flat", 1), 1.5),
        (FaissIndex("IVF8,SQ8", 1), 3.0),
        (Blind("Flat"), 1.5),
    ],
)
def test_knn_with_an_approximate_search_stays_consistent(index, t):
    reference = vectors(60, index)
    z = latents(reference, t, 8)[2]
    assert (reference.search(z, 30)[1] < 0).any() == (getattr(index, "nprobe", None) == 1 or type(index) is Blind)
    found = KNN(30, 30_000).bind(reference).posterior_mean(z, t, generator=rng())
    # Six times sqrt(Var(x)/n).
    torch.testing.assert_close(found.double(), enumerated_mean(reference, z, levels(t, 8)), rtol=0, atol=0.04)


def near_copies(copies, shape, index=None):
    """Random images; the first one has `copies` versions, each with one pixel changed by one grey level."""
    images = torch.randint(0, 256, (20 + copies, *shape), dtype=torch.uint8, generator=rng())
    images[:copies] = images[0]
    for i in range(1, copies):
        images[i].view(-1)[i] ^= 1
    return ReferenceSet(images, index)


@pytest.mark.parametrize(("copies", "k"), [(2, 5), (5, 20), (30, 5), (30, 20)])
def test_images_one_grey_level_apart_are_told_apart_at_t_min(copies, k):
    # The posterior depends on a difference of 6e-5 in sq_dist; expanded float32 distances cannot show it.
    reference, t = near_copies(copies, (3, 8, 8)), 0.002
    z = reference.gather(torch.arange(2)).repeat(4, 1, 1, 1) + t * torch.randn(8, 3, 8, 8, generator=rng(1))
    expected = enumerated_mean(reference, z, levels(t, 8))
    exact = Exact().bind(reference).posterior_mean(z, t)
    torch.testing.assert_close(exact.double(), expected, rtol=0, atol=2e-6)
    # The images differ by 1/127.5 in those pixels. A tenth of that is visible.
    estimate = KNN(k, 4000).bind(reference).posterior_mean(z, t, generator=rng())
    torch.testing.assert_close(estimate.double(), expected, rtol=0, atol=8e-4)


def test_an_eight_bit_search_tells_near_copies_apart_with_few_draws():
    # SQ8 has an error of half a level. A proposal from only its distances would nearly always draw the wrong copy.
    reference, t = near_copies(5, (3, 32, 32), FaissIndex("SQ8")), 0.002
    z = reference.gather(torch.arange(2)).repeat(16, 1, 1, 1) + t * torch.randn(32, 3, 32, 32, generator=rng(1))
    estimate = KNN(k=5, n=64).bind(reference).posterior_mean(z, t, generator=rng())
    error = (estimate - enumerated_mean(reference, z, levels(t, 32))).flatten(1).norm(dim=1)
    assert error.max() < 0.25 / 127.5  # a quarter of the level by which they differ


def test_far_from_every_image_small_t_gives_the_nearest():
    # Every likelihood underflows, because the latent does not come from the process at this t.
    reference, z = vectors(20), 3 * torch.randn(5, 3, generator=rng(4))
    nearest = all_images(reference)[torch.cdist(z, all_images(reference)).argmin(1)]
    for estimator in (Exact(), MonteCarlo(5), KNN(3, 5), KNN(20, 5)):
        mean = estimator.bind(reference).posterior_mean(z, 0.002, generator=rng())
        torch.testing.assert_close(mean, nearest, rtol=0, atol=1e-6)


# STF


def test_stf_averages_n_images_the_source_included():
    # At large t all weights are equal, so a source far from every image has weight 1/n, whatever the batch size.
    reference = ReferenceSet(torch.zeros(10, 2))
    for n, B in itertools.product((1, 2, 5, 100), (1, 300)):
        mean = STF(n).bind(reference).posterior_mean(torch.zeros(B, 2), 1e6, torch.full((B, 2), 1.0))
        torch.testing.assert_close(mean, torch.full((B, 2), 1 / n), rtol=1e-5, atol=0)


def test_the_targets_of_stable_velocity_have_the_enumerated_law():
    # A class has N images, of which a bank has n. A second class is far away. The source of z comes from the posterior,
    # and the others are independent of z.
    N, n, t, R = 4, 3, 1.3, 40_000
    x, z = torch.randn(N, 2, generator=rng(3)), torch.tensor([0.4, -0.2])
    p = torch.exp(-(z.double() - x.double()).square().sum(1) / (2 * t**2))
    law = Counter()
    for source, *others in itertools.product(range(N), repeat=n):
        law[tuple(sorted((source, *others)))] += p[source].item()
    targets = torch.stack([p[list(bank)] @ x[list(bank)].double() / p[list(bank)].sum() for bank in law])
    made = every_estimator(n=n)["stable_velocity"]()
    assert describe(made) == describe(Switched(OneSample(), STF(n), 1.0))
    generator = rng(5)
    sources = x[torch.multinomial(p, R, replacement=True, generator=generator)]
    given = z.expand(R, 2), torch.zeros(R, dtype=torch.int64)
    bound = class_conditional(made).bind(ReferenceSet(torch.cat([x, x + 9]), labels=torch.arange(2 * N) // N))
    mean = bound.posterior_mean(given[0], t, sources, generator, given[1])
    distance, nearest = torch.cdist(mean.double(), targets).min(1)
    assert distance.max() < 1e-5
    expected = torch.tensor([*law.values()], dtype=torch.float64) / law.total() * R
    assert chisquare(torch.bincount(nearest, minlength=len(law)), expected).pvalue > 1e-3
    # Below the switch it is the source, whatever the bank.
    assert torch.equal(bound.posterior_mean(given[0], 0.999, sources, generator, given[1]), sources)


# KNN with the source of z


def few_lists(index=None):
    """Images whose index searches one of forty lists and so misses most of them."""
    images = torch.randint(0, 256, (400, 3, 4, 4), generator=rng()).to(torch.uint8)
    return ReferenceSet(images, index or FaissIndex("IVF40,Flat", nprobe=1), hflip=True)


@pytest.mark.parametrize(
    "index", [FaissIndex("SQ8", lossless=True), FaissIndex("IVF40,SQ8", nprobe=3), FaissIndex("IVF40,Flat", nprobe=1)]
)
def test_images_of_the_set_are_located_and_searches_stay_as_they_were(index):
    reference = few_lists(index)
    z = latents(reference, 1.0, 20)[2]
    before = reference.search(z, 30)[1]
    assert torch.equal(reference.locate(all_images(reference)), torch.arange(reference.N))
    assert torch.equal(reference.search(z, 30)[1], before)


@pytest.mark.parametrize("t", [0.1, 2.0, 80.0])
def test_with_exact_search_the_source_changes_nothing(t):
    reference = few_lists(FaissIndex("Flat"))
    x, _, z = latents(reference, t, 200)
    plain = KNN(50, 16).bind(reference).posterior_mean(z, t, x, rng(4))
    assert torch.equal(plain, KNN(50, 16, include_source=True).bind(reference).posterior_mean(z, t, x, rng(4)))


@pytest.mark.parametrize("t", [0.3, 1.0, 3.0, 80.0])
def test_the_proposal_is_a_distribution_that_holds_the_source(t):
    reference = few_lists()
    x, ids, z = latents(reference, t, 200)
    proposal = KNN(50, 16, include_source=True).bind(reference).proposal(z, levels(t, 200), x)
    log_q = dense_log_q(proposal)
    torch.testing.assert_close(log_q.exp().sum(1), torch.ones(200, dtype=torch.float64))
    # The source has at least a tail image's probability; if it is missed but nearer, it has its own likelihood.
    own, added = log_q.gather(1, ids[:, None])[:, 0], proposal.ids[:, -1] >= 0
    assert (own >= proposal.log_q_tail - 1e-12).all()
    assert torch.equal(proposal.ids[added, -1], ids[added])
    assert (own[added] > proposal.log_q_tail[added]).all()
    for row in proposal.ids.tolist():
        assert max(Counter(i for i in row if i >= 0).values()) == 1
    if t <= 1.0:
        assert added.any()
        assert (proposal.ids == ids[:, None]).any(1).all()


def test_with_the_source_it_stays_consistent():
    # At n = 4,000 the error is only the variance of Eq. 12 with this proposal; it falls as 1/n.
    reference, t, n = few_lists(), 2.0, 4000
    x, _, z = latents(reference, t, 40)
    estimator = KNN(20, n, include_source=True).bind(reference)
    log_p, images = log_posterior(reference, z, levels(t, 40)), all_images(reference).double()
    log_q, mu = dense_log_q(estimator.proposal(z, levels(t, 40), x)), enumerated_mean(reference, z, levels(t, 40))
    sq_deviation = (images - mu.unsqueeze(1)).flatten(2).square().sum(2)
    expected = snis_trace(log_p, log_q, sq_deviation, n) / reference.d
    errors = [(estimator.posterior_mean(z, t, x, rng(6 + i)) - mu).square().flatten(1).mean(1) for i in range(10)]
    # 400 errors of 48 dimensions: five standard errors are below 0.2.
    assert math.isclose((torch.stack(errors).mean(0) / expected).mean().item(), 1, abs_tol=0.2)
