"""Counts of images and components: a small set lowers a default, with a warning; it refuses a count that was given."""

import warnings

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.settings import describe
from lit_knn.estimators import KNN, STF, ByClass, MonteCarlo, SubspaceKNN, UniformSNIS, Wiener
from lit_knn.estimators.counts import DEFAULTS
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors, noisy

N, D = 40, 12


def bound(estimator, reference):
    """Bind an estimator. Returns all warnings, including the ones that Python shows only once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimator.bind(reference)
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


# The values are the paper's (tab:hyperparams); r is ours.
def test_defaults_are_the_paper_s():
    assert (KNN().k, KNN().n, STF().n, UniformSNIS().n, MonteCarlo().n) == (
        2048,
        256,
        256,
        256,
        256,
    )
    assert (SubspaceKNN().r, SubspaceKNN().n, Wiener().r, KNN(7).k, KNN(7, None).n) == (
        512,
        256,
        512,
        7,
        256,
    )


# The counts of each estimator for 40 images of 12 dimensions.
@pytest.mark.parametrize(
    ("kind", "counts"), [(KNN, {"k": N}), (SubspaceKNN, {"r": D, "n": N}), (Wiener, {"r": D})]
)
def test_small_set_lowers_a_default_and_refuses_a_given_number(kind, counts):
    vectors, estimator, given = low_rank_vectors(N), kind(), kind(**counts)
    reference = ReferenceSet(vectors)
    said = bound(estimator, reference)
    assert len(said) == len(counts)
    for line, (name, number) in zip(said, counts.items(), strict=True):
        assert line.startswith(
            f"{kind.__name__}: the default {name}={DEFAULTS[name]} is more than "
        )
        assert line.endswith(f" of the reference set; going on with {name}={number}")
    assert not bound(given, reference)
    means = [
        each.posterior_mean(noisy(vectors, 1.0), 1.0, generator=torch.Generator().manual_seed(4))
        for each in (estimator, given)
    ]
    assert torch.equal(*means)
    assert describe(estimator) == describe(given)
    for name, number in counts.items():
        assert getattr(estimator, name) == number
        own = kind(**{name: number + 1})
        refused = rf"^{kind.__name__}: {name}={number + 1} is more than .*: give {name} <= {number}, or null"
        with pytest.raises(InputError, match=refused):
            own.bind(reference)
        with pytest.raises(InputError, match="is used before bind"):
            _ = own.reference


def test_each_class_has_its_number_with_one_line_for_all():
    labels = torch.arange(30) // 12  # 12, 12 and 6 images
    by_class = ByClass(KNN(n=4))
    (line,) = bound(by_class, ReferenceSet(low_rank_vectors(30), labels=labels))
    assert line.endswith(
        "k=2048 is more than the 12 images of class 0; going on in each class with as many as it has"
    )
    assert [by_class.parts[label].k for label in range(3)] == [12, 12, 6]
    mirrored = KNN()
    bound(mirrored, ReferenceSet(torch.zeros(30, 1, 4, 4, dtype=torch.uint8), hflip=True))
    assert mirrored.k == 60
