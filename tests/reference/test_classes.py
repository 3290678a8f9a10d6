"""Means over the images of one class: enumeration in float64, limits, and data shared with the whole set."""

import copy

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import (
    KNN,
    STF,
    ByClass,
    Exact,
    MonteCarlo,
    OneSample,
    SubspaceKNN,
    TopK,
    UniformSNIS,
    Wiener,
)
from lit_knn.index import FaissIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import classes_of, lie_together
from tests.toys import enumerate_class_mean, noisy

NOISE_LEVELS = [0.05, 0.5, 2.0, 10.0]
MAKERS = {
    "Exact": Exact,
    "MonteCarlo": lambda: MonteCarlo(n=8),
    "TopK": lambda: TopK(k=3),
    "UniformSNIS": lambda: UniformSNIS(n=8),
    "STF": lambda: STF(n=8),
    "KNN": lambda: KNN(k=6, n=8),
    # Classes of unlike sizes: each draws all of its images.
    "SubspaceKNN": lambda: SubspaceKNN(r=3, n=8),
    "Wiener": lambda: Wiener(r=3),
    "OneSample": OneSample,
}
WITH_REFERENCE = pytest.mark.parametrize("name", [name for name in MAKERS if name != "OneSample"])
# The classes have unequal sizes, and their labels do not start at 0.
SIZES = {2: 11, 3: 40, 7: 25}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def toy_labels(sort=True):
    labels = torch.cat([torch.full((size,), label) for label, size in SIZES.items()])
    return labels if sort else labels[torch.randperm(len(labels), generator=rng(5))]


def toy_set(sort=True, **options):
    labels = toy_labels(sort)
    images = torch.randint(0, 200, (len(labels), 1, 4, 4), dtype=torch.uint8, generator=rng())
    # Classes differ in brightness, so that the mean over a wrong class is different.
    return ReferenceSet(images + labels[:, None, None, None].byte() * 7, labels=labels, **options)


def batch(reference, t, size=12, seed=1):
    """x, z and labels of some images; the classes are mixed."""
    ids = torch.randperm(reference.N, generator=rng(seed))[:size]
    x = reference.gather(ids)
    return x, noisy(x, t, seed), reference.labels[ids]


def assert_same_up_to_order(mean, expected):
    """Compare means of the same draws from batches of other sizes.

    Processors add the products of a batch in an order that depends on its size. Float32 sums of 40 weighted pixels
    below 1 then differ by 40 half units in the last place at most; an estimate may be twice as large.
    """
    torch.testing.assert_close(mean, expected, rtol=0, atol=40 * torch.finfo(torch.float32).eps)


# The reference set of a class


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("hflip", [True, False])
def test_a_class_holds_its_images_and_no_others(sort, hflip):
    reference = toy_set(sort, hflip=hflip)
    assert tuple(classes_of(reference)) == (2, 3, 7)
    everything = reference.gather(torch.arange(reference.N))
    for label, size in SIZES.items():
        own = classes_of(reference)[label]
        assert own is classes_of(reference)[label]
        assert (own.N, own.shape, own.hflip) == (size * (1 + hflip), reference.shape, hflip)
        assert own.labels.tolist() == [label] * own.N
        assert torch.equal(own.gather(torch.arange(own.N)), everything[reference.labels == label])
        shared = own.images.untyped_storage().data_ptr() == reference.images.untyped_storage().data_ptr()
        assert shared is sort


def test_classes_move_with_their_set():
    # The meta device simulates a GPU: it has shapes but no values.
    for sort in (True, False):
        reference = toy_set(sort)
        own = classes_of(reference)[3]
        own.mean()
        reference.to("cpu")
        assert own.mean().device.type == "cpu"
        reference.to("meta")
        assert own.images.device.type == own.mean().device.type == "meta"
        if sort:
            assert own.images._base is reference.images


@pytest.mark.parametrize(
    "index", [FaissIndex("Flat"), FaissIndex("SQ8", lossless=True), TorchIndex("float32")], ids=type
)
@pytest.mark.parametrize("first", ["class", "set"])
def test_a_class_has_an_index_of_its_own_in_the_settings_of_the_whole(index, first):
    reference = toy_set(index=copy.copy(index))
    if first == "set":
        reference.build_index()
    own = classes_of(reference)[3]
    assert type(own.index) is type(index)
    assert own.index is not reference.index
    _, z, _ = batch(reference, 0.5)
    for part in (own, reference):  # neither index replaces the other
        sq_dist, ids = part.search(z, 5)
        x = part.gather(torch.arange(part.N)).flatten(1)
        expected = torch.cdist(z.flatten(1), x).square().topk(5, largest=False)
        torch.testing.assert_close(sq_dist, expected.values, rtol=1e-3, atol=1e-3)
        assert torch.equal(ids, expected.indices)
    if isinstance(index, FaissIndex):
        assert own.index.factory == index.factory
        assert own.index.lossless == index.lossless


@pytest.mark.parametrize("sha256", [None, "0" * 64])
@pytest.mark.parametrize("sort", [True, False])
def test_classes_and_the_whole_set_have_files_of_their_own_in_a_cache(sha256, sort, tmp_path):
    def cached():
        labels = toy_labels(sort)
        # With a known file hash all classes have equal images, and only their rows distinguish them.
        images = torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8)
        if sha256 is None:
            images = images + labels.byte()[:, None, None, None]
        index = FaissIndex("Flat", cache_dir=str(tmp_path))
        return ReferenceSet(images, index, labels=labels, sha256=sha256)

    reference = cached()
    for part in (reference, *classes_of(reference).values()):
        part.build_index()
    parts = [reference, *classes_of(reference).values()]
    assert len({part.fingerprint() for part in parts}) == len(list(tmp_path.glob("*.index"))) == 4
    # The file names are the same whether or not the whole set was hashed before.
    again = cached()
    assert [classes_of(again)[c].fingerprint() for c in classes_of(again)] == [part.fingerprint() for part in parts[1:]]
    before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.glob("*.index"))
    for label in classes_of(again):
        classes_of(again)[label].build_index()
        assert len(classes_of(again)[label].search(torch.zeros(1, 1, 4, 4), SIZES[label])[1].unique()) == SIZES[label]
    assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.glob("*.index")) == before


# Means over one class


@pytest.mark.parametrize("t", NOISE_LEVELS)
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("hflip", [True, False])
def test_exact_is_the_enumerated_mean_of_the_class(hflip, sort, t):
    reference = toy_set(sort, hflip=hflip)
    _, z, labels = batch(reference, t)
    mu = ByClass(Exact()).bind(reference).posterior_mean(z, t, labels=labels)
    expected = enumerate_class_mean(reference, z, t, labels)
    torch.testing.assert_close(mu.double(), expected, rtol=1e-4, atol=1e-4)
    # The classes differ, so the test would notice a wrong class.
    whole = Exact().bind(reference).posterior_mean(z, t)
    assert t < 1 or (whole - mu).abs().max() > 1e-2


@WITH_REFERENCE
@pytest.mark.parametrize("hflip", [True, False])
def test_a_mixed_batch_is_what_each_class_gives_by_itself(name, hflip):
    reference = toy_set(False, hflip=hflip)
    x, z, labels = batch(reference, 1.0, size=30)
    t = torch.linspace(0.5, 2.0, 30)
    mixed = ByClass(MAKERS[name]()).bind(reference).posterior_mean(z, t, x, rng(), labels)
    assert mixed.shape == z.shape
    generator = rng()
    for label in classes_of(reference):
        rows = labels == label
        # This set has only the images of one class, and no labels.
        own = ReferenceSet(reference.images[reference.labels[: len(reference.images)] == label], hflip=hflip)
        alone = MAKERS[name]().bind(own).posterior_mean(z[rows], t[rows], x[rows], generator)
        assert_same_up_to_order(mixed[rows], alone)


@pytest.mark.parametrize("t", [0.5, 2.0, 10.0])
def test_knn_with_all_images_of_a_class_draws_from_its_posterior(t):
    # With k = N the proposal is the posterior, so the mean of many estimates is the class mean.
    reference = toy_set()
    _, z, labels = batch(reference, t, size=1, seed=4)
    size, R = SIZES[labels.item()], 4000
    # k = `size` is allowed for this class only; the others have other sizes.
    estimator = KNN(k=size, n=4).bind(classes_of(reference)[labels.item()])
    repeated = z.expand(R, *z.shape[1:])
    estimates = estimator.posterior_mean(repeated, t, generator=rng()).double()
    mu = enumerate_class_mean(reference, z, t, labels)[0]
    spread = estimates.std(0) / R**0.5
    assert ((estimates.mean(0) - mu).abs() <= 5 * spread + 1e-5).all()
    # All draws have equal weights, so the spread is that of n draws from the posterior.
    own = classes_of(reference)[labels.item()]
    images = own.gather(torch.arange(size)).double()
    log_p = -(images - z.double()).flatten(1).square().sum(1) / (2 * t**2)
    p = torch.softmax(log_p, 0)[:, None, None, None]
    variance = (p * (images - mu).square()).sum(0) / 4
    torch.testing.assert_close(estimates.var(0).mean(), variance.mean(), rtol=0.1, atol=1e-6)


def test_limits_of_the_noise_are_the_nearest_image_and_the_mean_of_the_class():
    reference = toy_set(False)
    x, z, labels = batch(reference, 1e-3)
    estimator = ByClass(Exact()).bind(reference)
    torch.testing.assert_close(estimator.posterior_mean(z, 1e-3, labels=labels), x, rtol=0, atol=1e-6)
    means = torch.stack([classes_of(reference)[c].mean() for c in labels.tolist()]).reshape(z.shape)
    far = estimator.posterior_mean(z, 1e4, labels=labels)
    torch.testing.assert_close(far, means, rtol=0, atol=1e-5)


# Binding


# Bad input


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.tensor([2, 3]), r"ByClass: labels must be \(3,\) int64, got \(2,\)"),
        (torch.tensor([[2, 3, 7]]), r"ByClass: labels must be \(3,\) int64, got \(1, 3\)"),
        (torch.tensor([2.0, 3.0, 7.0]), "ByClass: labels must be .* torch.float32"),
        (torch.tensor([2, 3, 4]), "label 4 is none of the 3 classes of the reference set"),
        (torch.tensor([2, 3, -1]), "label -1 is none of the 3 classes"),
        (torch.tensor([2, 3, 7], device="meta"), "ByClass: labels are on meta, z is on cpu"),
    ],
)
def test_labels_that_cannot_be_are_refused(labels, words):
    estimator = ByClass(KNN(k=6, n=8)).bind(toy_set())
    with pytest.raises(InputError, match=words):
        estimator.posterior_mean(torch.zeros(3, 1, 4, 4), 1.0, labels=labels)


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (KNN(k=12, n=8), "^class 2: KNN: k=12 is more than the 11 images"),
        (SubspaceKNN(r=3, n=12), "^class 2: SubspaceKNN: n=12 is more than the 11 images"),
        (Wiener(r=12), r"^class 2: Wiener: r=12 is more than min\(N, d\)"),
    ],
)
def test_a_class_that_is_too_small_is_named(estimator, words):
    with pytest.raises(InputError, match=words):
        ByClass(estimator).bind(toy_set())


@pytest.mark.parametrize(("labels", "together"), [([2, 2, 0, 1, 1], True), ([0], True), ([0, 1, 0], False)])
def test_images_in_order_of_class_are_told_from_others(labels, together):
    assert lie_together(torch.tensor(labels)) == together
