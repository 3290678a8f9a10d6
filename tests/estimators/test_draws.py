"""Means of drawn images: their law by enumeration in float64, approximate searches, and the source as a neighbour."""

import itertools
from collections import Counter

import pytest
import torch

from lit_knn.common.settings import describe
from lit_knn.estimators import KNN, STF, OneSample, Switched
from lit_knn.index import FaissIndex
from lit_knn.index.torch_index import FlatIndex
from lit_knn.reference import ReferenceSet
from lit_knn.theory.proposal import dense_log_q
from tests.any_data import all_images, enumerated_mean
from tests.every_estimator import every_estimator
from tests.toys import rng


def vectors(N=40, index=None):
    return ReferenceSet(torch.randn(N, 3, generator=rng()), index)


def levels(t, B):
    return torch.full((B,), t, dtype=torch.float64)


def latents(reference, t, B=5):
    """Images of the set, their ids, and latents z = x + t·ε."""
    ids = torch.randint(reference.N, (B,), generator=rng(1))
    x = reference.gather(ids)
    noise = torch.randn(x.shape, generator=rng(2))
    return (
        x,
        ids,
        x + torch.as_tensor(t, dtype=torch.float32).reshape(-1, *[1] * (x.ndim - 1)) * noise,
    )


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
    assert (reference.search(z, 30)[1] < 0).any() == (
        getattr(index, "nprobe", None) == 1 or type(index) is Blind
    )
    found = KNN(30, 30_000).bind(reference).posterior_mean(z, t, generator=rng())
    # Six times sqrt(Var(x)/n).
    torch.testing.assert_close(
        found.double(), enumerated_mean(reference, z, levels(t, 8)), rtol=0, atol=0.04
    )


def near_copies(copies, shape, index=None):
    """Random images; the first one has `copies` versions, each with one pixel changed by one grey level."""
    images = torch.randint(0, 256, (20 + copies, *shape), dtype=torch.uint8, generator=rng())
    images[:copies] = images[0]
    for i in range(1, copies):
        images[i].view(-1)[i] ^= 1
    return ReferenceSet(images, index)


def test_eight_bit_search_separates_near_copies_with_few_draws():
    # SQ8 has an error of half a level. A proposal from only its distances would nearly always draw the wrong copy.
    reference, t = near_copies(5, (3, 32, 32), FaissIndex("SQ8")), 0.002
    z = reference.gather(torch.arange(2)).repeat(16, 1, 1, 1) + t * torch.randn(
        32, 3, 32, 32, generator=rng(1)
    )
    estimate = KNN(k=5, n=64).bind(reference).posterior_mean(z, t, generator=rng())
    error = (estimate - enumerated_mean(reference, z, levels(t, 32))).flatten(1).norm(dim=1)
    assert error.max() < 0.25 / 127.5  # a quarter of the level by which they differ


# STF


def test_stf_averages_n_images_the_source_included():
    # At large t all weights are equal, so a source far from every image has weight 1/n, whatever the batch size.
    reference = ReferenceSet(torch.zeros(10, 2))
    for n, B in itertools.product((1, 2, 5, 100), (1, 300)):
        mean = (
            STF(n).bind(reference).posterior_mean(torch.zeros(B, 2), 1e6, torch.full((B, 2), 1.0))
        )
        torch.testing.assert_close(mean, torch.full((B, 2), 1 / n), rtol=1e-5, atol=0)


def test_stable_velocity_is_stf_above_a_switch():
    assert describe(every_estimator(n=3)["stable_velocity"]()) == describe(
        Switched(OneSample(), STF(3), 1.0)
    )


# KNN with the source of z


def few_lists(index=None):
    """Images whose index searches one of forty lists and so misses most of them."""
    images = torch.randint(0, 256, (400, 3, 4, 4), generator=rng()).to(torch.uint8)
    return ReferenceSet(images, index or FaissIndex("IVF40,Flat", nprobe=1), hflip=True)


def test_source_behind_rough_neighbours_keeps_its_likelihood():
    # The search sees one component alone. The likelihood needs the distance in all of them.
    x = torch.cat([torch.linspace(0, 1, 60)[:, None], 9 * torch.randn(60, 3, generator=rng())], 1)
    reference = ReferenceSet(x, FirstComponent())
    z = x + torch.tensor([0.4, 0.0, 0.0, 0.0])
    mean = KNN(60, 60, include_source=True).bind(reference).posterior_mean(z, 0.4, x, rng())
    assert (mean - x).abs().amax(1).median() < 1e-3  # Some of the other images are near, too.


class FirstComponent(FlatIndex):
    """Searches by the first component of vectors, with distances that are too large, but locates them by all."""

    def build(self, vectors):
        super().build(vectors)
        self.few = torch.cat([*vectors.chunks()])[:, 0]

    def search(self, queries, k):
        sq_dist, ids = (queries[:, :1] - self.few).square().sort(1)
        return 25 * sq_dist[:, :k], ids[:, :k]

    def locate(self, queries):
        return super().search(queries, 1)


class Careless(KNN):
    """Draws without the generator that it gets."""

    def draw(self, z, t, x_source, generator):
        return super().draw(z, t, x_source, None)


def test_certificate_is_of_the_mean_whatever_made_the_draws():
    estimator = Careless(8, 4).bind(vectors())
    z = latents(estimator.reference, 2.0)[2]
    means = [estimator.certified_mean(z, 2.0, generator=rng(3)).mean for _ in range(2)]
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], estimator.posterior_mean(z, 2.0, generator=rng(3)))


@pytest.mark.parametrize(
    "index",
    [
        FaissIndex("SQ8", lossless=True),
        FaissIndex("IVF40,SQ8", nprobe=3),
        FaissIndex("IVF40,Flat", nprobe=1),
    ],
)
def test_images_of_the_set_are_located_and_searches_unchanged(index):
    reference = few_lists(index)
    z = latents(reference, 1.0, 20)[2]
    before = reference.search(z, 30)[1]
    assert torch.equal(reference.locate(all_images(reference)), torch.arange(reference.N))
    assert torch.equal(reference.search(z, 30)[1], before)


@pytest.mark.parametrize("t", [0.1, 2.0, 80.0])
def test_with_exact_search_the_source_changes_nothing(t):
    reference = few_lists(FaissIndex("Flat"))
    x, _, z = latents(reference, t, 200)
    plain, same = KNN(50, 16).bind(reference), KNN(50, 16, include_source=True).bind(reference)
    plain, same = (one.posterior_mean(z, t, x, rng(4)) for one in (plain, same))
    # A distance of the search, in float32, may be replaced by one in float64.
    torch.testing.assert_close(plain, same, atol=1e-5, rtol=0)


@pytest.mark.parametrize("t", [0.3, 1.0, 3.0, 80.0])
def test_the_proposal_is_a_distribution_that_holds_the_source(t):
    reference = few_lists()
    x, ids, z = latents(reference, t, 200)
    proposal = KNN(50, 16, include_source=True).bind(reference).proposal(z, levels(t, 200), x)
    log_q = dense_log_q(proposal)
    torch.testing.assert_close(log_q.exp().sum(1), torch.ones(200, dtype=torch.float64))
    # The source has at least a tail image's probability; if it is missed but nearer, it has its own likelihood.
    own, added = log_q.gather(1, ids[:, None])[:, 0], proposal.ids[:, -1] >= 0
    assert (own >= proposal.log_q_padded[:, -1] - 1e-12).all()
    assert torch.equal(proposal.ids[added, -1], ids[added])
    assert (own[added] > proposal.log_q_padded[added, -1]).all()
    for row in proposal.ids.tolist():
        assert max(Counter(i for i in row if i >= 0).values()) == 1
    if t <= 1.0:
        assert added.any()
        assert (proposal.ids == ids[:, None]).any(1).all()
