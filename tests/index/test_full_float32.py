"""Estimators compute float32 products in full precision, whatever the process allows."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_knn.estimators import KNN, STF, Exact, MonteCarlo, SubspaceKNN, Wiener
from lit_knn.index import SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors, noisy

MAKERS = {
    "Exact": Exact,
    "KNN": lambda: KNN(k=20, n=8),
    "MonteCarlo": lambda: MonteCarlo(n=8),
    "STF": lambda: STF(n=8),
    "SubspaceKNN": lambda: SubspaceKNN(r=5, n=8, compute="float32"),
    "Wiener": lambda: Wiener(r=5),
}
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::mv", "aten::addmv")


class Precisions(TorchDispatchMode):
    """Records the precision that is set at each float32 product."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().split(".")[0] in PRODUCTS and args[0].dtype == torch.float32:
            self.seen.append(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["medium", "high"])
def low(request):
    """A precision below the highest, which is set for the test."""
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", MAKERS)
def test_every_float32_product_of_an_estimator_is_in_full_precision(name, low):
    reference = ReferenceSet(low_rank_vectors(), index=TorchIndex("float32"))
    x = reference.gather(torch.arange(20))
    estimator = MAKERS[name]()
    generator = torch.Generator().manual_seed(0)
    with Precisions() as precisions:
        estimator.bind(reference)
        estimator.posterior_mean(noisy(x, 2.0), 2.0, x, generator)
        if hasattr(estimator, "certified_mean"):
            estimator.certified_mean(noisy(x, 2.0), 2.0, x, generator)
    assert set(precisions.seen) <= {"highest"}
    assert precisions.seen
    assert torch.get_float32_matmul_precision() == low


@pytest.mark.parametrize("index", [TorchIndex("float32"), SubspaceIndex(r=5, compute="float32")])
def test_estimates_do_not_depend_on_the_precision_of_the_process(index):
    # On processors with bfloat16, "medium" really rounds products.
    means, vectors = [], low_rank_vectors(N=300, d=64)
    x = vectors[:40]
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            reference = ReferenceSet(vectors, index=index)
            for name in ("KNN", "SubspaceKNN", "Wiener"):
                estimator = MAKERS[name]().bind(reference)
                means.append(estimator.posterior_mean(noisy(x, 1.0), 1.0, x, torch.Generator().manual_seed(0)))
    finally:
        torch.set_float32_matmul_precision("highest")
    half = len(means) // 2
    assert all(torch.equal(*pair) for pair in zip(means[:half], means[half:], strict=True))
