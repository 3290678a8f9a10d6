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
    Holdings,
    MonteCarlo,
    OneSample,
    Switched,
    Wiener,
    class_conditional,
)
from lit_knn.modules import LitECT, LitEDM, LitEstimator, LitFlow, LitICT
from lit_knn.modules.time_distributions import UniformTimes
from lit_knn.nets import UNet
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import LinearInterpolant
from tests.any_data import enumerated_mean
from tests.toys import all_warped, enumerate_class_mean, noisy, pixels

LEVEL = 1.5
# The level itself belongs to the part above.
T = torch.tensor([0.3, 1.5, 80.0, 1.4999999, 1.5000001, 2.0, 0.01, 5.0], dtype=torch.float64)
HIGH = torch.tensor([False, True, True, False, True, True, False, True])


def labelled(N=60, **options):
    return ReferenceSet(pixels(N, (1, 4, 4)), labels=torch.arange(N) % 3, **options)


def latents(reference, t=T):
    x = reference.gather(torch.arange(len(T)))
    return noisy(x, t), x


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


class Far(Estimator):
    """Gives the same value everywhere, and counts its calls."""

    needs_reference = False

    def __init__(self, value):
        self.value, self.sizes = value, []

    def _posterior_mean(self, z, t, x_source, generator):
        self.sizes.append(len(z))
        return torch.full_like(z, self.value)


def test_each_row_gets_the_mean_of_its_part():
    reference = labelled()
    z, x = latents(reference)
    mean = Switched(OneSample(), Exact(), LEVEL).bind(reference).posterior_mean(z, T, x)
    assert torch.equal(mean[~HIGH], x[~HIGH])
    torch.testing.assert_close(mean[HIGH].double(), enumerated_mean(reference, z, T)[HIGH], rtol=0, atol=1e-6)
    swapped = Switched(Exact(), OneSample(), LEVEL).bind(reference).posterior_mean(z, T, x)
    assert torch.equal(swapped[HIGH], x[HIGH])


def test_each_part_estimates_its_own_rows_once_and_none_if_it_has_none():
    below, above = Far(1.0), Far(2.0)
    switched, z = Switched(below, above, LEVEL), torch.zeros(8, 1, 4, 4)
    assert not switched.needs_reference
    assert torch.equal(switched.posterior_mean(z, T)[:, 0, 0, 0] == 2, HIGH)
    assert (below.sizes, above.sizes) == ([3], [5])
    assert (switched.posterior_mean(z, 0.1) == 1).all()
    assert (switched.posterior_mean(z, LEVEL) == 2).all()
    assert (below.sizes, above.sizes) == ([3, 8], [5, 8])
    assert switched.posterior_mean(z[:0], 1.0).shape == (0, 1, 4, 4)


def test_a_score_is_switched_by_the_noise_level_of_the_process():
    # τ = 0.5 of the linear path is σ = 1.
    switched, z = Switched(Far(1.0), Far(2.0), 1.0), torch.zeros(2, 1, 4, 4)
    tau = torch.tensor([0.49, 0.5], dtype=torch.float64)
    score = switched.score(z, tau, process=LinearInterpolant())
    expected = (1 - tau) * torch.tensor([1.0, 2.0]) / tau**2
    torch.testing.assert_close(score[:, 0, 0, 0].double(), expected, rtol=1e-5, atol=0)


def test_draws_come_from_the_generator_below_first():
    reference = labelled()
    z, x = latents(reference)
    mean = Switched(STF(8), KNN(20, 8), LEVEL).bind(reference).posterior_mean(z, T, x, rng())
    generator = rng()
    low, high = STF(8).bind(reference), KNN(20, 8).bind(reference)
    assert torch.equal(mean[~HIGH], low.posterior_mean(z[~HIGH], T[~HIGH], x[~HIGH], generator))
    assert torch.equal(mean[HIGH], high.posterior_mean(z[HIGH], T[HIGH], x[HIGH], generator))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Switched(OneSample(), ByClass(Exact()), LEVEL),
        lambda: ByClass(Switched(OneSample(), Exact(), LEVEL)),
        lambda: class_conditional(Switched(OneSample(), Exact(), LEVEL)),
        lambda: class_conditional(Switched(OneSample(), Switched(ByClass(Exact()), Exact(), 1e3), LEVEL)),
    ],
)
@pytest.mark.parametrize("hflip", [False, True])
def test_inside_and_around_by_class_the_mean_is_that_of_the_class(make, hflip):
    reference = labelled(hflip=hflip)
    z, x = latents(reference)
    labels = reference.labels[: len(z)]
    estimator = make().bind(reference)
    mean = estimator.posterior_mean(z, T, x, labels=labels)
    expected = torch.where(HIGH[:, None, None, None], enumerate_class_mean(reference, z, T, labels), x.double())
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-6)
    # The whole set has another mean, so a part that forgets the labels is noticed.
    assert (enumerated_mean(reference, z, T) - mean).abs().max() > 0.01
    clone = copy.deepcopy(estimator)
    assert torch.equal(clone.posterior_mean(z, T, x, labels=labels), mean)


@pytest.mark.parametrize("classes", [False, True])
def test_warped_means_are_those_of_the_parts(classes):
    reference = ReferenceSet(pixels(40, (1, 6, 6)), labels=torch.arange(40) % 2)
    x = reference.gather(torch.arange(len(T)))
    augmented = all_warped(x)
    z, labels = noisy(augmented.images, T), reference.labels[: len(T)] if classes else None
    switched = Switched(OneSample(), ByClass(Exact()) if classes else Exact(), LEVEL).bind(reference)
    mean = switched.warped_mean(z, T, augmented.warp, x, labels=labels)
    exact = (ByClass(Exact()) if classes else Exact()).bind(reference)
    torch.testing.assert_close(mean[HIGH], exact.warped_mean(z, T, augmented.warp, x, labels=labels)[HIGH])
    torch.testing.assert_close(mean[~HIGH], augmented.images[~HIGH])
    around = ByClass(Switched(OneSample(), Exact(), LEVEL)) if classes else switched
    around.bind(reference)
    torch.testing.assert_close(around.warped_mean(z, T, augmented.warp, x, labels=labels), mean)
    assert not Switched(OneSample(), Wiener(4), LEVEL).can_warp
    with pytest.raises(InputError, match="Switched cannot estimate the posterior of warped images"):
        Switched(OneSample(), Wiener(4), LEVEL).bind(reference).warped_mean(z, T, augmented.warp, x)


@pytest.mark.parametrize(("level", "fits"), [(0.0019, False), (0.002, True), (80.0, True), (81, False)])
def test_a_level_that_a_run_never_reaches_is_refused(level, fits):
    makers = {
        "LitICT": lambda estimator: LitICT(net(), estimator),
        "LitEDM": lambda estimator: LitEDM(net(), estimator),
        "LitECT": lambda estimator: LitECT(estimator, net=net()),
        "LitEstimator": LitEstimator,
    }
    within = Switched(OneSample(), KNN(4, 4), level)
    for name, make in makers.items():
        for estimator in (within, ByClass(within), Switched(OneSample(), within, 1.0)):
            if fits:
                make(estimator)
                continue
            said = f"^{name}: Switched: t={level} is outside the noise levels of the run, 0.002 to 80$"
            with pytest.raises(InputError, match=said):
                make(estimator)


def test_a_flow_reaches_the_levels_of_its_times():
    times = UniformTimes(0.1, 0.9)
    for level in (0.12, 9.0 - 1e-9):
        LitFlow(net(), Switched(OneSample(), KNN(4, 4), level), times=times)
    for level in (0.11, 9.01):
        with pytest.raises(InputError, match=r"^LitFlow: Switched: t=.* the noise levels of the run, 0.111111 to 9$"):
            LitFlow(net(), Switched(OneSample(), KNN(4, 4), level), times=times)


def net(num_classes=0):
    return UNet(1, channels=8, multipliers=(1,), blocks=1, num_classes=num_classes)


def test_a_run_with_classes_makes_both_parts_class_conditional():
    estimator = LitEDM(net(3), Switched(OneSample(), STF(8), 1.0), class_conditional=True).estimator
    assert isinstance(estimator, Switched)
    assert isinstance(estimator.above, ByClass)
    assert isinstance(estimator.below, OneSample)


def test_the_parts_of_the_user_stay_as_they_are():
    above = KNN(4, 4)
    switched = Switched(OneSample(), above, 1.0).bind(labelled())
    assert switched.parts[1] is not above
    with pytest.raises(InputError, match="KNN is used before bind"):
        above.reference  # noqa: B018


def test_memory_is_that_of_both_parts_with_shared_arrays_once():
    class Holding(Far):
        def __init__(self, told):
            super().__init__(1.0)
            self.told = told

        def holds(self, N, d, pixels, device):
            return self.told

    def held(below, above):
        return Switched(Holding(below), Holding(above), 1.0).holds(100, 5, True, torch.device("cpu"))

    one, other = Holdings(3, {"a": 5, "b": 2}), Holdings(4, {"a": 7, "c": 1})
    assert held(one, other) == Holdings(4, {"a": 7, "b": 2, "c": 1})
    assert held(one, None) is None


def test_a_part_that_needs_no_set_need_not_be_shardable_and_a_subclass_tells_itself():
    assert Switched(Far(1.0), Exact(), 1.0).shardable
    assert not Switched(Far(1.0), MonteCarlo(4), 1.0).shardable

    class Own(Switched):
        pass

    assert not Own(Far(1.0), Exact(), 1.0).shardable
