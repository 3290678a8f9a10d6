"""Sets of float16 and bfloat16: they stay as they are, and every number is that of the same values in float32."""

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, MonteCarlo
from lit_knn.index import FaissIndex, SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import classes_of
from lit_knn.reference.row_view import RowView
from lit_knn.theory.posterior import posterior_mean
from tests.every_estimator import every_class_estimator, every_estimator
from tests.toys import noisy, rng

HALVES = pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
N, SHAPE = 50, (2, 4, 4)
LABELS = torch.arange(N) % 2
T = torch.tensor([0.05, 0.4, 1.0, 3.0, 80.0, 0.4])


def smooth_latents(centre=0.0):
    """Latents with most of their variance in a few directions, float32."""
    few = torch.randn(N, 4, generator=rng()) @ torch.randn(4, 32, generator=rng(1)) / 2
    return (few + 0.1 * torch.randn(N, 32, generator=rng(2)) + centre).reshape(N, *SHAPE)


def both(kind, centre=0.0, **options):
    """A set of 16-bit values, and one that holds the same values in float32."""
    stored = smooth_latents(centre).to(kind)
    return tuple(ReferenceSet(x, **options) for x in (stored, stored.float()))


def latents(reference):
    x = reference.gather(torch.arange(len(T)))
    return noisy(x, T), x


@HALVES
@pytest.mark.parametrize("hflip", [False, True])
def test_every_mean_is_that_of_the_stored_values_in_float32(kind, hflip):
    half, same = both(kind, hflip=hflip, labels=LABELS)
    assert half.images.dtype == kind
    z, x = latents(half)
    makers = every_estimator(k=20, n=30, r=8)
    makers |= {
        f"{name} by class": make for name, make in every_class_estimator(k=9, n=9, r=4).items()
    }

    for name, make in makers.items():
        labels = LABELS[: len(T)] if name.endswith("by class") else None
        means = [
            make().bind(part).posterior_mean(z, T, x, labels=labels, generator=rng(3))
            for part in (half, same)
        ]
        # Equal operations on equal values; products may add in another order.
        torch.testing.assert_close(
            *means, atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


@HALVES
@pytest.mark.parametrize("centre", [0.0, 30.0])
def test_exact_means_are_those_of_enumeration_in_float64(kind, centre):
    half, _ = both(kind, centre)
    z, _ = latents(half)
    stored = smooth_latents(centre).to(kind).double()
    for level in T:
        expected = posterior_mean(z, stored, level.double())
        for estimator in (Exact(), MonteCarlo(20_000)):
            mean = estimator.bind(half).posterior_mean(z, level, generator=rng(4))
            # Sampled means have standard errors of at most 1/√20,000.
            close = 1e-5 if isinstance(estimator, Exact) else 0.05
            torch.testing.assert_close(mean.double(), expected, atol=close, rtol=0)


@HALVES
def test_means_differ_from_those_of_float32_by_the_rounding(kind):
    whole = ReferenceSet(smooth_latents())
    z = noisy(whole.gather(torch.arange(20)), 3.0)
    half = ReferenceSet(smooth_latents().to(kind))
    means = [Exact().bind(part).posterior_mean(z, 3.0) for part in (whole, half)]
    # Each value is rounded by at most eps/2 of it, and the weights hardly change at t = 3.
    most = torch.finfo(kind).eps * whole.largest
    assert 0 < (means[0] - means[1]).abs().max() < most


@HALVES
@pytest.mark.parametrize(
    "index",
    [
        FaissIndex,
        lambda: TorchIndex("float32"),
        lambda: SubspaceIndex(12),
        lambda: FaissIndex("SQ8"),
    ],
)
def test_an_index_finds_what_it_finds_in_float32(kind, index):
    half, same = (ReferenceSet(part.images, index()) for part in both(kind))
    z, x = latents(half)
    for one, other in zip(half.search(z, 7), same.search(z, 7), strict=True):
        assert torch.equal(one, other)
    assert half.locate(x).tolist() == list(range(len(T)))


@HALVES
def test_classes_views_and_hashes_are_those_of_the_set(kind):
    half, same = both(kind, labels=LABELS)
    view = ReferenceSet(RowView(half.images, torch.arange(0, N, 2)), labels=LABELS[::2])
    assert (view.images.dtype, view.N) == (kind, N // 2)
    assert torch.equal(view.gather(torch.arange(view.N)), same.images[::2])
    assert view.largest == same.images[::2].abs().max()
    assert torch.equal(classes_of(half)[0].gather(torch.arange(N // 2)), same.images[::2])
    torch.testing.assert_close(half.mean(), same.mean())

    prints = {part.fingerprint() for part in (half, same, view, classes_of(half)[1])}
    assert len(prints) == 4
    assert view.fingerprint() == ReferenceSet(half.images[::2]).fingerprint()


@HALVES
def test_values_that_are_not_finite_are_refused(kind):
    images = smooth_latents().to(kind)
    images[31, 1, 2, 3] = torch.inf
    for stored in (images, RowView(images, torch.arange(N))):
        with pytest.raises(InputError, match=r"not finite \(first in item 31\)"):
            ReferenceSet(stored)


def test_values_whose_squares_float32_cannot_add_are_refused():
    with pytest.raises(InputError, match=r"size 1e\+20; .* up to 1e\+15: scale the data"):
        ReferenceSet(torch.full((3, 2), -1e20))
