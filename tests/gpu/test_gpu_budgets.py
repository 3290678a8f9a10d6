"""What one call of each estimator costs on a GPU: waits for the device, operations, and bytes that are moved.

The stand-in counts an operation where a GPU launches a kernel or more.
"""

import functools

import pytest
import torch

from lit_knn.estimators import KNN, ByClass, OneSample, SubspaceKNN, Wiener
from lit_knn.index import SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from tests.toys import noisy

N, B = 2000, 64


@functools.cache
def images():
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(0, 200, (100, 3, 8, 8), dtype=torch.uint8, generator=generator)
    noise = torch.randint(0, 50, (N, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return groups.repeat_interleave(4, 2).repeat_interleave(4, 3).repeat(N // 100, 1, 1, 1) + noise


def reference(index=None, hflip=False):
    made = ReferenceSet(images(), index or TorchIndex(), hflip=hflip)
    return made.to("cuda")


# The estimator, and how many operations a call may take where nothing is compiled.
CASES = {
    "KNN": (lambda: KNN(k=512).bind(reference()), 130),
    "KNN, mirrored": (lambda: KNN(k=512).bind(reference(hflip=True)), 150),
    "KNN, SubspaceIndex": (lambda: KNN(k=512).bind(reference(SubspaceIndex(64))), 135),
    "KNN, source": (lambda: KNN(k=512, include_source=True).bind(reference()), 185),
    "SubspaceKNN": (lambda: SubspaceKNN(r=64).bind(reference()), 165),
    "Wiener": (lambda: Wiener(r=64).bind(reference()), 32),
    "OneSample": (OneSample, 22),
}


def latents():
    x = images()[torch.randperm(N, generator=torch.Generator().manual_seed(1))[:B]] / 127.5 - 1
    t = torch.logspace(-1, 1.9, B, dtype=torch.float64)
    return noisy(x, t).cuda(), t.cuda(), x.cuda()


def cost(stand_in, estimator, labels=None):
    z, t, x = latents()
    generator = torch.Generator("cuda").manual_seed(0)
    arguments = z, t, x if estimator.uses_source else None, generator, labels
    estimator.posterior_mean(*arguments)
    with stand_in.record() as seen:
        estimator.posterior_mean(*arguments)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_a_call_waits_once_and_takes_few_operations(stand_in, name):
    make, most = CASES[name]
    seen = cost(stand_in, make())
    assert seen.syncs == 1, seen.report()
    assert seen.ops <= most, seen.report()


def test_a_search_moves_the_scores_and_the_codes_a_few_times(stand_in):
    made = reference()
    z, _, _ = latents()
    made.search(z, 512)
    with stand_in.record() as seen:
        made.search(z, 512)
    codes, scores = N * made.d, 4 * B * N
    # The codes are read in 8 bits, written in 16 and read in 16. The scores pass the product, the norms and the choice.
    assert seen.bytes <= 5 * codes + 4 * scores + 30 * z.nbytes, seen.report()
    assert seen.syncs == 0, seen.report()
    assert seen.ops <= 14, seen.report()


def test_classes_that_are_known_on_the_host_wait_once_together(stand_in):
    classes = 5
    labels = torch.arange(N) % classes
    made = ReferenceSet(images(), TorchIndex(), labels=labels).to("cuda")
    seen = cost(stand_in, ByClass(KNN(k=20)).bind(made), torch.arange(B) % classes)
    # The one wait is the check of the input.
    assert seen.syncs == 1, seen.report()
