"""FAISS indexes that project vectors first still give distances in model space."""

import pytest
import torch

from lit_knn.errors import InputError
from lit_knn.estimators import KNN, ExactFloat64
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet

N, D, R = 400, 40, 6


def in_a_subspace():
    """Vectors in an affine subspace of R dimensions, away from the origin."""
    basis = torch.linalg.qr(torch.randn(D, R))[0]
    return torch.randn(N, R) @ basis.T + torch.randn(D)


@pytest.mark.parametrize("factory", [f"PCA{R},Flat", f"PCAR{R},Flat", f"PCA{R + 4},PCA{R},Flat", f"PCA{R},IVF4,Flat"])
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
    mu = ExactFloat64().bind(reference).posterior_mean(z.double(), 0.1)
    mu_hat = KNN(k=100, n=64).bind(reference).posterior_mean(z, 0.1)
    assert (mu_hat - mu).square().mean() < 1e-2 * (x[:20] - x[1:21]).square().mean()


def test_a_missing_neighbour_stays_infinitely_far():
    x = in_a_subspace()
    sq_dist, ids = ReferenceSet(x, FaissIndex(f"PCA{R},IVF20,Flat", 1)).search(x[:3], 300)
    assert (sq_dist[ids < 0] == torch.inf).all()
    assert (ids < 0).any()


def test_more_components_than_dimensions_are_refused():
    with pytest.raises(InputError, match="PCA99"):
        ReferenceSet(in_a_subspace(), FaissIndex("PCA99,Flat")).build_index()
