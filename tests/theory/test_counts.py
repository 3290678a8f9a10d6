"""Counts of images and components: a small set lowers a default, with a warning; it refuses a count that was given."""

import warnings

import pytest
import torch

from lit_knn.commands.plan import estimator_parts
from lit_knn.common.errors import InputError
from lit_knn.common.settings import describe
from lit_knn.data import Digits
from lit_knn.estimators import KNN, STF, ByClass, MonteCarlo, SubspaceKNN, UniformSNIS, Wiener
from lit_knn.estimators.counts import DEFAULT_K, DEFAULT_N, DEFAULT_R
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors, noisy

pytestmark = pytest.mark.filterwarnings("ignore:.* the default ")

N, D = 40, 12
# The counts of each estimator for 40 images of 12 dimensions.
TAKEN_DOWN = [(KNN, {"k": N}), (SubspaceKNN, {"r": D, "n": N}), (Wiener, {"r": D})]
EACH = pytest.mark.parametrize(("kind", "counts"), TAKEN_DOWN, ids=lambda value: getattr(value, "__name__", ""))


def reference(N=N, **options):
    return ReferenceSet(low_rank_vectors(N=N), **options)


def lines_of(action):
    """All warnings of an action, including the ones that Python shows only once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def rng():
    return torch.Generator().manual_seed(4)


# The values are the paper's (tab:hyperparams); r is ours.
def test_defaults_are_the_paper_s():
    assert (DEFAULT_K, DEFAULT_N, DEFAULT_R) == (2048, 256, 512)
    assert (KNN().k, KNN().n, STF().n, UniformSNIS().n, MonteCarlo().n) == (2048, 256, 256, 256, 256)
    assert (SubspaceKNN().r, SubspaceKNN().n, Wiener().r) == (512, 256, 512)
    assert (KNN(7).k, KNN(7, None).n) == (7, 256)


@EACH
def test_a_default_is_taken_down_with_one_line_each(kind, counts):
    estimator = kind()
    said = lines_of(lambda: estimator.bind(reference()))
    assert {name: getattr(estimator, name) for name in counts} == counts
    assert len(said) == len(counts)
    for line, (name, number) in zip(said, counts.items(), strict=True):
        assert line.startswith(f"{kind.__name__}: the default {name}={getattr(kind, name).default} is more than ")
        assert line.endswith(f" of the reference set; going on with {name}={number}")


@EACH
def test_the_estimate_is_that_of_the_number_in_effect(kind, counts):
    data, z = reference(), noisy(low_rank_vectors(N=N), 1.0)
    default = kind().bind(data).posterior_mean(z, 1.0, generator=rng())
    assert torch.equal(default, kind(**counts).bind(data).posterior_mean(z, 1.0, generator=rng()))
    assert describe(kind().bind(data)) == describe(kind(**counts).bind(data))


@EACH
def test_a_number_of_ones_own_is_refused_with_what_to_give(kind, counts):
    for name, number in counts.items():
        kind(**{name: number}).bind(reference())
        estimator, other = kind(**{name: number + 1}), reference(N=200)
        refused = rf"^{kind.__name__}: {name}={number + 1} is more than .*: give {name} <= {number}, or null"
        with pytest.raises(InputError, match=refused):
            estimator.bind(reference())
        with pytest.raises(InputError, match="is used before bind"):
            _ = estimator.reference
        if name != "r":  # more images do not change d
            assert getattr(estimator.bind(other), name) == number + 1


def test_mirrored_images_count():
    pictures = torch.randint(256, (30, 1, 4, 4), dtype=torch.uint8)
    assert KNN().bind(ReferenceSet(pictures, hflip=True)).k == 60


def labelled():
    return reference(N=30, labels=torch.arange(30) // 12)  # 12, 12 and 6 images


def test_one_line_for_all_classes_each_of_which_has_its_own_number():
    estimator = KNN(n=4)
    by_class = ByClass(estimator)
    (line,) = lines_of(lambda: by_class.bind(labelled()))
    assert line.endswith("k=2048 is more than the 12 images of class 0; going on in each class with as many as it has")
    assert [by_class.parts[label].k for label in range(3)] == [12, 12, 6]


def test_a_plan_counts_what_a_run_would_take():
    data = Digits()
    held = [
        {part.name: part for part in estimator_parts([estimator], data, data.stored(), torch.device("cpu"))[0]}
        for estimator in (SubspaceKNN(compute="float32"), SubspaceKNN(64, compute="float32"))
    ]
    name = "r=64 coordinates, float32"  # the digits have 64 dimensions
    assert held[0][name] == held[1][name]
    assert KNN.k.within(KNN(), 1797, 64) == 1797
    with pytest.raises(InputError, match="KNN: k=1798 is more than the 1797 images"):
        estimator_parts([KNN(1798)], data, data.stored(), torch.device("cpu"))
