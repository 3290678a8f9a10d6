"""Warps as linear maps, and the posterior mean over a warped reference set, against enumeration."""

import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates

from lit_knn.common import memory
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import KNN, STF, Exact, OneSample, SubspaceKNN, UniformSNIS
from lit_knn.reference import ReferenceSet, gathered
from lit_knn.theory.posterior import cross_sq_dist, log_posterior, posterior_mean
from lit_knn.theory.warp import Warp
from tests.toys import all_warped, noisy

N, B = 40, 12


def images(size=8, channels=2, count=N):
    """Smooth images, because interpolation would blur noise."""
    coarse = torch.randn(count, channels, 3, 3, generator=keyed_generator("cpu", 1))
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")


def problem(t, data):
    """Warps of the first images, latents made from the warped images, and these images."""
    warp = all_warped(data[:B]).warp
    return warp, noisy(warp.apply(data[:B]), t), data[:B]


def enumerated(z, t, warp, data):
    """Enumerate E[Ax|z,t] for each item in float64."""
    t, rows = torch.as_tensor(t).expand(len(z)), [slice(i, i + 1) for i in range(len(z))]
    warped = [warp.rows(row).apply(data.double().unsqueeze(0))[0] for row in rows]
    return torch.cat(
        [posterior_mean(z[row], own, t[row]) for row, own in zip(rows, warped, strict=True)]
    )


def test_warp_resamples_as_scipy_and_has_adjoint_of_its_matrix():
    x = images(9, 1, 6).double()
    warp = all_warped(x.float()).warp
    places = (np.arange(9) + 0.5) / 9 * 2 - 1
    columns, rows = np.meshgrid(places, places)
    for image, result, flips, theta in zip(
        x, warp.apply(x), warp.flips, warp.theta.double(), strict=True
    ):
        source = np.flip(
            image[0].numpy(),
            [axis for axis, mirrored in zip((-1, -2), flips, strict=True) if mirrored],
        )
        at = theta.numpy() @ np.stack([columns.ravel(), rows.ravel(), np.ones(81)])
        # Beyond an edge SciPy interpolates between a pixel and its mirror image, the same pixel.
        expected = map_coordinates(
            source, (at[::-1] + 1) * 9 / 2 - 0.5, order=1, mode="reflect"
        ).reshape(9, 9)
        np.testing.assert_allclose(result[0].numpy(), expected, atol=1e-5)
    y = x.flip(0)
    inner = [(a * b).flatten(1).sum(1) for a, b in ((warp.apply(x), y), (x, warp.adjoint(y)))]
    torch.testing.assert_close(*inner)


@pytest.mark.parametrize("t", [0.05, 1.5, 20.0])
@pytest.mark.parametrize("hflip", [False, True])
def test_exact_warped_mean_is_enumerated_in_pieces_of_any_size(t, hflip, monkeypatch):
    data = images()
    warp, z, x = problem(t, data)
    expected = enumerated(z, t, warp, torch.cat([data, data.flip(-1)]) if hflip else data)
    estimator = Exact().bind(ReferenceSet(data, hflip=hflip))
    for _ in range(2):
        mu = estimator.warped_mean(z, t, warp, x)
        torch.testing.assert_close(mu.double(), expected, rtol=1e-4, atol=1e-5)
        monkeypatch.setattr(memory, "WORK_BYTES", 8 * N * 5)  # five rows of N


SAMPLING = {
    "KNN": lambda n: KNN(10, n),
    "KNN with source": lambda n: KNN(10, n, include_source=True),
    "UniformSNIS": UniformSNIS,
    "STF": STF,
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_warped_means_converge_to_the_enumerated_one(name):
    data, t = images(), torch.linspace(2.5, 8.0, B)
    warp, z, x = problem(t, data)
    expected, reference = enumerated(z, t, warp, data), ReferenceSet(data)
    errors = []
    for n in (200, 12_800):
        mu = SAMPLING[name](n).bind(reference).warped_mean(z, t, warp, x, keyed_generator("cpu", 3))
        errors.append((mu.double() - expected).square().mean().item())
    # 64 times as many draws give about 1/64 of the squared error.
    assert errors[1] < errors[0] / 15
    assert errors[1] < 3e-3 * (data - data.mean(0)).square().mean()


@pytest.mark.parametrize("t", [0.4, 2.5])
def test_subspace_knn_is_exact_with_all_images_and_grows_better(t, monkeypatch):
    data = images()
    warp, z, x = problem(t, data)
    expected, reference = enumerated(z, t, warp, data), ReferenceSet(data)

    def error(n):
        estimator = SubspaceKNN(16, n, "float32").bind(reference)
        means = [
            estimator.warped_mean(z, t, warp, x, keyed_generator("cpu", seed)) for seed in range(20)
        ]
        return (torch.stack(means).double() - expected).square().mean()

    assert error(N) < 1e-9
    assert t < 1 or error(30) < error(8) / 2
    whole = error(12)
    monkeypatch.setattr(gathered, "GATHER_BYTES", 4 * 16 * 128 * 2)  # two rows of 16 images
    torch.testing.assert_close(error(12), whole, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("t", [0.05, 1.5, 20.0])
def test_the_proposal_is_the_posterior_for_images_on_a_line(t):
    # For images on a line, a map scales all distances by the same factor, so the proposal is exact.
    places = torch.randn(N, dtype=torch.float64, generator=keyed_generator("cpu", 4))
    centre, along = images(count=2).double()
    data = centre + (places - places.mean()).reshape(-1, 1, 1, 1) * along
    x, warp = data[:B], all_warped(data[:B].float()).warp
    warp = warp._replace(theta=warp.theta.double())
    z = noisy(warp.apply(x), t)
    z_query, t_query = warp.query(z, torch.full((B,), t, dtype=torch.float64), x, centre.flatten())
    proposal = log_posterior(cross_sq_dist(z_query.flatten(1), data.flatten(1)), t_query).exp()
    for i in range(B):
        warped = warp.rows(slice(i, i + 1)).apply(data.unsqueeze(0))[0]
        expected = log_posterior(cross_sq_dist(z[i : i + 1].flatten(1), warped.flatten(1)), t).exp()
        torch.testing.assert_close(proposal[i : i + 1], expected, rtol=1e-6, atol=1e-9)
        assert (expected > 1e-6).sum() > (1 if t > 0.1 else 0)


def test_mean_or_vanishing_source_has_a_finite_proposal():
    data = images()
    data = torch.cat([data, -data])
    data[[0, N]] = 0
    data[[1, 1 + N], :, 3:5, 3:5] = 0
    # The warp reads every pixel from the centre, where the second image is 0.
    x, warp = data[:2], Warp(torch.zeros(2, 2, dtype=torch.bool), torch.zeros(2, 2, 3))
    z, reference = noisy(warp.apply(x), 1.0), ReferenceSet(data)
    assert all(part.isfinite().all() for part in warp.query(z, torch.ones(2), x, reference.mean()))
    mu = SubspaceKNN(8, 2 * N, "float32").bind(reference).warped_mean(z, 1.0, warp, x)
    torch.testing.assert_close(mu.double(), enumerated(z, 1.0, warp, data), rtol=0, atol=1e-4)
    assert KNN(40, 10).bind(reference).warped_mean(z, 1.0, warp, x).isfinite().all()


@pytest.mark.parametrize(
    "estimator", [KNN(5, 4), STF(4), SubspaceKNN(20, 4, "float32"), OneSample()]
)
def test_at_small_noise_the_mean_is_the_warped_source(estimator):
    # Interpolation blurs the source, so the inverse warp of z is nearer to other images.
    data = torch.rand(N, 1, 8, 8, generator=keyed_generator("cpu", 2)) * 2 - 1
    x = data.repeat(5, 1, 1, 1)
    augmented = all_warped(x)
    if estimator.needs_reference:
        estimator.bind(ReferenceSet(data))
    mu = estimator.warped_mean(
        noisy(augmented.images, 0.01), 0.01, augmented.warp, x, keyed_generator("cpu", 3)
    )
    torch.testing.assert_close(mu, augmented.images, rtol=0, atol=1e-5)


@pytest.mark.parametrize("estimator", [KNN(10, 4), UniformSNIS(4), SubspaceKNN(16, 4, "float32")])
def test_images_of_warped_items_are_drawn_for_the_query(estimator, monkeypatch):
    data = images()
    warp, z, x = problem(1.5, data)
    draw = estimator.bind(ReferenceSet(data)).draw
    queries = []

    def watched(z, t, *args, **options):
        queries.extend([z, t])
        return draw(z, t, *args, **options)

    monkeypatch.setattr(estimator, "draw", watched)
    estimator.warped_mean(z, 1.5, warp, x)
    t = torch.full((len(z),), 1.5, dtype=torch.float64)
    expected = warp.query(z, t, x, data.mean(0).flatten())
    for query, right in zip(queries, expected, strict=True):
        torch.testing.assert_close(query, right, rtol=1e-4, atol=1e-4)
