"""Means over the images of one class: enumeration in float64, and data shared with the whole set."""

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
    SubspaceKNN,
    UniformSNIS,
    Wiener,
)
from lit_knn.index import FaissIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import classes_of, lie_together
from tests.toys import enumerate_class_mean, noisy, rng

# The classes have unequal sizes, and their labels do not start at 0.
SIZES = {2: 11, 3: 40, 7: 25}


def toy_set(sort=True, **options):
    labels = torch.cat([torch.full((size,), label) for label, size in SIZES.items()])
    labels = labels if sort else labels[torch.randperm(len(labels), generator=rng(5))]
    images = torch.randint(0, 200, (len(labels), 1, 4, 4), dtype=torch.uint8, generator=rng())
    # Classes differ in brightness, so that the mean over a wrong class is different.
    return ReferenceSet(images + labels[:, None, None, None].byte() * 7, labels=labels, **options)


def batch(reference, t, size=12):
    """x, z and labels of some images; the classes are mixed."""
    ids = torch.randperm(reference.N, generator=rng(1))[:size]
    x = reference.gather(ids)
    return x, noisy(x, t), reference.labels[ids]


@pytest.mark.parametrize(("sort", "hflip"), [(True, False), (True, True), (False, True)])
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
        shared = (
            own.images.untyped_storage().data_ptr() == reference.images.untyped_storage().data_ptr()
        )
        assert shared is sort
    # The meta device simulates a GPU: it has shapes but no values.
    assert own.mean().device.type == "cpu"
    reference.to("meta")
    assert own.images.device.type == own.mean().device.type == "meta"
    assert not sort or own.images._base is reference.images


@pytest.mark.parametrize("labels", [[2, 2, 0, 1, 1], [0], [0, 1, 0]])
def test_images_in_order_of_class_are_told_from_others(labels):
    assert lie_together(torch.tensor(labels)) == (labels != [0, 1, 0])
    classes = classes_of(
        ReferenceSet(torch.arange(1.0 * len(labels))[:, None], labels=torch.tensor(labels))
    )
    found = {label: own.images.flatten().tolist() for label, own in classes.items()}
    assert found == {label: [i for i, one in enumerate(labels) if one == label] for label in labels}


@pytest.mark.parametrize(
    ("index", "first"),
    [
        (FaissIndex("Flat"), "set"),
        (FaissIndex("SQ8", lossless=True), "class"),
        (TorchIndex("float32"), "set"),
    ],
)
def test_class_has_its_own_index_with_the_settings_of_the_whole(index, first):
    reference = toy_set(index=copy.copy(index))
    if first == "set":
        reference.build_index()
    own = classes_of(reference)[3]
    _, z, _ = batch(reference, 0.5)
    for part in (own, reference):  # neither index replaces the other
        sq_dist, ids = part.search(z, 5)
        x = part.gather(torch.arange(part.N)).flatten(1)
        expected = torch.cdist(z.flatten(1), x).square().topk(5, largest=False)
        torch.testing.assert_close(sq_dist, expected.values, rtol=1e-3, atol=1e-3)
        assert torch.equal(ids, expected.indices)
        assert part.index.settings() == index.settings()


@pytest.mark.parametrize(("sort", "hflip"), [(True, True), (False, False), (False, True)])
def test_exact_is_the_enumerated_mean_of_the_class(sort, hflip):
    reference = toy_set(sort, hflip=hflip)
    estimator = ByClass(Exact()).bind(reference)
    for t in (1e-3, 0.5, 2.0, 10.0, 1e4):
        _, z, labels = batch(reference, t)
        mu = estimator.posterior_mean(z, t, labels=labels)
        expected = enumerate_class_mean(reference, z, t, labels)
        torch.testing.assert_close(mu.double(), expected, rtol=1e-4, atol=1e-4)
        # The classes differ, so the test would notice a wrong class.
        whole = Exact().bind(reference).posterior_mean(z, t)
        assert t < 1 or (whole - mu).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (MonteCarlo, {"n": 8}),
        (UniformSNIS, {"n": 8}),
        (STF, {"n": 8}),
        (KNN, {"k": 6, "n": 8}),
        (SubspaceKNN, {"r": 3, "n": 8}),
        (Wiener, {"r": 3}),
    ],
)
def test_a_mixed_batch_is_what_each_class_gives_by_itself(kind, options):
    reference = toy_set(False, hflip=True)
    x, z, labels = batch(reference, 1.0, size=30)
    t, generator = torch.linspace(0.5, 2.0, 30), rng()
    mixed = ByClass(kind(**options)).bind(reference).posterior_mean(z, t, x, rng(), labels)
    for label in classes_of(reference):
        rows = labels == label
        # This set has only the images of one class, and no labels.
        own = ReferenceSet(
            reference.images[reference.labels[: len(reference.images)] == label], hflip=True
        )
        alone = kind(**options).bind(own).posterior_mean(z[rows], t[rows], x[rows], generator)
        # Processors add the products of a batch in an order that depends on its size. Float32 sums of 40 weighted
        # pixels below 1 then differ by 40 half units in the last place at most; an estimate by twice as much.
        torch.testing.assert_close(
            mixed[rows], alone, rtol=0, atol=40 * torch.finfo(torch.float32).eps
        )


def test_a_class_that_is_too_small_is_named():
    with pytest.raises(InputError, match=r"^class 2: KNN: k=12 is more than"):
        ByClass(KNN(k=12, n=8)).bind(toy_set())
