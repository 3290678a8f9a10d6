"""Which FAISS factories are accepted, and that their distances are squared L2 in model space, against float64."""

import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import KNN, Exact
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors, noisy

pytestmark = pytest.mark.filterwarnings("ignore:.*images are few")
N, D, R = 400, 40, 6


def images():
    # Lengths differ and the mean is not 0, so that a cosine or a Hamming distance differs from L2.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator) * 0.3 * 0.97 ** torch.arange(D) + 0.2
    return x * torch.linspace(0.5, 2, N).unsqueeze(1)


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "IVF4,Flat", "IVF4,SQ8", "PCA20,Flat", "PCA20,IVF4,SQ8"])
def test_accepted_factories_give_squared_l2_distances(factory):
    x = images()
    z = x[::10] + 0.2 * torch.randn(40, D, generator=torch.Generator().manual_seed(1))
    sq_dist, ids = ReferenceSet(x, FaissIndex(factory)).search(z, 5)
    found = (ids >= 0).numpy()
    true = (z.double().unsqueeze(1) - x[ids.clamp(min=0)].double()).square().sum(2).numpy()
    ratio = sq_dist.numpy()[found] / true[found]
    assert 0.7 < np.median(ratio) < 1.3
    assert np.corrcoef(sq_dist.numpy()[found], true[found])[0, 1] > 0.7


OTHER = [
    "", "Bogus", "flat", "Flat ", "SQ6", "SQfp16", "SQ8_direct", "PQ8x4", "HNSW8,Flat", "HNSW1", "LSH", "L2norm,Flat",
    "PCAR16,Flat", "PCAW16,Flat", "OPQ4,Flat", "PCA0,Flat", "PCA4,PCA2,Flat", "IVF0,Flat", "IVF4", "IVF4,PQ4",
    "IVF4_HNSW8,Flat", "IVF4,PCA4,Flat", "SQ8,RFlat", "IDMap,Flat", "Flat\n",
]  # fmt: skip


@pytest.mark.parametrize("factory", OTHER)
def test_other_factories_are_refused(factory):
    with pytest.raises(InputError, match="is not one of the tested kinds: Flat, SQ8, IVF<c>,Flat, IVF<c>,SQ8, PCA<r>,"):
        FaissIndex(factory)


def in_a_subspace():
    """Vectors in an affine subspace of R dimensions, away from the origin."""
    basis = torch.linalg.qr(torch.randn(D, R))[0]
    return torch.randn(N, R) @ basis.T + torch.randn(D)


@pytest.mark.parametrize("factory", [f"PCA{R},Flat", f"PCA{R},IVF4,Flat"])
@pytest.mark.parametrize("cached", [False, True])
def test_distances_are_exact_where_the_projection_keeps_all_of_the_images(factory, cached, tmp_path):
    x = in_a_subspace()
    z = x[:5] + 3 * torch.randn(5, D)
    for _ in range(1 + cached):
        nprobe = 4 if "IVF" in factory else None
        reference = ReferenceSet(x, FaissIndex(factory, nprobe, cache_dir=str(tmp_path) if cached else None))
        sq_dist, ids = reference.search(z, 10)
        exact = (z.double()[:, None] - x.double()).square().sum(2).sort(dim=1)
        torch.testing.assert_close(sq_dist.double(), exact.values[:, :10], rtol=1e-4, atol=1e-3)
        assert torch.equal(ids, exact.indices[:, :10])


def test_the_estimator_is_right_where_one_image_has_all_the_posterior():
    # The noise outside the subspace, ‖z − x‖² ≈ D·t², is much larger than the differences between images.
    x = in_a_subspace() + 1e-3 * torch.randn(N, D)
    z = x[:20] + 0.1 * torch.randn(20, D)
    reference = ReferenceSet(x, FaissIndex(f"PCA{R},Flat"))
    mu = Exact().bind(reference).posterior_mean(z.double(), 0.1)
    mu_hat = KNN(k=100, n=64).bind(reference).posterior_mean(z, 0.1)
    assert (mu_hat - mu).square().mean() < 1e-2 * (x[:20] - x[1:21]).square().mean()


@pytest.mark.parametrize(("factory", "n", "d"), [("PCA99,Flat", 300, 40), ("PCA16,IVF4,SQ8", 10, 20)])
def test_more_principal_components_than_there_are_are_refused_before_they_are_computed(factory, n, d):
    with pytest.raises(InputError, match=rf"factory='{factory}' has \d+ components of min\(N, d\) = min\({n}, {d}\)"):
        FaissIndex(factory).check(n, d)


@pytest.mark.parametrize("nprobe", [None, 16])
def test_a_lookup_leaves_the_next_search_as_thorough_as_before(nprobe):
    x = low_rank_vectors(400)
    reference = ReferenceSet(x, FaissIndex("IVF100,Flat", nprobe=nprobe))
    z = noisy(x[:50], 3.0)
    before = reference.search(z, 20)
    assert reference.locate(x[:50]).tolist() == list(range(50))
    after = reference.search(z, 20)
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[0], before[0])
    # One list holds few of the nearest images, so a search of one list would find others.
    alone = ReferenceSet(x, FaissIndex("IVF100,Flat", nprobe=1)).search(z, 20)
    assert not torch.equal(alone[1], before[1])
