"""What estimators refuse when they are made, bound or called: one line, which names the value."""

import math
import re

import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import (
    KNN,
    STF,
    ByClass,
    Exact,
    Mixed,
    Noised,
    OneSample,
    PatchPosterior,
    PCALocality,
    Smoothed,
    SubspaceKNN,
    Switched,
    Wiener,
)
from lit_knn.index import TorchIndex, precision
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import VP, LinearInterpolant, forward_noise
from tests.toys import pixels, unwarped

N, SHAPE = 60, (1, 4, 4)
Z = torch.zeros(5, *SHAPE)
LABELS = torch.arange(N) % 3
UNWARPED = unwarped(torch.zeros(4, 2, dtype=torch.bool))


def reference(**options):
    return ReferenceSet(pixels(N, SHAPE), **options)


def vectors(N=N):
    return ReferenceSet(torch.randn(N, 12))


def exact():
    return Exact().bind(reference())


def by_class():
    return ByClass(Exact()).bind(reference(labels=LABELS))


REFUSED = [
    (lambda: STF(n=0), "STF: n must be at least 1, got 0"),
    (lambda: KNN(k=2.5), "KNN: k must be an integer, got 2.5"),
    (lambda: Smoothed(Exact(), -1.0), "width must be at least 0 and finite, got -1.0"),
    (lambda: Noised(Exact(), "diagonal", 1.0), "covariance='diagonal' must be one of posterior, "),
    (lambda: Noised(Exact(), "posterior", -1.0), "scale must be at least 0 and finite, got -1.0"),
    (lambda: PCALocality(1.5), "threshold must be from 0 to 1, got 1.5"),
    (lambda: PatchPosterior(2.5), "size must be an integer, got 2.5"),
    (lambda: PatchPosterior({0: 3}), "noise levels of size must be finite and above 0, got 0"),
    (
        lambda: SubspaceKNN(compute="float16"),
        "compute='float16' must be one of auto, float32, bfloat16",
    ),
    (lambda: Switched(OneSample(), Exact(), 0), "t must be finite and above 0"),
    (lambda: Mixed(OneSample(), Exact(), 1.5), "share must be from 0 to 1, got 1.5"),
    # a class or a name in place of an estimator
    (lambda: Noised(Exact, "none", 1.0), r"Noised: the class Exact is no estimator: .*Exact\("),
    (lambda: ByClass("Exact"), "ByClass: 'Exact' is no estimator"),
    (lambda: Switched(OneSample(), Exact, 1.0), "Switched: above: the class Exact is no estimator"),
    # sets
    (lambda: KNN(k=61).bind(reference()), "k=61 is more than the 60 images"),
    (
        lambda: KNN(k=121).bind(reference(hflip=True)),
        "the 120 images of the reference set, mirror images counted",
    ),
    (
        lambda: Smoothed(KNN(k=61), 1.0).bind(reference()),
        "Smoothed: KNN: k=61 is more than the 60 images",
    ),
    (
        lambda: SubspaceKNN(r=13, n=8).bind(vectors()),
        r"r=13 is more than min\(N, d\) = min\(60, 12\).*r <= 12",
    ),
    (lambda: PatchPosterior(8).bind(reference()), "size=8 is more than 4"),
    (lambda: PatchPosterior(1).bind(vectors()), r"needs images \(C, H, W\), got data of shape"),
    # labels
    (lambda: Smoothed(ByClass(Exact()), 1.0), "ByClass takes labels itself"),
    (lambda: Noised(ByClass(Exact()), "none", 1.0), "ByClass takes labels itself"),
    (lambda: ByClass(Switched(OneSample(), ByClass(Exact()), 1.0)), "Switched takes labels itself"),
    (lambda: by_class().posterior_mean(Z, 1.0), "ByClass: labels missing"),
    (
        lambda: by_class().posterior_mean(Z, 1.0, labels=LABELS[:5] + 7),
        "label 7 is none of the 3 classes",
    ),
    (
        lambda: by_class().posterior_mean(Z, 1.0, labels=LABELS[:4]),
        r"labels must be \(5,\) int64, got \(4,\)",
    ),
    # calls
    (lambda: OneSample().posterior_mean(Z, 1.0), "OneSample needs x_source"),
    (
        lambda: exact().posterior_mean(Z[:, :, :3], 1.0),
        r"z must be \(B, 1, 4, 4\), got \(5, 1, 3, 4\)",
    ),
    (lambda: exact().posterior_mean(Z.long(), 1.0), "z must be float, got torch.int64"),
    (lambda: exact().posterior_mean(Z / 0, 1.0), "z holds a value that is not finite"),
    (
        lambda: exact().posterior_mean(Z + 1e30, 1.0),
        "z holds 1e[+]30, float32 can square sums up to",
    ),
    (lambda: exact().posterior_mean(Z, 1.0, Z[:3]), r"x_source has shape \(3, 1, 4, 4\), z has"),
    (lambda: exact().posterior_mean(Z, 1.0, Z.long()), "x_source must be float"),
    (lambda: exact().posterior_mean(Z, 1.0, Z.numpy()), "x_source must be a tensor, got ndarray"),
    (lambda: exact().posterior_mean(Z, 1.0, generator=0), "generator must be a torch.Generator"),
    (lambda: exact().posterior_mean(Z, torch.ones(3)), r"t must be a scalar or \(5,\), got \(3,\)"),
    (lambda: exact().score(Z, -1.0, process=VP()), r"above 0, got -1\.0"),
    (lambda: exact().score(Z, 1.0, process=LinearInterpolant()), "no finite noise level at t=1"),
    (
        lambda: Wiener(4).bind(reference()).warped_mean(Z[:4], 1.0, UNWARPED, Z[:4]),
        "cannot estimate .* warped images",
    ),
    # the set and the process
    (lambda: reference().locate(Z[..., :3]), "z has shape"),
    (lambda: reference().gather(np.arange(3)), "ids must be a tensor of integers, got ndarray"),
    (lambda: ReferenceSet("a.npy"), r"got a path; lit_knn.data.reading.reference_from\('a.npy'\)"),
    (
        lambda: ReferenceSet(1e-19 * torch.randn(5, 4)),
        "no value above .* from 1e-15: scale the data",
    ),
    (
        lambda: reference().search(pixels(5, SHAPE), 1),
        "type torch.uint8, but the images, floats in",
    ),
    (
        lambda: forward_noise(pixels(5, SHAPE), 0.5, Z),
        "x must be float, in model space, got torch.uint8",
    ),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_it_is_refused_in_one_line(make, words):
    with pytest.raises(InputError) as told:
        make()
    assert re.search(words, str(told.value)), told.value
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("t", [0.0, -1.0, math.nan, math.inf])
def test_bad_noise_levels_are_refused_with_their_value(t):
    for bad in (t, torch.tensor([1.0, 1.0, t, 1.0, 1.0])):
        for method in (exact().posterior_mean, exact().score):
            with pytest.raises(InputError, match=f"Exact: t .*{t}"):
                method(Z, bad)


def test_unmultipliable_number_type_is_refused(monkeypatch):
    monkeypatch.setattr(precision, "is_native", lambda dtype, device: dtype == torch.float32)
    with pytest.raises(
        InputError, match="compute=bfloat16: this cpu does not multiply it natively"
    ):
        ReferenceSet(pixels(N, SHAPE), TorchIndex("bfloat16")).build_index()


def test_a_count_may_be_an_integer_of_numpy():
    estimator = KNN(k=np.int64(16), n=np.int32(8))
    assert (type(estimator.k), estimator.k, estimator.n) == (int, 16, 8)
