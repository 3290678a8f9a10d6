"""The four flags of an estimator: ours are all right, and the check finds wrong ones."""

import pytest
import torch

from lit_knn.errors import InputError
from lit_knn.estimators import (
    KNN,
    STF,
    Adaptive,
    Estimator,
    Exact,
    ExactFloat64,
    ExactInt8,
    MonteCarlo,
    OneSample,
    StratifiedKNN,
    SubspaceKNN,
    UniformSNIS,
    Wiener,
)
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet, ShardedReferenceSet

OURS = {
    "Adaptive": lambda: Adaptive(KNN(k=6, n=4), tolerance=1e9),
    "Adaptive with source": lambda: Adaptive(STF(n=4), tolerance=1e9),
    "Exact": Exact,
    "ExactFloat64": ExactFloat64,
    "ExactInt8": ExactInt8,
    "KNN": lambda: KNN(k=6, n=8),
    "KNN with source": lambda: KNN(k=3, n=8, include_source=True),
    "StratifiedKNN": lambda: StratifiedKNN(k=6, n=8),
    "MonteCarlo": lambda: MonteCarlo(n=8),
    "OneSample": OneSample,
    "STF": lambda: STF(n=8),
    "SubspaceKNN": lambda: SubspaceKNN(r=3, n=8, compute="float32"),
    "UniformSNIS": lambda: UniformSNIS(n=8),
    "Wiener": lambda: Wiener(r=3),
}
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


class Wrong(Exact):
    """The exact mean with random noise; its flags do not mention the noise."""

    def _posterior_mean(self, z, t, x_source, generator):
        noise = torch.randn(z.shape, generator=generator)
        return super()._posterior_mean(z, t, x_source, generator) + 0.01 * noise + 0.01 * x_source


def test_flags_that_are_wrong_are_found():
    assert broken_flags(Wrong()) == {"deterministic", "uses_source"}

    class Unneeded(OneSample):
        needs_reference = True

    estimator = Unneeded()
    estimator.needs_reference = False
    assert broken_flags(estimator) <= {"needs_reference"}


# `tests/test_sharded.py` checks that each shardable estimator gives the same estimates on two and four ranks as on the
# whole set. This file checks the other estimators.


class Inherited(Estimator):
    """The mean of all images: a user's estimator that does not know shards."""

    def _posterior_mean(self, z, t, x_source, generator):
        return self.reference.images.float().div(127.5).sub(1).mean(0).expand_as(z)


@pytest.mark.parametrize(
    "estimator",
    [MonteCarlo(n=4), Adaptive(KNN(k=4, n=4), 1e-3), Inherited()],
    ids=lambda estimator: type(estimator).__name__,
)
def test_an_estimator_that_does_not_say_it_is_shardable_refuses_shards(estimator):
    with pytest.raises(InputError, match="needs the whole reference set on each rank, this one is sharded"):
        estimator.bind(ShardedReferenceSet(images()))


def test_the_hook_gets_arguments_that_are_ready_to_use():
    seen = {}

    class Asked(Estimator):
        def _posterior_mean(self, z, t, x_source, generator):
            seen.update(t=t, shape=z.shape)
            return z / (1 + t.reshape(-1, 1, 1, 1) ** 2)

    estimator = Asked().bind(ReferenceSet(images()))
    z = torch.randn(5, 1, 4, 4)
    for t in (2.0, torch.tensor(2.0), torch.full((5,), 2.0)):
        mean = estimator.posterior_mean(z, t)
        assert seen["t"].shape == (5,)
        assert seen["t"].dtype == torch.float64
        torch.testing.assert_close(mean, z / 5)
        assert mean.dtype == torch.float32
