"""Class-conditional means of a whole batch at once on a GPU: enumeration, the law of the loop, refusals."""

import pytest
import torch

from lit_knn.deferred_checks import DeferredChecks
from lit_knn.errors import InputError
from lit_knn.estimators import KNN, STF, ByClass, Exact, MonteCarlo, StratifiedKNN, SubspaceKNN, UniformSNIS
from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet
from tests.toys import enumerate_class_mean, noisy

# The classes have unequal sizes, and their labels do not start at 0.
SIZES = {2: 11, 3: 40, 7: 25}
LEVELS = [0.05, 0.5, 2.0, 10.0]
SAMPLED = {
    "KNN": lambda n: KNN(k=6, n=n),
    "KNN, all neighbours": lambda n: KNN(n=n),
    "MonteCarlo": MonteCarlo,
    "UniformSNIS": UniformSNIS,
    "STF": STF,
}


def rng(seed=0, device="cpu"):
    return torch.Generator(device).manual_seed(seed)


def toy_set(sort=True, floats=False, hflip=False):
    labels = torch.cat([torch.full((size,), label) for label, size in SIZES.items()])
    labels = labels if sort else labels[torch.randperm(len(labels), generator=rng(5))]
    images = torch.randint(0, 200, (len(labels), 1, 4, 4), dtype=torch.uint8, generator=rng())
    # Classes differ in brightness, so that the mean over a wrong class is different.
    images = images + labels[:, None, None, None].byte() * 7
    return ReferenceSet(images / 100 if floats else images, TorchIndex("float32"), hflip=hflip, labels=labels)


def batch(reference, t, size=12, seed=1):
    """x, z and labels of some images; the classes are mixed."""
    ids = torch.randperm(reference.N, generator=rng(seed))[:size]
    x = reference.gather(ids)
    return x, noisy(x, t, seed), reference.labels[ids]


@pytest.mark.gpu
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize(("floats", "hflip"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("t", LEVELS)
def test_exact_is_the_enumerated_mean_of_the_class(sort, floats, hflip, t):
    reference = toy_set(sort, floats, hflip)
    _, z, labels = batch(reference, t)
    expected = enumerate_class_mean(reference, z, t, labels)
    estimator = ByClass(Exact()).bind(reference.to("cuda"))
    mean = estimator.posterior_mean(z.cuda(), t, labels=labels.cuda())
    torch.testing.assert_close(mean.cpu().double(), expected, atol=2e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("name", SAMPLED)
def test_many_draws_give_the_enumerated_mean_of_the_class(name, hflip):
    reference, t = toy_set(False, hflip=hflip), 2.0
    _, z, labels = batch(reference, t)
    expected = enumerate_class_mean(reference, z, t, labels)
    estimator = ByClass(SAMPLED[name](5000)).bind(reference.to("cuda"))
    mean = estimator.posterior_mean(z.cuda(), t, generator=rng(3, "cuda"), labels=labels.cuda())
    assert (mean.cpu() - expected).abs().max() < 0.06


@pytest.mark.gpu
@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize("name", SAMPLED)
def test_estimates_vary_like_those_of_the_loop_over_classes(name, source):
    # Many copies of one latent of each class give the mean and the variance of few draws.
    copies, t = 1500, 1.0
    reference = toy_set(False)
    x, z, labels = (part[[0, 1, 2]].repeat_interleave(copies, 0) for part in batch(reference, t, seed=4))
    estimator = ByClass(SAMPLED[name](4)).bind(reference)
    moments = []
    for device in ("cpu", "cuda"):
        estimator.reference.to(device)
        given = x.to(device) if source else None
        mean = estimator.posterior_mean(z.to(device), t, given, rng(1, device), labels.to(device)).cpu().double()
        groups = mean.view(3, copies, -1)
        moments.append((groups.mean(1), groups.var(1)))
    (one_mean, one_var), (mean, var) = moments
    assert ((mean - one_mean).abs() < 5 * ((var + one_var) / copies).sqrt() + 1e-6).all()
    assert ((var.sum(1) / one_var.sum(1)).log().abs() < 0.3).all()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [lambda: KNN(k=11, n=8), lambda: UniformSNIS(8)], ids=["KNN", "UniformSNIS"])
def test_estimates_lie_among_the_images_of_the_class_and_repeat(make):
    reference = toy_set(False, hflip=True)
    _, z, labels = batch(reference, 5.0, size=60)
    x = reference.gather(torch.arange(reference.N))
    low, high = (
        torch.stack([getattr(x[reference.labels == one], side)(0) for one in labels]) for side in ("amin", "amax")
    )
    estimator = ByClass(make()).bind(reference.to("cuda"))
    means = [estimator.posterior_mean(z.cuda(), 5.0, generator=rng(2, "cuda"), labels=labels.cuda()) for _ in range(2)]
    assert torch.equal(*(mean.cpu() for mean in means))
    assert ((means[0].cpu() >= low - 1e-5) & (means[0].cpu() <= high + 1e-5)).all()


@pytest.mark.gpu
def test_a_search_of_all_images_at_small_t_finds_the_nearest_of_the_class():
    reference = toy_set()
    x, z, labels = batch(reference, 0.002)
    for wrapped in (Exact(), KNN(k=3, n=4), MonteCarlo(4)):
        mean = ByClass(wrapped).bind(reference.to("cuda")).posterior_mean(z.cuda(), 0.002, labels=labels.cuda())
        torch.testing.assert_close(mean.cpu(), x, atol=1e-5, rtol=0)


@pytest.mark.gpu
def test_a_class_needs_no_index_until_the_loop_searches_it():
    reference = toy_set().to("cuda")
    x, z, labels = (part.cuda() for part in batch(toy_set(), 1.0))
    estimator = ByClass(KNN(k=5, n=8)).bind(reference)
    estimator.posterior_mean(z, 1.0, labels=labels)
    assert not any(part.index_built for part in reference.classes.values())
    estimator.reference.to("cpu")
    mean = estimator.posterior_mean(z.cpu(), 1.0, generator=rng(), labels=labels.cpu())
    assert all(part.index_built for part in reference.classes.values())
    assert mean.isfinite().all()
    assert x.shape == mean.shape


@pytest.mark.gpu
@pytest.mark.parametrize("label", [0, 4, 8])
@pytest.mark.parametrize("make", [Exact, lambda: KNN(k=3, n=4), lambda: SubspaceKNN(2, n=4)])
def test_unknown_labels_are_refused(make, label):
    estimator = ByClass(make()).bind(toy_set().to("cuda"))
    z, labels = torch.zeros(3, 1, 4, 4, device="cuda"), torch.tensor([2, label, 3], device="cuda")
    with pytest.raises(InputError, match=f"label {label} is none of the 3 classes"):
        estimator.posterior_mean(z, 1.0, labels=labels)
    with pytest.raises(InputError, match="labels missing"):
        estimator.posterior_mean(z, 1.0)
    with pytest.raises(InputError, match="t must be finite"):
        estimator.posterior_mean(z, -1.0, labels=labels)
    with pytest.raises(InputError, match="x_source holds"):
        estimator.posterior_mean(z, 1.0, torch.full_like(z, torch.nan), labels=labels)


def test_a_training_step_notes_an_unknown_label_without_waiting(stand_in):
    estimator, checks = ByClass(Exact()).bind(toy_set().to("cuda")), DeferredChecks()
    z, labels = torch.zeros(2, 1, 4, 4, device="cuda"), torch.tensor([2, 5], device="cuda")
    estimator.posterior_mean(z, torch.ones(2, device="cuda"), labels=labels.clamp(max=2))
    with checks.collect(3), stand_in.record() as seen:
        mean = estimator.posterior_mean(z, torch.ones(2, device="cuda"), labels=labels)
    assert seen.syncs == 0, seen.report()
    assert mean.shape == z.shape
    with pytest.raises(InputError, match="label 5 is none of the 3 classes of the reference set at step 3"):
        checks.raise_first()


def test_a_plan_counts_an_index_only_where_one_is_built():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    made = ByClass(KNN(k=8))
    assert [made.holds(100, 48, True, device).neighbours for device in (cpu, gpu)] == [8, 0]
    assert ByClass(StratifiedKNN(k=8)).holds(100, 48, True, gpu).neighbours == 8


@pytest.mark.gpu
def test_a_class_smaller_than_k_is_named():
    with pytest.raises(InputError, match=r"class 2: KNN: k=12 is more than"):
        ByClass(KNN(k=12)).bind(toy_set().to("cuda"))


@pytest.mark.gpu
def test_an_empty_batch_is_an_empty_mean():
    estimator = ByClass(KNN(k=3, n=4)).bind(toy_set().to("cuda"))
    labels = torch.empty(0, dtype=torch.int64, device="cuda")
    assert estimator.posterior_mean(torch.empty(0, 1, 4, 4, device="cuda"), 1.0, labels=labels).shape == (0, 1, 4, 4)


@pytest.mark.gpu
def test_a_subclass_keeps_its_own_estimate():
    class Zero(KNN):
        def _posterior_mean(self, z, t, x_source, generator):
            return torch.zeros_like(z)

    _, z, labels = batch(toy_set(), 1.0)
    estimator = ByClass(Zero(k=3)).bind(toy_set().to("cuda"))
    assert (estimator.posterior_mean(z.cuda(), 1.0, labels=labels.cuda()) == 0).all()
    all_images = ByClass(StratifiedKNN(k=11)).bind(toy_set().to("cuda"))
    mean = all_images.posterior_mean(z.cuda(), 1.0, labels=labels.cuda()).cpu()
    torch.testing.assert_close(mean.double(), enumerate_class_mean(toy_set(), z, 1.0, labels), atol=1e-4, rtol=0)


def operations(stand_in, wrapped, classes):
    images = torch.randint(0, 256, (600, 1, 4, 4), dtype=torch.uint8, generator=rng())
    labels = torch.arange(600) % classes
    estimator = ByClass(wrapped).bind(ReferenceSet(images, TorchIndex(), labels=labels).to("cuda"))
    z, labels = torch.randn(64, 1, 4, 4).cuda(), labels[:64].cuda()
    estimator.posterior_mean(z, 1.0, labels=labels)
    with stand_in.record() as seen:
        estimator.posterior_mean(z, 1.0, labels=labels)
    return seen


@pytest.mark.parametrize(
    ("make", "budget"),
    [(Exact, 45), (lambda: KNN(k=5, n=16), 95), (lambda: STF(16), 50), (lambda: MonteCarlo(16), 60)],
    ids=["Exact", "KNN", "STF", "MonteCarlo"],
)
def test_operations_do_not_grow_with_the_number_of_classes(stand_in, make, budget):
    few, many = (operations(stand_in, make(), classes) for classes in (2, 50))
    assert few.ops == many.ops <= budget, many.report()
    assert many.syncs == 1, many.report()
