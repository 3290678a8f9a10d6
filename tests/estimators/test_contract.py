"""Every estimator keeps its flags, the form of answers and tensors of its caller; errors of own ones are found."""

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
    Mixed,
    MonteCarlo,
    Noised,
    OneSample,
    PatchPosterior,
    PCALocality,
    Smoothed,
    SubspaceKNN,
    Switched,
    UniformSNIS,
    Wiener,
    class_conditional,
)
from lit_knn.index import FaissIndex
from lit_knn.metrics import error_curve
from lit_knn.reference import ReferenceSet, ShardedReferenceSet
from tests.toys import rng, speckles, unwarped

T, IMAGES = 3.0, speckles(60, (1, 4, 4))
MAKERS = {
    "Exact": Exact,
    "KNN": lambda: KNN(k=6, n=8),
    "KNN with source": lambda: KNN(k=3, n=8, include_source=True),
    "Mixed": lambda: Mixed(OneSample(), KNN(k=6, n=8), 0.3),
    "MonteCarlo": lambda: MonteCarlo(n=8),
    "Noised": lambda: Noised(Exact(), "posterior", 1.0),
    "Noised, isotropic": lambda: Noised(Exact(), "isotropic", 0.5),
    "Noised, none": lambda: Noised(Exact(), "none", 1.0),
    "Noised, shuffled, with source": lambda: Noised(STF(n=4), "shuffled", 2.0),
    "OneSample": OneSample,
    "PCALocality": PCALocality,
    "PatchPosterior": lambda: PatchPosterior(3),
    "STF": lambda: STF(n=8),
    "Smoothed": lambda: Smoothed(Exact(), 0.5, n=2),
    "Smoothed, with source": lambda: Smoothed(STF(n=4), 0.5, n=2),
    "Smoothed, width 0": lambda: Smoothed(PatchPosterior(3), 0.0),
    "SubspaceKNN": lambda: SubspaceKNN(r=3, n=8, compute="float32"),
    "Switched": lambda: Switched(Exact(), KNN(k=6, n=8), T),
    "Switched, one sample": lambda: Switched(OneSample(), Wiener(r=3), 2 * T),
    "UniformSNIS": lambda: UniformSNIS(n=8),
    "Wiener": lambda: Wiener(r=3),
}
EVERY = pytest.mark.parametrize("name", MAKERS)


def by_two_classes(N=60):
    return ReferenceSet(speckles(N, (1, 4, 4)), labels=torch.arange(N) % 2)


def latents(reference, B=24):
    x = reference.gather(torch.arange(B))
    return x, x + T * torch.randn(x.shape, generator=rng(1))


@EVERY
def test_the_flags_are_right(name):
    # This search misses images, so proposing the source as well makes a difference.
    reference, estimator = ReferenceSet(IMAGES, index=FaissIndex("IVF20,Flat", 1)), MAKERS[name]()
    x, z = latents(reference)
    if estimator.needs_reference:
        with pytest.raises(InputError, match="is used before bind"):
            estimator.posterior_mean(z, T, x)
        with pytest.raises(InputError, match=r"needs a ReferenceSet|PatchPosterior: needs images"):
            estimator.bind(IMAGES)
        estimator.bind(reference)

    def mean(source, seed):
        return estimator.posterior_mean(z, T, source, rng(seed))

    assert torch.equal(mean(x, 1), mean(x, 2)) == estimator.deterministic
    assert torch.equal(mean(x, 1), mean(x.roll(1, 0), 1)) != estimator.uses_source


@EVERY
def test_an_answer_has_the_form_of_z_whatever_surrounds_the_call(name):
    reference = ReferenceSet(IMAGES)
    (x, z), estimator = latents(reference), MAKERS[name]()
    assert estimator.bind(reference) is estimator
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        own, source = z.to(dtype).requires_grad_(), x.to(dtype)
        for method in (estimator.posterior_mean, estimator.score):
            result = method(own, T, source, rng())
            assert (result.shape, result.dtype, result.requires_grad) == (z.shape, dtype, False)
            assert result.isfinite().all()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(method(own, T, source, rng()), result)
    whole = estimator.posterior_mean(z, T, x, rng())
    torch.testing.assert_close(
        estimator.score(z, T, x, rng()), (whole - z) / T**2, rtol=1e-5, atol=1e-6
    )
    # A scalar of any kind means the same for each item.
    for t in (3, torch.tensor(T), torch.full((24,), T), torch.full((24,), T, dtype=torch.float64)):
        assert torch.equal(estimator.posterior_mean(z, t, x, rng()), whole)
    # The first call computes parts that depend on the images alone.
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fresh = MAKERS[name]().bind(ReferenceSet(reference.images))
            assert torch.equal(fresh.posterior_mean(z, T, x, rng()), whole)
    finally:
        torch.set_default_dtype(torch.float32)
    if estimator.deterministic:
        # One item is another shape of products than 24, so float32 rounds otherwise.
        torch.testing.assert_close(
            estimator.posterior_mean(z[:1], T, x[:1]), whole[:1], atol=1e-5, rtol=0
        )
    generator = rng()
    assert estimator.posterior_mean(z[:0], T, x[:0], generator).shape == z[:0].shape
    assert torch.equal(generator.get_state(), rng().get_state())
    assert torch.equal(z, latents(reference)[1])


@EVERY
def test_copies_share_the_set_and_another_set_leaves_no_trace(name):
    first, second = ReferenceSet(IMAGES), by_two_classes(45)
    first.build_index()
    (x, z), estimator = latents(first), MAKERS[name]().bind(first)

    def mean(own, **options):
        return own.posterior_mean(z, T, x, rng(), **options)

    twin = copy.deepcopy(estimator)
    assert twin.reference.images.data_ptr() == first.images.data_ptr()
    assert torch.equal(mean(twin), mean(estimator))
    fresh = pickle.loads(pickle.dumps(MAKERS[name]())).bind(second)
    assert torch.equal(mean(estimator.bind(second)), mean(fresh))
    if not estimator.takes_labels:
        with pytest.raises(InputError, match=r"use ByClass\("):
            mean(estimator, labels=torch.zeros(24, dtype=torch.int64))
        by_class = mean(class_conditional(MAKERS[name]()).bind(second), labels=torch.arange(24) % 2)
        assert by_class.isfinite().all()
        # At this noise level one of them is the source itself.
        assert torch.equal(by_class, mean(estimator)) == (name == "Switched, one sample")


class Own(Estimator):
    """A user's estimator, whose hook is a function (z, t, x_source, generator)."""

    def __init__(self, hook, **flags):
        self.hook = hook
        vars(self).update(flags)

    def _posterior_mean(self, *arguments):
        return self.hook(*arguments)

    def _warped_mean(self, z, t, warp, x_source, generator):
        return self.hook(z, t, x_source, generator)


class OwnLabels(Own):
    """A user's estimator that looks at labels itself."""

    takes_labels = True

    def _posterior_mean(self, z, t, x_source, generator, labels=None):
        return self.hook(z)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (
            lambda z, *_: None,
            r"the posterior mean must be a tensor \(4, 1, 4, 4\) on cpu, got NoneType$",
        ),
        (
            lambda z, *_: z[:1],
            r"the posterior mean must be a tensor .*, got \(1, 1, 4, 4\) on cpu$",
        ),
        (
            lambda z, *_: z.to("meta"),
            r"the posterior mean must be a tensor .*, got \(4, 1, 4, 4\) on meta$",
        ),
        (lambda z, *_: z / 0, "the estimate of the posterior mean is not finite"),
    ],
)
def test_what_is_no_mean_of_each_z_is_refused(hook, said):
    reference, z = by_two_classes(), torch.zeros(4, 1, 4, 4)
    estimator, unchanged = Own(hook).bind(reference), unwarped(torch.zeros(4, 2, dtype=torch.bool))
    for call in (
        lambda: estimator.posterior_mean(z, T),
        lambda: estimator.warped_mean(z, T, unchanged, z),
        # The parts of ByClass have other estimators' rows to be mixed up with.
        lambda: (
            ByClass(Own(hook))
            .bind(reference)
            .posterior_mean(z, T, labels=torch.tensor([0, 1, 0, 1]))
        ),
        lambda: OwnLabels(hook).bind(reference).posterior_mean(z, T),
    ):
        with pytest.raises(InputError, match=r"^Own(Labels)?: "):
            call()
    with pytest.raises(InputError, match=said):
        estimator.posterior_mean(z, T)
    wide = OwnLabels(lambda z: z.double()).bind(reference)
    assert Switched(wide, wide, T).bind(reference).posterior_mean(z, T).dtype == z.dtype
    wide.takes_labels = False
    assert (
        ByClass(wide).bind(reference).posterior_mean(z, T, labels=torch.arange(4) % 2).dtype
        == z.dtype
    )
    # Without its own `_warped_mean`, it would give warped items the mean of `Own`.
    assert not type("Other", (Own,), {"_posterior_mean": lambda *_: None})(hook).can_warp


def test_hook_may_overwrite_arguments_and_gets_no_source():
    seen = []

    def hook(z, t, x_source, _):
        seen.append(x_source)
        return z.zero_() if x_source is None else z.zero_() + x_source.mul_(2) * t.mul_(3)

    estimator, unchanged = (
        Own(hook).bind(ReferenceSet(IMAGES)),
        unwarped(torch.zeros(4, 2, dtype=torch.bool)),
    )
    z, x, t = (
        torch.ones(4, 1, 4, 4),
        torch.ones(4, 1, 4, 4),
        torch.full((4,), 2.0, dtype=torch.float64),
    )
    estimator.posterior_mean(z, t, x)
    assert seen == [None]
    estimator.uses_source = True
    with torch.inference_mode():  # where PyTorch would not notice
        for mean in (estimator.posterior_mean(z, t, x), estimator.warped_mean(z, t, unchanged, x)):
            assert (mean == 12).all()
    assert (z == 1).all()
    assert (x == 1).all()
    assert (t == 2).all()


class Shrunk(KNN):
    """An own estimator that changes one of ours, and may read the images of this rank alone."""


@pytest.mark.parametrize(
    ("estimator", "shown"),
    [
        (KNN(k=6), "KNN(k=6, n=256, include_source=False)"),
        (Exact(), "Exact()"),
        (ByClass(STF(n=8)), "ByClass(estimator=STF(n=8), unlabelled=False)"),
        (Switched(OneSample(), Exact(), 2.0), "Switched(below=OneSample(), above=Exact(), t=2.0)"),
        (Shrunk(k=4, n=5), "Shrunk(k=4, n=5, include_source=False)"),
        (
            Mixed(torch.nn.Identity(), Exact(), 0.5),
            "Mixed(first=Network(path=Identity, fp16=False), second=Exact(), share=0.5)",
        ),
    ],
)
def test_an_estimator_shows_its_options(estimator, shown):
    assert repr(estimator) == shown


def test_a_default_that_a_small_set_reduces_is_shown_reduced():
    with pytest.warns(UserWarning, match="going on with k=60"):
        estimator = KNN().bind(ReferenceSet(IMAGES))
    assert repr(estimator) == "KNN(k=60, n=256, include_source=False)"


def test_draws_without_generator_repeat_with_it_and_vary():
    reference = ReferenceSet(IMAGES)
    (_, z), own = latents(reference), Own(lambda z, *_: z + torch.randn_like(z)).bind(reference)
    before, generator, again = torch.get_rng_state(), rng(), rng()
    first, second = (own.posterior_mean(z, T, None, generator) for _ in range(2))
    assert torch.equal(own.posterior_mean(z, T, None, again), first)
    assert torch.equal(own.posterior_mean(z, T, None, again), second)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    own.deterministic = True
    with pytest.raises(
        InputError, match=r"own: Own says that it is deterministic, but two calls differ"
    ):
        error_curve({"own": own}, reference, [T], num_z=4, repeats=2)


# `tests/reference/test_sharded.py` compares the shardable estimators on several ranks with the whole set.
@pytest.mark.parametrize(
    "estimator",
    [
        MonteCarlo(n=4),
        Noised(Exact(), "posterior", 1.0),
        Own(lambda z, *_: z),
        Shrunk(k=4, n=4),
        Switched(OneSample(), MonteCarlo(n=4), T),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_estimator_without_shardable_flag_refuses_shards(estimator):
    with pytest.raises(
        InputError, match="needs the whole reference set on each rank, this one is sharded"
    ):
        estimator.bind(ShardedReferenceSet(IMAGES))


class Remembering(Estimator):
    """The mean of all images, which an own estimator keeps in a dict, a list and a set."""

    def __init__(self):
        self.by_name, self.in_order, self.once = {}, [], set()

    def _posterior_mean(self, z, t, x_source, generator):
        mean = self.by_name.setdefault("mean", self.reference.mean())
        self.in_order.append(mean)
        self.once |= self.once or {mean}
        return (mean + self.in_order[0] + next(iter(self.once))).view(z[:1].shape).expand_as(z) / 3


class Holding(Estimator):
    """The mean of another estimator, which it binds itself, and holds twice."""

    def __init__(self, part):
        self.part, self.parts = part, [part]

    def bind(self, reference):
        self.part.bind(reference)
        return super().bind(reference)

    def _posterior_mean(self, z, t, x_source, generator):
        return self.parts[0].posterior_mean(z, t)


@pytest.mark.parametrize("estimator", [Remembering(), Holding(Remembering())])
def test_what_an_estimator_keeps_of_a_class_is_kept_apart(estimator):
    bound = ByClass(estimator).bind(by_two_classes())
    mean = bound.posterior_mean(torch.zeros(2, 1, 4, 4), T, labels=torch.arange(2))
    expected = torch.stack([IMAGES[label::2].float().mean(0) / 127.5 - 1 for label in range(2)])
    torch.testing.assert_close(mean, expected)
