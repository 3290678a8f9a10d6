"""The adaptive estimator: its error, the rows it does not change, its limits, and its refusals."""

import copy

import pytest
import torch

from lit_knn.errors import InputError
from lit_knn.estimators import KNN, STF, Adaptive, Exact, ExactFloat64, MonteCarlo, OneSample, SubspaceKNN, Wiener
from lit_knn.reference import ReferenceSet
from lit_knn.settings import describe
from lit_knn.theory.posterior import posterior_mean
from tests.toys import low_rank_vectors, noisy

N = 400
TOLERANCE = 1e-3
MAKERS = {
    "KNN": lambda: KNN(k=40, n=12),
    "MonteCarlo": lambda: MonteCarlo(n=12),
    "SubspaceKNN": lambda: SubspaceKNN(r=2, n=12, compute="float32"),
}
EVERY = pytest.mark.parametrize("name", MAKERS)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def toy():
    """A reference set and latents; the noise levels range from one certain image to all images possible."""
    x = low_rank_vectors(N=N, seed=2)
    t = torch.logspace(-1.5, 1, 200, dtype=torch.float64)
    source = x[torch.arange(200) * 2]
    return ReferenceSet(x), noisy(source, t), t, source


def true_error(reference, mean, z, t):
    return (mean.double() - posterior_mean(z, reference.images, t)).square().mean(1)


@EVERY
def test_error_is_near_the_tolerance_where_the_plain_estimator_misses_it(name, toy):
    reference, z, t, _ = toy
    plain = true_error(reference, MAKERS[name]().bind(reference).posterior_mean(z, t, generator=rng()), z, t)
    adaptive = Adaptive(MAKERS[name](), TOLERANCE, growth=4, max_n=200).bind(reference)
    error = true_error(reference, adaptive.posterior_mean(z, t, generator=rng()), z, t)
    assert plain.mean() > 10 * TOLERANCE
    assert error.mean() < TOLERANCE
    # The certificate of a single z is only an estimate, so a few z may have larger errors.
    assert (error < 3 * TOLERANCE).double().mean() > 0.98
    # Every z ends once, with 12, 48 or 192 images or exactly, and all four cases occur.
    assert len(adaptive.last_counts) == 4
    assert min(adaptive.last_counts) > 0
    assert sum(adaptive.last_counts) == 200


@EVERY
def test_what_is_good_enough_is_the_plain_estimate(name, toy):
    reference, z, t, _ = toy
    plain = MAKERS[name]().bind(reference)
    adaptive = Adaptive(MAKERS[name](), TOLERANCE).bind(reference)
    certificate = plain.certified_mean(z, t, generator=rng())
    fine = certificate.sq_error <= TOLERANCE
    mean = adaptive.posterior_mean(z, t, generator=rng())
    assert 0 < fine.sum() == adaptive.last_counts[0] < len(z)
    assert torch.equal(mean[fine], plain.posterior_mean(z, t, generator=rng())[fine])
    assert not (mean[~fine] == certificate.mean[~fine]).all(1).any()


def test_what_is_not_is_the_next_estimate_from_the_same_generator(toy):
    # Each source must stay with its z.
    reference, z, t, source = toy
    generator, tolerance = rng(4), 0.1
    first, second = (STF(n=n).bind(reference) for n in (20, 100))
    certificate = first.certified_mean(z, t, source, generator)
    missed = certificate.sq_error > tolerance
    again = second.certified_mean(z[missed], t[missed], source[missed], generator)
    met = again.sq_error <= tolerance
    adaptive = Adaptive(STF(n=20), tolerance, growth=5, max_n=100).bind(reference)
    assert adaptive.uses_source
    ours = adaptive.certified_mean(z, t, source, rng(4))
    assert met.sum() > 10
    for part, expected in zip(ours, again, strict=True):
        assert torch.equal(part[missed][met], expected[met])


@EVERY
def test_a_tolerance_of_almost_nothing_is_exact(name, toy):
    reference, z, t, _ = toy
    uncertain = t > 1  # at smaller t one draw may have all the weight; its certificate is then 0
    z, t = z[uncertain], t[uncertain]
    adaptive = Adaptive(MAKERS[name](), 1e-30, max_n=100).bind(reference)
    certificate = adaptive.certified_mean(z, t, generator=rng())
    torch.testing.assert_close(certificate.mean, ExactFloat64().bind(reference).posterior_mean(z, t))
    assert (certificate.sq_error == 0).all()
    assert adaptive.last_counts == (0, 0, len(z))


def test_any_error_is_tolerated_by_a_large_tolerance(toy):
    reference, z, t, _ = toy
    adaptive, plain = Adaptive(KNN(k=40, n=12), 1e6).bind(reference), KNN(k=40, n=12).bind(reference)
    for ours, theirs in zip(
        adaptive.certified_mean(z, t, generator=rng()), plain.certified_mean(z, t, generator=rng()), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert adaptive.last_counts[0] == len(z)
    assert not any(adaptive.last_counts[1:])


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_certificate_is_that_of_the_mean(name, dtype, toy):
    reference, z, t, _ = toy
    adaptive = Adaptive(MAKERS[name](), TOLERANCE, max_n=200).bind(reference)
    certificate = adaptive.certified_mean(z.to(dtype), t, generator=rng())
    assert certificate.mean.dtype == dtype
    assert torch.equal(certificate.mean, adaptive.posterior_mean(z.to(dtype), t, generator=rng()))
    assert (certificate.sq_error <= TOLERANCE).all()
    assert (certificate.effective_sample_size >= 1).all()


def test_n_over_16_is_where_repeating_ends_by_default(toy):
    # max_n is 400/16 = 25: the estimator tries 6 and 24 images, then the exact mean.
    reference, z, t, _ = toy
    adaptive = Adaptive(KNN(k=40, n=6), TOLERANCE).bind(reference)
    adaptive.posterior_mean(z, t, generator=rng())
    assert len(adaptive.last_counts) == 3


def test_latents_of_any_shape_and_deepcopy():
    pictures = torch.randint(0, 256, (50, 3, 2, 4), dtype=torch.uint8, generator=rng())
    reference = ReferenceSet(pictures, hflip=True)
    z = noisy(reference.gather(torch.arange(30)), 1.0)
    adaptive = Adaptive(KNN(k=10, n=8), 1e-2, growth=2, max_n=64).bind(reference)
    twin = copy.deepcopy(adaptive)
    assert twin.reference is reference
    mean = adaptive.posterior_mean(z, 1.0, generator=rng())
    assert mean.shape == z.shape
    assert torch.equal(twin.posterior_mean(z, 1.0, generator=rng()), mean)


def test_binding_leaves_the_wrapped_estimator_alone(toy):
    plain = KNN(k=40, n=12)
    adaptive = Adaptive(plain, TOLERANCE).bind(toy[0])
    assert plain.n == 12
    with pytest.raises(InputError, match=r"before bind"):
        _ = plain.reference
    other = copy.copy(adaptive).bind(ReferenceSet(low_rank_vectors(N=200)))
    assert (adaptive.reference.N, other.reference.N) == (N, 200)


def test_fingerprints_hold_the_settings_and_nothing_that_changes(toy):
    reference, z, t, _ = toy
    used = Adaptive(KNN(k=40, n=12), TOLERANCE).bind(reference)
    used.posterior_mean(z, t)
    assert describe(used) == describe(Adaptive(KNN(k=40, n=12), TOLERANCE))
    assert describe(used) != describe(Adaptive(KNN(k=41, n=12), TOLERANCE))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adaptive(Exact(), 0.1), "estimator=Exact does not tell its own error"),
        (lambda: Adaptive(OneSample(), 0.1), "estimator=OneSample does not tell"),
        (lambda: Adaptive(Wiener(r=2), 0.1), "estimator=Wiener does not tell"),
        (lambda: Adaptive(Adaptive(KNN(k=4, n=4), 0.1), 0.1), "adapts already"),
        (lambda: Adaptive(KNN(k=4, n=1), 0.1), "KNN with n=1 cannot tell"),
        (lambda: Adaptive(KNN(), 0), "tolerance must be finite and above 0, got 0"),
        (lambda: Adaptive(KNN(), -1.0), "tolerance must be finite and above 0, got -1.0"),
        (lambda: Adaptive(KNN(), float("nan")), "tolerance must be finite and above 0, got nan"),
        (lambda: Adaptive(KNN(), float("inf")), "tolerance must be finite and above 0, got inf"),
        (lambda: Adaptive(KNN(), "1e-4"), "tolerance must be finite and above 0, got '1e-4'"),
        (lambda: Adaptive(KNN(), 0.1, growth=1), "growth must be at least 2, got 1"),
        (lambda: Adaptive(KNN(), 0.1, growth=1.5), "growth must be an integer, got 1.5"),
        (lambda: Adaptive(KNN(n=16), 0.1, max_n=8), "max_n=8 is less than n=16 of KNN"),
        (lambda: Adaptive(KNN(k=4, n=16), 0.1, max_n=401).bind(few()), "max_n=401 is more than the 60 images"),
        (lambda: Adaptive(KNN(k=61, n=16), 0.1).bind(few()), "k=61 is more than the 60 images"),
        (lambda: Adaptive(KNN(k=4, n=16), 0.1).posterior_mean(torch.zeros(1, 12), 1.0), "Adaptive is used before bind"),
    ],
)
def test_what_cannot_work_is_named(make, message):
    with pytest.raises(InputError, match=message):
        make()


def few():
    return ReferenceSet(low_rank_vectors())
