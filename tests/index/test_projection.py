"""Principal components and coordinates of a reference set: against numpy, and computed only once."""

import numpy as np
import pytest
import torch

from lit_knn.index.pca import principal_components, sample_size
from lit_knn.reference import ReferenceSet
from lit_knn.reference.principal import components_of, covariance_of, projection_of
from tests.toys import low_rank_vectors, pixels

N, D, R = 300, 60, 4


@pytest.fixture(scope="module")
def gapped():
    """A set with more dimensions than the randomised SVD's rank; R of them have far more variance than the others."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.cat([torch.tensor([8.0, 6.0, 5.0, 4.0]), torch.full((D - R,), 0.2)])
    rotation = torch.linalg.qr(torch.randn(D, D, generator=generator))[0]
    return torch.randn(N, D, generator=generator) * scales @ rotation.T + 1.0


def spectrum(x):
    """Eigenvectors (d, d) and eigenvalues of the covariance in float64, largest first."""
    values, vectors = np.linalg.eigh(np.cov(x.flatten(1).double().numpy().T, bias=True))
    return vectors[:, ::-1], values[::-1]


def test_the_basis_is_orthonormal_and_spans_the_leading_subspace(gapped, monkeypatch):
    components = components_of(ReferenceSet(gapped), R)
    basis = components.basis.double().numpy()
    np.testing.assert_allclose(basis.T @ basis, np.eye(R), atol=1e-6)
    leading = spectrum(gapped)[0][:, :R]
    np.testing.assert_allclose(basis @ basis.T, leading @ leading.T, atol=1e-4)
    # The variances differ, so the directions agree one by one, up to their sign.
    np.testing.assert_allclose(np.abs((basis * leading).sum(0)), 1, atol=1e-4)
    np.testing.assert_allclose(components.mean, gapped.double().numpy().mean(0), rtol=1e-5)
    # The draws of the randomised SVD are its own.
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(components_of(ReferenceSet(gapped), R).basis, components.basis)
    assert torch.equal(torch.get_rng_state(), state)
    # A subset of the images serves, too, if it comes from the whole set: the first images here are one alone.
    assert 2 * R < sample_size(1_000_000, 3072, R) < 100_000
    monkeypatch.setattr("lit_knn.index.pca.SAMPLE_BYTES", 4 * D * 130)
    ordered = torch.cat([gapped[:1].expand(130, -1), gapped])
    few = components_of(ReferenceSet(ordered), R).basis.double().numpy()
    assert np.linalg.svd(few.T @ leading)[1].min() > 0.99


@pytest.mark.parametrize("N", [20, 200])  # with mirror images fewer and more than dimensions
def test_the_covariance_has_divisor_N_and_counts_mirror_images(N):
    reference = ReferenceSet(pixels(N, (3, 4, 6)), hflip=True)
    x = reference.gather(torch.arange(reference.N)).flatten(1).double().numpy()
    variances, basis = covariance_of(reference)
    np.testing.assert_allclose((basis * variances) @ basis.T, np.cov(x.T, bias=True), atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coordinates_are_the_projected_images_in_their_type(gapped, dtype):
    reference = ReferenceSet(gapped)
    for r in (2, R):  # each rank and type has a projection of its own
        for other in (torch.float32, torch.bfloat16):
            projection_of(reference, r, other)
    components, coordinates, half_sq_norms = projection_of(reference, R, dtype)
    exact = (gapped.double() - components.mean.double()) @ components.basis.double()
    assert (coordinates.shape, coordinates.dtype) == ((N, R), dtype)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(coordinates.double(), exact, rtol=rounding, atol=1e-4)
    # The norms belong to the rounded coordinates, because these are multiplied.
    norms = coordinates.double().square().sum(1) / 2
    torch.testing.assert_close(half_sq_norms.double(), norms, rtol=1e-6, atol=1e-6)


def test_mirror_images_follow_the_images():
    reference = ReferenceSet(pixels(40, (3, 4, 4)), hflip=True)
    projection, x = projection_of(reference, 5), reference.gather(torch.arange(80))
    torch.testing.assert_close(projection.coordinates, projection.components.project(x))
    assert projection.coordinates.mean(0).abs().max() < 1e-5
    torch.testing.assert_close(
        projection.components.variances, components_of(ReferenceSet(x), 5).variances
    )


@pytest.mark.gpu
def test_moving_to_a_gpu_projects_there_once():
    reference = ReferenceSet(low_rank_vectors())
    expected = projection_of(reference, R)
    projection = projection_of(reference.to("cuda"), R)
    assert projection.coordinates.device.type == "cuda"
    torch.testing.assert_close(projection.components.variances.cpu(), expected.components.variances)
    # the projection is already on "cuda:0"
    assert projection_of(reference.to("cuda"), R) is projection


def test_variances_are_about_the_given_mean():
    sample, mean = torch.randn(200, 6) * torch.linspace(3, 1, 6), torch.linspace(-2, 2, 6)
    for r in (2, 6):
        found = principal_components(sample, mean, r)
        total = found.variances.sum() + (6 - r) * found.residual_variance
        assert total.item() == pytest.approx(
            (sample - mean).square().sum(1).mean().item(), rel=1e-4
        )
        torch.testing.assert_close(
            found.variances, ((sample - mean) @ found.basis).square().mean(0)
        )
