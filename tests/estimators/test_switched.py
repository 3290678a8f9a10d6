"""An estimator that is switched by the noise level gives each row to the right part, with labels, warps and checks."""

import copy

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import (
    KNN,
    STF,
    ByClass,
    Estimator,
    Exact,
    Mixed,
    MonteCarlo,
    OneSample,
    Switched,
    Wiener,
    class_conditional,
)
from lit_knn.modules import LitEDM, LitFlow
from lit_knn.modules.time_distributions import UniformTimes
from lit_knn.nets import UNet
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import VP, LinearInterpolant
from tests.any_data import enumerated_mean
from tests.toys import all_warped, enumerate_class_mean, noisy, pixels, rng
from tests.watched import Asked

LEVEL = 1.5
# The level itself belongs to the part above.
T = torch.tensor([0.3, 1.5, 80.0, 1.4999999, 1.5000001, 2.0, 0.01, 5.0], dtype=torch.float64)
HIGH = torch.tensor([False, True, True, False, True, True, False, True])


def labelled(N=60, **options):
    return ReferenceSet(pixels(N, (1, 4, 4)), labels=torch.arange(N) % 3, **options)


def latents(reference):
    x = reference.gather(torch.arange(len(T)))
    return noisy(x, T), x


class Far(Estimator):
    """Gives the same value everywhere, and counts its calls."""

    needs_reference = False

    def __init__(self, value):
        self.value, self.sizes = value, []

    def _posterior_mean(self, z, t, x_source, generator):
        self.sizes.append(len(z))
        return torch.full_like(z, self.value)


def test_each_part_estimates_its_rows_once_or_not_at_all():
    below, above = Far(1.0), Far(2.0)
    switched, z = Switched(below, above, LEVEL), torch.zeros(8, 1, 4, 4)
    assert torch.equal(switched.posterior_mean(z, T)[:, 0, 0, 0] == 2, HIGH)
    assert (switched.posterior_mean(z, 0.1) == 1).all()
    assert (switched.posterior_mean(z, LEVEL) == 2).all()
    assert (below.sizes, above.sizes) == ([3, 8], [5, 8])
    # τ = 0.5 of the linear path is σ = 1.
    tau = torch.tensor([0.49, 0.5], dtype=torch.float64)
    score = Switched(below, above, 1.0).score(z[:2], tau, process=LinearInterpolant())
    expected = (1 - tau) * torch.tensor([1.0, 2.0]) / tau**2
    torch.testing.assert_close(score[:, 0, 0, 0].double(), expected, rtol=1e-5, atol=0)


def test_parts_draw_for_their_rows_the_lower_part_first():
    reference = labelled()
    z, x = latents(reference)
    mean = (
        Switched(STF(8), KNN(20, 8), LEVEL)
        .bind(reference)
        .posterior_mean(z, T, x, torch.Generator())
    )
    generator = torch.Generator()
    for part, rows in ((STF(8), ~HIGH), (KNN(20, 8), HIGH)):
        own = part.bind(reference).posterior_mean(z[rows], T[rows], x[rows], generator)
        assert torch.equal(mean[rows], own)


def test_a_mixture_has_its_shares_of_both_parts():
    reference = labelled()
    z, x = latents(reference)
    mean = class_conditional(Mixed(OneSample(), Exact(), 0.3)).bind(reference)
    expected = 0.7 * x + 0.3 * enumerate_class_mean(reference, z, T, reference.labels[: len(z)])
    found = mean.posterior_mean(z, T, x, labels=reference.labels[: len(z)])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    for share, part in ((0, OneSample()), (1, Exact())):
        end = Mixed(OneSample(), Exact(), share).bind(reference).posterior_mean(z, T, x)
        torch.testing.assert_close(end, part.bind(reference).posterior_mean(z, T, x))


def test_the_parts_of_a_mixture_draw_one_after_the_other():
    reference, generator = labelled(), rng()
    z, x = latents(reference)
    first, second = (STF(8).bind(reference).posterior_mean(z, T, x, generator) for _ in range(2))
    mean = Mixed(STF(8), STF(8), 0.5).bind(reference).posterior_mean(z, T, x, rng())
    torch.testing.assert_close(mean, (first + second) / 2)


class Half(Switched):
    """A user's estimator that makes its parts itself."""

    def __init__(self, size=1.0):
        super().__init__(OneSample(), Exact(), t=size * LEVEL)


def test_users_switched_estimator_gets_classes_unchanged():
    reference = labelled()
    z, x = latents(reference)
    labels = torch.arange(8) % 3
    own = class_conditional(Half()).bind(reference)
    assert type(own) is Half
    expected = (
        Switched(OneSample(), ByClass(Exact()), LEVEL)
        .bind(reference)
        .posterior_mean(z, T, x, labels=labels)
    )
    assert torch.equal(own.posterior_mean(z, T, x, labels=labels), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Switched(OneSample(), ByClass(Exact()), LEVEL),
        lambda: ByClass(Switched(OneSample(), Exact(), LEVEL)),
        lambda: class_conditional(Switched(OneSample(), Exact(), LEVEL)),
        lambda: class_conditional(
            Switched(OneSample(), Switched(ByClass(Exact()), Exact(), 1e3), LEVEL)
        ),
    ],
)
def test_switched_inside_and_around_by_class_is_of_the_class(make):
    reference = labelled(hflip=True)
    z, x = latents(reference)
    labels, estimator = reference.labels[: len(z)], make().bind(reference)
    mean = estimator.posterior_mean(z, T, x, labels=labels)
    expected = torch.where(
        HIGH[:, None, None, None], enumerate_class_mean(reference, z, T, labels), x.double()
    )
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-6)
    # The whole set has another mean, so a part that forgets the labels is noticed.
    assert (enumerated_mean(reference, z, T) - mean).abs().max() > 0.01
    assert torch.equal(copy.deepcopy(estimator).posterior_mean(z, T, x, labels=labels), mean)


def test_warped_means_are_those_of_the_parts():
    reference = labelled(40)
    x, labels = reference.gather(torch.arange(len(T))), reference.labels[: len(T)]
    augmented = all_warped(x)
    given = noisy(augmented.images, T), T, augmented.warp, x, None
    for exact, switched, own in (
        (Exact(), Switched(OneSample(), Exact(), LEVEL), None),
        (ByClass(Exact()), Switched(OneSample(), ByClass(Exact()), LEVEL), labels),
        (ByClass(Exact()), ByClass(Switched(OneSample(), Exact(), LEVEL)), labels),
    ):
        mean = switched.bind(reference).warped_mean(*given, own)
        torch.testing.assert_close(mean[HIGH], exact.bind(reference).warped_mean(*given, own)[HIGH])
        torch.testing.assert_close(mean[~HIGH], augmented.images[~HIGH])
    assert not Switched(OneSample(), Wiener(4), LEVEL).can_warp
    # Half precision must not round the proposal.
    (z, t, warp, x, _), knn = given, KNN(20, 8).bind(reference)
    half, wide = (
        knn.warped_mean(z.half().to(dtype), t, warp, x.half().to(dtype), torch.Generator())
        for dtype in (torch.float16, torch.float32)
    )
    assert torch.equal(half, wide.half())


def net(num_classes=0):
    return UNet(1, channels=8, multipliers=(1,), blocks=1, num_classes=num_classes)


# A flow reaches the levels of its times; those of VP are σ² = exp(19.9·t²/2 + 0.1·t) − 1.
@pytest.mark.parametrize(
    ("make", "outside", "inside"),
    [
        (lambda own: LitEDM(net(), own), 81, 80.0),
        (lambda own: LitFlow(net(), own, times=UniformTimes(0.1, 0.9)), 0.11, 0.12),
        (lambda own: LitFlow(net(), own, times=UniformTimes(0.1, 0.9), process=VP()), 0.33, 0.35),
    ],
)
def test_a_level_that_a_run_never_reaches_is_refused(make, outside, inside):
    for wrap in (lambda own: own, ByClass, lambda own: Switched(OneSample(), own, 1.0)):
        make(wrap(Switched(OneSample(), KNN(4, 4), inside)))
        with pytest.raises(
            InputError, match=f": Switched: t={outside} is outside the noise levels of the run"
        ):
            make(wrap(Switched(OneSample(), KNN(4, 4), outside)))


def test_a_run_with_classes_makes_both_parts_class_conditional():
    estimator = LitEDM(net(3), Switched(OneSample(), STF(8), 1.0), class_conditional=True).estimator
    assert [type(part) for part in (estimator, estimator.below, estimator.above)] == [
        Switched,
        OneSample,
        ByClass,
    ]
    # A training that drops labels needs the mean over all images, too.
    for given in (STF(8), ByClass(STF(8)), ByClass(STF(8), unlabelled=True)):
        assert class_conditional(given, unlabelled=True).unlabelled


def test_parts_stay_the_user_s_and_tell_their_classes_and_shards():
    above = KNN(4, 4)
    Switched(OneSample(), above, 1.0).bind(labelled())
    with pytest.raises(InputError, match="KNN is used before bind"):
        above.reference  # noqa: B018
    # A sampler needs the classes of a network, whichever part it is.
    for parts in ((OneSample(), Asked(3)), (Asked(3), OneSample())):
        assert Switched(*parts, 1.0).num_classes == 3

    class OwnSwitched(Switched):
        pass

    # A part that needs no set need not be shardable; a subclass tells itself.
    assert Switched(Far(1.0), Exact(), 1.0).shardable
    assert not Switched(Far(1.0), MonteCarlo(4), 1.0).shardable
    assert not OwnSwitched(Far(1.0), Exact(), 1.0).shardable
