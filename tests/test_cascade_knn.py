"""The cascade against enumeration, its limits, and its certificate against its error."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lit_knn.errors import InputError
from lit_knn.estimators import CascadeKNN, SubspaceKNN, cascade_knn
from lit_knn.reference import ReferenceSet, tiles
from lit_knn.reference.components import projection_of
from lit_knn.rng import keyed_generator
from lit_knn.theory.blocked_draws import blocked_draws, tiled_mass
from lit_knn.theory.posterior import posterior_mean
from tests.toys import low_rank_vectors, noisy

N, D, R, COARSE = 60, 12, 8, 4


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 32)


def small(reference, n=12, candidates=24, r=R, coarse=COARSE):
    return CascadeKNN(r, n, coarse, candidates).bind(reference)


def base_weights(every_u, log_q, keep, s, grid=2000):
    """The weights that each value of the random number gives to the images, (grid, N), in two tiles."""
    parts = log_q.float().expand(grid, -1).chunk(2, dim=1)
    tiled = tiled_mass(lambda i, part: part.copy_(parts[i]), torch.empty(2, grid, len(log_q) // 2))
    with every_u(grid):
        draws = blocked_draws(tiled, keep, s, torch.full((grid,), math.log(1e-12), dtype=torch.float64))
    base = log_q.double().softmax(0)[draws.ids] * draws.log_correction.exp()
    return draws, torch.zeros(grid, len(log_q), dtype=torch.float64).scatter_add_(1, draws.ids, base)


@pytest.mark.parametrize("spread", [0.1, 2.0, 5.0])
def test_base_weights_are_the_probabilities_in_expectation(every_u, spread):
    log_q = torch.randn(64, generator=torch.Generator().manual_seed(2)) * spread
    q = log_q.double().softmax(0)
    draws, weights = base_weights(every_u, log_q, keep=4, s=12)
    torch.testing.assert_close(weights.mean(0), q, rtol=0.02, atol=3e-4)
    torch.testing.assert_close(weights.sum(1), torch.ones(2000, dtype=torch.float64), rtol=1e-5, atol=0)
    # The kept images are the most probable ones.
    kept = draws.ids[0][draws.kept[0]]
    assert set(kept.tolist()) == set(q.topk(len(kept)).indices.tolist())
    torch.testing.assert_close(draws.rest, 1 - q[kept].sum().expand(2000), rtol=1e-5, atol=1e-6)


def test_images_that_hold_everything_are_all_that_is_kept(every_u):
    log_q = torch.full((64,), -80.0)
    log_q[[3, 40]] = torch.tensor([0.0, -1.0])
    draws, _ = base_weights(every_u, log_q, keep=4, s=8, grid=5)
    assert not draws.sampled.any()
    assert draws.ids[draws.kept].reshape(5, 2).tolist() == [[3, 40]] * 5


def test_as_many_candidates_as_images_make_it_subspace_knn():
    reference = ReferenceSet(low_rank_vectors())
    z = noisy(reference.images[:8], 1.0)
    estimators = small(reference, candidates=N), SubspaceKNN(R, None, 12).bind(reference)
    a, b = (e.certified_mean(z, 1.0, generator=keyed_generator("cpu", 3)) for e in estimators)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("t", [1e-6, 0.02, 1e4])
def test_limits_of_t(t):
    x = low_rank_vectors()
    reference, z = ReferenceSet(x), noisy(x[:20], min(t, 0.02))
    generator = torch.Generator().manual_seed(0)
    means = torch.stack([small(reference, n=20).posterior_mean(z, t, generator=generator) for _ in range(50)]).mean(0)
    tolerance = 1e-5 if t < 1 else 0.1
    torch.testing.assert_close(means.double(), posterior_mean(z, x, t), rtol=0, atol=tolerance)


def test_error_falls_to_zero_as_candidates_and_images_grow_to_the_set():
    x = low_rank_vectors()
    reference, z = ReferenceSet(x), noisy(x[:12], 1.0).repeat_interleave(100, 0)
    mu, errors = posterior_mean(z, x, 1.0), []
    for n, candidates in ((6, 12), (12, 24), (40, 50), (59, 59), (60, 60)):
        estimator = small(reference, n, candidates)
        mean = estimator.posterior_mean(z, 1.0, generator=torch.Generator().manual_seed(1))
        errors.append((mean.double() - mu).square().mean().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9 < errors[0] / 1e4


def coarse_variance(x, z, t, components, controlled, candidates, keep):
    """The coarse stage's variance of docs/cascade_knn.md in float64, and the number of images kept."""
    projection = projection_of(ReferenceSet(x), R)
    basis, mean = projection.components.basis.double(), projection.components.mean.double()
    x, z = x.double(), z.double()
    y, u = (x - mean) @ basis, (z - mean) @ basis
    q = torch.softmax(-(u - y)[:, :components].square().sum(1) / (2 * t * t), 0)
    p = torch.softmax(-(z - x).square().sum(1) / (2 * t * t), 0)
    order, m = q.argsort(descending=True), 0
    while m < keep and q[order[m]] * (candidates - m) >= q[order[m:]].sum():
        m += 1
    rest, s = order[m:], candidates - keep
    share = q[rest] / q[rest].sum()
    contribution = (p / q)[rest, None] * (x[rest] - p @ x)
    if controlled:
        first = y[rest, :controlled]
        offset = first - share @ first
        contribution = contribution - p[rest].sum() / q[rest].sum() * offset @ basis[:, :controlled].T
    centred = contribution - share @ contribution
    return (q[rest].sum() ** 2 * share @ centred.square().sum(1) / s).item()


# At t = 8 the leading component suffices, at 2 all coarse ones do, and at 0.6 there is no control variate.
@pytest.mark.parametrize(("t", "components", "controlled"), [(8.0, 1, 1), (2.0, COARSE, 1), (0.6, COARSE, 0)])
def test_coarse_error_is_at_most_the_derived_variance(every_u, t, components, controlled):
    x, candidates, keep, grid = low_rank_vectors(seed=3), 24, 4, 1000
    reference = ReferenceSet(x)
    estimator, errors, derived = small(reference, candidates, candidates), 0.0, 0.0
    outside = tiles.tiles_of(projection_of(reference, R), COARSE).outside
    assert (2 * outside[0] <= t * t, 2 * outside[1] <= t * t) == (components == 1, controlled > 0)
    for row in range(8):
        z = noisy(x[row : row + 1], t, seed=row)
        with every_u(grid):
            mean = estimator.posterior_mean(z.expand(grid, -1).contiguous(), t).double()
        errors += (mean - posterior_mean(z, x, t)).square().sum(1).mean().item()
        derived += coarse_variance(x, z[0], t, components, controlled, candidates, keep)
    # Systematic draws spread less than independent ones, but their error is not zero.
    assert 0.05 * derived < errors < 1.1 * derived


@pytest.mark.parametrize("t", [1.0, 2.0, 8.0])
def test_certificate_is_of_the_size_of_the_error(t):
    x = low_rank_vectors(seed=5)
    reference, z = ReferenceSet(x), noisy(x[:10], t).repeat_interleave(300, 0)
    told = small(reference).certified_mean(z, t, generator=torch.Generator().manual_seed(2))
    error = (told.mean.double() - posterior_mean(z, x, t)).square().mean().item()
    # A large part of this small set is drawn, without repetition, so the error is below that of independent draws.
    assert 0.6 < told.sq_error.mean().item() / error < 5


def test_levels_in_one_batch_are_answered_in_their_rows():
    x = low_rank_vectors()
    reference, t = ReferenceSet(x), torch.tensor([20.0, 1e-3, 8.0, 1e-3, 1.0])
    z = x[:5] + torch.tensor([0.0, 1e-3, 0.0, 1e-3, 0.0]).unsqueeze(1)
    mean = small(reference).posterior_mean(z, t, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mean[[1, 3]], x[[1, 3]])
    assert small(reference).posterior_mean(z[:0], t[:0]).shape == (0, D)


def test_mirrored_pixels_are_images_too():
    images = torch.randint(256, (40, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    mirrored = ReferenceSet(images, hflip=True)
    doubled = ReferenceSet(torch.cat([images, images.flip(-1)]))
    z = noisy(doubled.gather(torch.arange(80)), 1.0)
    a, b = (
        small(reference).posterior_mean(z, 1.0, generator=torch.Generator().manual_seed(4))
        for reference in (mirrored, doubled)
    )
    mu = posterior_mean(z.flatten(1), doubled.gather(torch.arange(80)).flatten(1), 1.0)
    for mean in (a, b):
        assert (mean.flatten(1).double() - mu).square().mean() < 0.05


def test_memory_is_told():
    reference = ReferenceSet(low_rank_vectors())
    estimator = small(reference)
    told = estimator.holds(N, D, False, torch.device("cpu")).arrays
    held = tiles.tiles_of(projection_of(reference, R), COARSE).tiles
    assert told[f"r={COARSE} coordinates in tiles"] == held.nbytes


def test_too_many_candidates_are_refused():
    with pytest.raises(InputError, match="CascadeKNN: candidates=61 is more than the 60 images"):
        CascadeKNN(candidates=61).bind(ReferenceSet(low_rank_vectors()))


def test_threads_on_one_set_do_not_share_their_work(monkeypatch):
    reference, together = ReferenceSet(low_rank_vectors()), threading.Barrier(2)
    estimators, z = [small(reference), small(reference)], noisy(reference.images[:8], 2.0).split(4)

    def mean(i):
        return estimators[i].posterior_mean(z[i], 2.0, generator=torch.Generator().manual_seed(i))

    def met(*args):
        tiled = tiled_mass(*args)
        together.wait(timeout=60)  # Both threads have written their masses, and neither has drawn.
        return tiled

    alone = [mean(0), mean(1)]
    monkeypatch.setattr(cascade_knn, "tiled_mass", met)
    with ThreadPoolExecutor(2) as threads:
        assert all(map(torch.equal, threads.map(mean, range(2)), alone))


@pytest.mark.parametrize("t", [2.0, 8.0])
def test_squared_bias_falls_with_the_square_of_the_candidates_and_variance_does_not(every_u, t):
    x, grid = low_rank_vectors(480, seed=3), 500
    reference, bias, variance = ReferenceSet(x), [], []
    for candidates in (48, 192):
        estimator, found = small(reference, candidates, candidates), []
        for row in range(8):
            z = noisy(x[row : row + 1], t, seed=row)
            with every_u(grid):
                mean = estimator.posterior_mean(z.expand(grid, -1).contiguous(), t).double()
            found.append((mean.mean(0) - posterior_mean(z, x, t), mean - mean.mean(0)))
        bias.append(sum(part.square().sum().item() for part, _ in found))
        variance.append(sum(part.square().sum(1).mean().item() for _, part in found))
    # Four times the candidates: 1/16 of the squared bias, and no more than about 1/4 of the variance.
    assert bias[1] < bias[0] / 12
    assert variance[1] < variance[0] / 4
    assert all(b < v / 100 for b, v in zip(bias, variance, strict=True))


def test_masses_that_float32_cannot_hold_are_zero():
    log_q = torch.tensor([[0.0, -80.0, -95.0, -1000.0]]).repeat(1, 4)
    tiled = tiled_mass(lambda _, part: part.copy_(log_q), torch.empty(1, 1, 16))
    torch.testing.assert_close(tiled.mass[0, 0, :2], torch.tensor([1.0, math.exp(-80)]))
    assert (tiled.mass[0, 0, 2:4] == 0).all()
