"""The four flags of an estimator: ours are all right, and the check finds wrong ones."""

import copy
import pickle

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import (
    KNN,
    STF,
    ByClass,
    Estimator,
    Exact,
    MonteCarlo,
    OneSample,
    PatchPosterior,
    PCALocality,
    Smoothed,
    SubspaceKNN,
    Switched,
    TopK,
    UniformSNIS,
    Wiener,
    class_conditional,
)
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet, ShardedReferenceSet
from lit_knn.theory.warp import Warp

OURS = {
    "Exact": Exact,
    "KNN": lambda: KNN(k=6, n=8),
    "KNN with source": lambda: KNN(k=3, n=8, include_source=True),
    "MonteCarlo": lambda: MonteCarlo(n=8),
    "OneSample": OneSample,
    "STF": lambda: STF(n=8),
    "SubspaceKNN": lambda: SubspaceKNN(r=3, n=8, compute="float32"),
    "Switched": lambda: Switched(Exact(), KNN(k=6, n=8), T),
    "Switched, one sample": lambda: Switched(OneSample(), Wiener(r=3), 2 * T),
    "TopK": lambda: TopK(k=6),
    "UniformSNIS": lambda: UniformSNIS(n=8),
    "Wiener": lambda: Wiener(r=3),
}
ANALYTIC = {
    "PCALocality": PCALocality,
    "PatchPosterior": lambda: PatchPosterior(3),
    "Smoothed": lambda: Smoothed(Exact(), 0.5, n=2),
    "Smoothed, with source": lambda: Smoothed(STF(n=4), 0.5, n=2),
    "Smoothed, width 0": lambda: Smoothed(PatchPosterior(3), 0.0),
}
OURS |= ANALYTIC
T = 3.0


def images(N=60):
    return torch.randint(0, 256, (N, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def latents(reference, seed=1):
    x = reference.gather(torch.arange(24))
    return x, x + T * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def broken_flags(estimator):
    """The names of an estimator's wrong flags, found on a set where every flag has a visible effect."""
    # The search misses images, so proposing the source as well makes a difference.
    reference = ReferenceSet(images(), index=FaissIndex("IVF20,Flat", 1))
    x, z = latents(reference)
    broken = set()
    try:
        unbound = type(estimator).needs_reference is False
        estimator.posterior_mean(z, T, x)
    except InputError:
        unbound = False
    if unbound == estimator.needs_reference:
        broken.add("needs_reference")
    if estimator.needs_reference:
        estimator.bind(reference)

    def mean(source, seed):
        return estimator.posterior_mean(z, T, source, torch.Generator().manual_seed(seed))

    if torch.equal(mean(x, 1), mean(x, 2)) != estimator.deterministic:
        broken.add("deterministic")
    if torch.equal(mean(x, 1), mean(x.roll(1, 0), 1)) == estimator.uses_source:
        broken.add("uses_source")
    return broken


@pytest.mark.parametrize("name", OURS)
def test_the_flags_of_ours_hold(name):
    assert broken_flags(OURS[name]()) == set()


@pytest.mark.parametrize("name", ANALYTIC)
def test_the_analytic_estimators_keep_the_contract(name):
    reference, second = ReferenceSet(images()), ReferenceSet(images(45), labels=torch.arange(45) % 2)
    (x, z), estimator = latents(reference), ANALYTIC[name]().bind(reference)

    def mean(own, z, x=x, t=T, **options):
        return own.posterior_mean(z, t, x, torch.Generator().manual_seed(0), **options)

    whole, given = mean(estimator, z), z.clone()
    assert torch.equal(mean(estimator, z), whole)
    assert torch.equal(z, given)
    assert (whole.dtype, whole.shape) == (z.dtype, z.shape)
    assert mean(estimator, z[:0], x[:0]).shape == z[:0].shape
    assert mean(estimator, z.double(), x.double()).dtype == torch.float64
    assert torch.equal(mean(copy.deepcopy(estimator), z), whole)
    if estimator.deterministic:
        torch.testing.assert_close(mean(estimator, z[:1], x[:1]), whole[:1], atol=1e-5, rtol=0)
        each = torch.full((24,), T)
        torch.testing.assert_close(mean(estimator, z, t=each), whole, atol=1e-5, rtol=0)
    # A second set, after the first was used, and a fresh estimator that was pickled before it was bound.
    fresh = pickle.loads(pickle.dumps(ANALYTIC[name]())).bind(second)
    assert torch.equal(mean(estimator.bind(second), z), mean(fresh, z))
    with pytest.raises(InputError, match=r"use ByClass\("):
        mean(estimator, z, labels=torch.zeros(24, dtype=torch.int64))
    by_class = mean(class_conditional(ANALYTIC[name]()).bind(second), z, labels=torch.arange(24) % 2)
    assert by_class.isfinite().all()
    assert not torch.equal(by_class, mean(estimator, z))


# `tests/reference/test_sharded.py` checks that each shardable estimator gives the same estimates on two and four ranks
# as on the whole set. This file checks the other estimators.


class Inherited(Estimator):
    """The mean of all images: a user's estimator that does not know shards."""

    def _posterior_mean(self, z, t, x_source, generator):
        return self.reference.images.float().div(127.5).sub(1).mean(0).expand_as(z)


class Shrunk(KNN):
    """An own estimator that changes one of ours, and reads the images of this rank alone."""

    def _posterior_mean(self, z, t, x_source, generator):
        mean = self.reference.images.float().div(127.5).sub(1).mean(0)
        return (super()._posterior_mean(z, t, x_source, generator) + mean) / 2


@pytest.mark.parametrize(
    "estimator",
    [MonteCarlo(n=4), Inherited(), Shrunk(k=4, n=4)],
    ids=lambda estimator: type(estimator).__name__,
)
def test_an_estimator_that_does_not_say_it_is_shardable_refuses_shards(estimator):
    with pytest.raises(InputError, match="needs the whole reference set on each rank, this one is sharded"):
        estimator.bind(ShardedReferenceSet(images()))


class Given(Estimator):
    """An own estimator whose hook is a function."""

    uses_source = True

    def __init__(self, hook):
        self.hook = hook

    def _posterior_mean(self, z, t, x_source, generator):
        return self.hook(z, t, x_source)

    def _warped_mean(self, z, t, warp, x_source, generator):
        return self.hook(z, t, x_source)


def untouched_warp(batch):
    theta = torch.tensor([[1.0, 0, 0], [0, 1, 0]]).expand(batch, 2, 3)
    return Warp(torch.zeros(batch, 2, dtype=torch.bool), theta)


@pytest.mark.parametrize(
    ("hook", "got"),
    [
        (lambda z, t, x: None, "NoneType"),
        (lambda z, t, x: z[:1], r"\(1, 1, 4, 4\) on cpu"),
        (lambda z, t, x: z.flatten(1), r"\(4, 16\) on cpu"),
        (lambda z, t, x: z.to("meta"), r"\(4, 1, 4, 4\) on meta"),
    ],
)
def test_what_is_no_mean_of_each_z_is_refused(hook, got):
    estimator, z = Given(hook).bind(ReferenceSet(images())), torch.zeros(4, 1, 4, 4)
    said = rf"Given: the posterior mean must be a tensor \(4, 1, 4, 4\) on cpu, got {got}$"
    with pytest.raises(InputError, match=said):
        estimator.posterior_mean(z, T)
    with pytest.raises(InputError, match=said):
        estimator.warped_mean(z, T, untouched_warp(4), z)
    # The parts of ByClass have other estimators' rows to be mixed up with.
    classes = ReferenceSet(images(), labels=torch.arange(60) % 2)
    with pytest.raises(InputError, match="Given: the posterior mean must be a tensor"):
        ByClass(Given(hook)).bind(classes).posterior_mean(z, T, labels=torch.tensor([0, 1, 1, 1]))


def test_a_hook_that_overwrites_its_arguments_changes_nothing_of_the_callers():
    def hook(z, t, x_source):
        return z.zero_() + x_source.mul_(2) * t.mul_(3)

    estimator = Given(hook).bind(ReferenceSet(images()))
    for t in (2.0, torch.full((4,), 2.0, dtype=torch.float64)):
        z, x = torch.ones(4, 1, 4, 4), torch.ones(4, 1, 4, 4)
        with torch.inference_mode():  # where PyTorch would not notice
            for mean in (estimator.posterior_mean(z, t, x), estimator.warped_mean(z, t, untouched_warp(4), x)):
                assert (mean == 12).all()
        assert (z == 1).all()
        assert (x == 1).all()
        assert (torch.as_tensor(t) == 2).all()


class Remembering(Inherited):
    """An own estimator that keeps what it has computed, in a dict, list or set."""

    def __init__(self, kept):
        self.kept = kept

    def _posterior_mean(self, *args):
        if not self.kept:
            mean = super()._posterior_mean(*args)[:1]
            keep = {dict: "setdefault", list: "append", set: "add"}[type(self.kept)]
            getattr(self.kept, keep)(mean)
        return next(iter(self.kept)).expand_as(args[0])


@pytest.mark.parametrize("kind", [dict, list, set])
def test_what_an_estimator_keeps_of_a_class_is_kept_apart(kind):
    labels = torch.arange(60) % 3
    estimator = ByClass(Remembering(kind())).bind(ReferenceSet(images(), labels=labels))
    mean = estimator.posterior_mean(torch.zeros(3, 1, 4, 4), T, labels=torch.arange(3))
    expected = torch.stack([images()[labels == label].float().mean(0) / 127.5 - 1 for label in range(3)])
    torch.testing.assert_close(mean, expected)
