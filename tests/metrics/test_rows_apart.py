"""Rows of a batch do not disturb each other, even if one has so little noise that nothing is left to draw."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_knn.estimators import KNN, STF, Exact, MonteCarlo, SubspaceKNN, Wiener
from lit_knn.index import TorchIndex
from lit_knn.index.precision import is_native
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean
from tests.toys import pixels

TYPES = [
    name for name in ("float32", "bfloat16") if is_native(getattr(torch, name), torch.device("cpu"))
]
CASES = [(KNN(k=256, n=64), TorchIndex(name)) for name in TYPES]
CASES += [(SubspaceKNN(r=r, n=64, compute="float32"), None) for r in (16, 17)]
CASES += [(estimator, None) for estimator in (STF(), MonteCarlo(), Exact(), Wiener(16))]


class ContagiousNaN(TorchDispatchMode):
    """One value that is not finite makes a whole matrix product NaN; on some processors it makes parts of it NaN."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        finite = all(a.isfinite().all() for a in args if isinstance(a, torch.Tensor))
        if func.overloadpacket.__name__ in {"mm", "addmm", "bmm", "baddbmm"} and not finite:
            result.fill_(torch.nan)
        return result


def mixed_latents(reference, B):
    """z, t and the source; t alternates between levels with one certain image and with all images possible."""
    t = torch.logspace(-2.7, 1.9, B, dtype=torch.float64)[torch.randperm(B)]
    x = reference.gather(torch.randint(reference.N, (B,)))
    return x + t[:, None, None, None].float() * torch.randn(x.shape), t, x


@pytest.mark.parametrize(("estimator", "index"), CASES, ids=lambda part: type(part).__name__)
def test_a_row_that_leaves_nothing_to_draw_does_not_reach_others(estimator, index):
    reference = ReferenceSet(pixels(1797, (1, 8, 8)), index=index)
    z, t, x = mixed_latents(reference, 128)
    plain = estimator.bind(reference).posterior_mean(z, t, x, torch.Generator().manual_seed(3))
    assert plain.isfinite().all()
    with ContagiousNaN():
        mean = estimator.posterior_mean(z, t, x, torch.Generator().manual_seed(3))
        if hasattr(estimator, "certified_mean"):
            certificate = estimator.certified_mean(z, t, x, torch.Generator().manual_seed(3))
            assert all(part.isfinite().all() for part in certificate)
    torch.testing.assert_close(mean, plain, rtol=0, atol=1e-5)
    if not isinstance(estimator, Wiener):
        # If one image has the whole posterior, the mean is that image, whatever the other rows are.
        expected = posterior_mean(z, reference.gather(torch.arange(1797)), t)
        torch.testing.assert_close(mean[t < 0.05].double(), expected[t < 0.05], rtol=0, atol=1e-3)


def test_noise_too_small_for_float32_reaches_no_other_row():
    reference = ReferenceSet(pixels(300, (1, 8, 8)))
    z, t, x = mixed_latents(reference, 32)
    t[::4] = 1e-21
    z[::4] = x[::4]
    with ContagiousNaN():
        mean = SubspaceKNN(r=16, n=8).bind(reference).posterior_mean(z, t)
    assert mean.isfinite().all()
    torch.testing.assert_close(mean[::4], x[::4], rtol=0, atol=1e-6)
