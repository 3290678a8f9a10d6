"""`TopK` against enumeration in float64."""

import pytest
import torch
from scipy.special import softmax

from lit_knn.estimators import Exact, TopK
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet


def noisy(reference, t, count=12):
    generator = torch.Generator().manual_seed(1)
    x = reference.take(torch.arange(count))
    return x + t * torch.randn(x.shape, generator=generator)


@pytest.fixture
def reference():
    generator = torch.Generator().manual_seed(0)
    return ReferenceSet(torch.randint(0, 256, (60, 1, 4, 4), dtype=torch.uint8, generator=generator))


@pytest.mark.parametrize("t", [1e-3, 0.3, 3.0, 1e3])
def test_the_mean_is_over_the_nearest_images(reference, t):
    z, images = noisy(reference, t), reference.take(torch.arange(60)).flatten(1).double()
    sq_dist = (z.flatten(1).double().unsqueeze(1) - images).square().sum(2)
    nearest = sq_dist.argsort(1)[:, :7]
    weights = torch.tensor(softmax(-sq_dist.gather(1, nearest).numpy() / (2 * t**2), axis=1))
    wanted = torch.einsum("bk,bkd->bd", weights, images[nearest])
    mean = TopK(7).bind(reference).posterior_mean(z, t).flatten(1).double()
    torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-5)


def test_an_index_that_finds_fewer_images_gives_their_mean():
    images = torch.randint(0, 256, (60, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    reference = ReferenceSet(images, FaissIndex("IVF20,Flat", 1))
    z = noisy(reference, 0.1)
    estimator = TopK(20).bind(reference)
    _, ids = reference.search(z, 20)
    assert (ids < 0).any()
    for own, found, mean in zip(z, ids, estimator.posterior_mean(z, 0.1), strict=True):
        few = ReferenceSet(images[found[found >= 0]])
        wanted = Exact().bind(few).posterior_mean(own.unsqueeze(0), 0.1)
        torch.testing.assert_close(mean.unsqueeze(0), wanted, rtol=0, atol=1e-5)
