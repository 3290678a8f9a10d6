"""Draws without repetition from the nearest-neighbour proposal; tests enumerate each row's one random number."""

import math

import pytest
import torch

from lit_knn.errors import InputError
from lit_knn.estimators import KNN, ByClass, ExactFloat64, StratifiedKNN
from lit_knn.index import FaissIndex
from lit_knn.metrics.diagnostics import search_diagnostics
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean
from lit_knn.theory.proposal import dense_log_q, neighbour_proposal, stratified_sample_proposal
from tests.toys import low_rank_vectors, noisy

INF = math.inf
# Each search: distances, ids, and the number N of images.
SEARCHES = {
    "nearest": ([0.1, 0.4, 0.5, 0.9, 1.0, 1.3], [3, 17, 8, 4, 11, 0], 20),
    "one neighbour": ([0.5], [3], 9),
    "all are neighbours": ([0.1, 0.2, 0.7, 0.9, 2.0], [2, 0, 4, 1, 3], 5),
    "all but one": ([0.1, 0.2, 0.7, 0.9], [2, 0, 4, 1], 5),
    "equal distances": ([1.0, 1.0, 1.0], [4, 0, 2], 8),
    "some missing": ([0.5, 1.0, INF, INF], [5, 2, -1, -1], 9),
    "missing in front and between": ([INF, 0.5, INF, 1.0], [-1, 5, -1, 2], 9),
    "none found": ([INF, INF], [-1, -1], 7),
    "unsorted": ([3.0, 0.2, 1.0, 0.1], [0, 7, 3, 6], 8),
    "first ids": ([0.3, 0.6, 0.9], [0, 1, 2], 9),
    "last ids": ([0.3, 0.6, 0.9], [8, 7, 6], 9),
    "source added": ([0.1, 0.4, 0.5, 0.05], [3, 7, 8, 1], 12),
}
every_search = pytest.mark.parametrize("search", SEARCHES)
GRID = 2000


@pytest.fixture
def outcomes(every_u):
    """The draws of a search for every u, and the base weights they give to the images, (GRID, N)."""

    def enumerate_draws(search, t, n):
        sq_dist, ids, N = SEARCHES[search]
        proposal = neighbour_proposal(torch.tensor([sq_dist] * GRID), torch.tensor([ids] * GRID), t, N)
        with every_u(GRID):
            draws = stratified_sample_proposal(proposal, n)
        log_q = dense_log_q(proposal)
        base = (log_q.gather(1, draws.ids.clamp(0, N - 1)) + draws.log_correction).exp()
        return draws, torch.zeros(GRID, N, dtype=torch.float64).scatter_add_(1, draws.ids, base), log_q[0].exp()

    return enumerate_draws


@every_search
@pytest.mark.parametrize("t", [0.3, 0.7, 80.0])
def test_base_weights_are_the_probabilities_in_expectation_and_no_image_is_drawn_twice(outcomes, search, t):
    N = SEARCHES[search][2]
    for n in range(1, N + 1):
        draws, weights, q = outcomes(search, t, n)
        # A sampled image has one base weight on an interval of u; the grid may miss a step at either end.
        sampled = (draws.sampled * q[draws.ids] * draws.log_correction.exp()).amax()
        assert ((weights.mean(0) - q).abs() <= 2 * sampled / GRID + 1e-12).all(), n
        torch.testing.assert_close(weights.sum(1), torch.ones(GRID, dtype=torch.float64), rtol=1e-9, atol=0)
        assert ((draws.ids >= 0) & (draws.ids < N)).all()
        used = torch.arange(n) < draws.used.unsqueeze(1)
        ids = torch.where(used, draws.ids, N + torch.arange(n)).sort(1).values
        assert (ids.diff(dim=1) > 0).all()
        assert ((draws.log_correction > -INF) == used).all()


@every_search
def test_what_is_sure_is_kept_and_stands_for_itself(outcomes, search):
    # The inclusion probabilities of n draws without repetition are 1 or proportional to q.
    N = SEARCHES[search][2]
    for n in range(1, N):
        _, weights, q = outcomes(search, 0.7, n)
        inclusion = (weights > 0).double().mean(0)
        sure, left = torch.zeros(N, dtype=torch.bool), n
        while left > 1 and (new := ~sure & (q * left >= q[~sure].sum() * (1 + 1e-9))).any():
            sure |= new
            left = n - int(sure.sum())
        expected = torch.where(sure, 1.0, left * q / q[~sure].sum()).clamp(max=1)
        torch.testing.assert_close(inclusion, expected, rtol=0, atol=2 / GRID)
        torch.testing.assert_close(weights[:, sure], q[sure].expand(GRID, -1), rtol=1e-9, atol=0)


def test_negligible_images_are_not_gathered():
    # At t = 0.01 the second neighbour has e^-1500 of the first's weight; drawing it or the tail would be useless.
    proposal = neighbour_proposal(
        torch.tensor([[0.1, 0.4, 0.9], [0.1, 0.1, 0.9]]), torch.tensor([[3, 7, 8]] * 2), 0.01, 50
    )
    draws = stratified_sample_proposal(proposal, 20)
    assert draws.used.tolist() == [1, 2]
    assert draws.ids[1, :2].sort().values.tolist() == [3, 7]
    assert not draws.sampled.any()


def test_a_single_draw_is_a_draw_of_the_proposal(outcomes):
    draws, _, q = outcomes("nearest", 0.7, 1)
    frequency = torch.bincount(draws.ids[:, 0], minlength=20) / GRID
    torch.testing.assert_close(frequency.double(), q, rtol=0, atol=2 / GRID)
    torch.testing.assert_close(draws.log_correction, -q.log()[draws.ids])


def test_no_rows_have_no_draws():
    proposal = neighbour_proposal(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.long), 1.0, 9)
    for n in (1, 5, 9):
        assert stratified_sample_proposal(proposal, n).ids.shape == (0, n)


def test_a_tail_of_a_billion_images_is_one_category():
    N = 10**9
    proposal = neighbour_proposal(torch.rand(4, 50), torch.randperm(N // 10**5)[:200].reshape(4, 50), 1.0, N)
    draws = stratified_sample_proposal(proposal, 256)
    assert (draws.ids.sort(1).values.diff(dim=1) > 0).all()
    # Nearly all of q is in the tail, and draws cover it evenly.
    assert (draws.ids.amax(1) > 0.98 * N).all()
    assert (draws.ids < N).all()


# The estimator


@pytest.mark.parametrize("k", [1, 7, 60])
@pytest.mark.parametrize("t", [0.002, 0.7, 3.0, 80.0])
def test_all_images_make_it_exact(k, t):
    x = low_rank_vectors()
    reference, z = ReferenceSet(x), noisy(x[:20], t).double()
    estimator = StratifiedKNN(k=k, n=60).bind(reference)
    torch.testing.assert_close(estimator.posterior_mean(z, t), posterior_mean(z, x, t), rtol=0, atol=1e-5)
    assert (estimator.certified_mean(z, t).sq_error == 0).all()


def test_missing_neighbours_leave_it_exact_with_all_images():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    reference = ReferenceSet(x, FaissIndex("IVF8,Flat", 1))
    z = noisy(x[:20], 1.5)
    assert (reference.search(z, 30)[1] < 0).any()
    estimate = StratifiedKNN(k=30, n=60).bind(reference).posterior_mean(z, 1.5)
    torch.testing.assert_close(estimate.double(), posterior_mean(z, x, 1.5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [1, 3, 12, 40])
def test_the_estimate_is_that_of_a_loop_over_its_draws(every_u, n):
    # For each u, the weights are p/q times the base weight, normalised (Eq. 11).
    x, t = low_rank_vectors(), 1.3
    reference, z = ReferenceSet(x), noisy(x[:1], t).expand(50, -1)
    estimator = StratifiedKNN(k=10, n=n).bind(reference)
    proposal = estimator.proposal(z, torch.full((50,), t, dtype=torch.float64))
    with every_u(50):
        draws, estimate = stratified_sample_proposal(proposal, n), estimator.posterior_mean(z, t)
    q = dense_log_q(proposal)[0].exp()
    p = torch.softmax(-(x.double() - z[0].double()).square().sum(1) / (2 * t**2), 0)
    kept_share = q[draws.ids[0, : int((~draws.sampled[0]).sum())]].sum()
    for row in range(50):
        terms = []
        for i, sampled in zip(draws.ids[row].tolist(), draws.sampled[row].tolist(), strict=True):
            base = (1 - kept_share) / draws.sampled[row].sum() if sampled else q[i]
            terms.append((base * p[i] / q[i], x[i].double()))
        expected = sum(w * v for w, v in terms) / sum(w for w, _ in terms)
        torch.testing.assert_close(estimate[row].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("k", "n"), [(40, 16), (40, 64), (100, 64), (20, 150), (40, 290)])
@pytest.mark.parametrize("t", [1.0, 2.0, 5.0])
def test_it_is_better_than_independent_draws_and_knows_how_good(k, n, t):
    x = low_rank_vectors(300)
    reference, z = ReferenceSet(x), noisy(x[:40], t).repeat_interleave(50, 0)
    mu = posterior_mean(z, x, t)
    errors, told = {}, {}
    for draws, kind in (("independent", KNN), ("stratified", StratifiedKNN)):
        estimator = kind(k, n).bind(reference)
        certificate = estimator.certified_mean(z, t, generator=torch.Generator().manual_seed(0))
        plain = estimator.posterior_mean(z, t, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(certificate.mean, plain, rtol=0, atol=0)
        errors[draws] = (plain - mu).square().mean().item()
        told[draws] = certificate.sq_error.mean().item()
        assert 0.7 < told[draws] / errors[draws] < 1.4
        assert (certificate.effective_sample_size <= n * (1 + 1e-9)).all()
        assert (certificate.largest_weight <= 1).all()
    assert errors["stratified"] < 0.9 * errors["independent"]


def test_the_certificate_of_one_sampled_image_is_its_own_contribution(every_u):
    # With three images and n = 2, one is kept or none. The average over u is the variance to first order.
    x, t = torch.tensor([[0.0], [1.0], [1.1]]), 1.0
    z = torch.full((2000, 1), 0.4)
    estimator = StratifiedKNN(k=1, n=2).bind(ReferenceSet(x))
    with every_u(2000):
        certificate = estimator.certified_mean(z, t)
    true = (certificate.mean - posterior_mean(z[:1], x, t)).square().mean()
    assert certificate.sq_error.isfinite().all()
    assert 0.3 < certificate.sq_error.mean() / true < 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_of_latents(dtype):
    x = low_rank_vectors()
    z = noisy(x[:20], 0.5)
    estimator = StratifiedKNN(k=20, n=59).bind(ReferenceSet(x))
    result = estimator.posterior_mean(z.to(dtype), 0.5)
    assert result.dtype == dtype
    expected = posterior_mean(z.to(dtype).double(), x, 0.5)
    torch.testing.assert_close(result.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0.02)


def test_with_exact_search_the_source_changes_nothing():
    x = low_rank_vectors()
    reference, z = ReferenceSet(x), noisy(x[:20], 1.0)
    plain, sourced = (StratifiedKNN(20, 8, source).bind(reference) for source in (False, True))
    a, b = (e.posterior_mean(z, 1.0, x[:20], torch.Generator().manual_seed(0)) for e in (plain, sourced))
    assert torch.equal(a, b)


def test_the_source_mends_what_the_search_misses():
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    reference = ReferenceSet(x, FaissIndex("IVF40,Flat", 1))
    t = 0.2
    z = noisy(x, t)
    mu = posterior_mean(z, x, t)
    errors = [
        (StratifiedKNN(8, 8, source).bind(reference).posterior_mean(z, t, x) - mu).square().mean().item()
        for source in (False, True)
    ]
    assert errors[1] < 0.7 * errors[0]


def test_classes_and_flips():
    images = torch.randint(0, 256, (40, 1, 3, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 2
    reference = ReferenceSet(images, hflip=True, labels=labels)
    everything = reference.gather(torch.arange(80))
    z, asked = noisy(everything[:6], 2.0), torch.tensor([0, 1, 1, 0, 1, 0])
    # Each class has 40 images with the mirrored ones, so all are drawn.
    estimate = ByClass(StratifiedKNN(k=5, n=40)).bind(reference).posterior_mean(z, 2.0, labels=asked)
    for row, label in enumerate(asked.tolist()):
        own = everything[torch.cat([labels, labels]) == label]
        expected = posterior_mean(z[row : row + 1], own, 2.0)
        torch.testing.assert_close(estimate[row : row + 1].double(), expected, rtol=0, atol=1e-5)


def test_it_has_the_diagnostics_of_its_search():
    x = low_rank_vectors()
    reference, z = ReferenceSet(x), noisy(x[:5], 1.0)
    mu = ExactFloat64().bind(reference).posterior_mean(z.double(), 1.0)
    plain, stratified = (kind(20, 8).bind(reference) for kind in (KNN, StratifiedKNN))
    for a, b in zip(search_diagnostics(plain, z, 1.0, mu), search_diagnostics(stratified, z, 1.0, mu), strict=True):
        assert torch.equal(a, b)


def test_more_images_than_there_are_cannot_be_drawn_without_repetition():
    with pytest.raises(InputError, match="StratifiedKNN: n=61 is more than the 60 images"):
        StratifiedKNN(k=5, n=61).bind(ReferenceSet(low_rank_vectors()))


def test_missing_neighbours_are_never_drawn(every_u):
    # The tail is so unlikely that some of its images, but not all, are negligible: 10 images of q hold about 1e-16.
    q = torch.logspace(-17.3, -15.7, 400)
    ids = torch.tensor([4, -1, 2, -1, -1]).repeat(400, 1)
    sq_dist = torch.full((400, 5), INF)
    sq_dist[:, 0], sq_dist[:, 2] = 0.0, -2 * q.log()
    proposal = neighbour_proposal(sq_dist, ids, 1.0, 10)
    for n in range(1, 10):
        with every_u(400):
            draws = stratified_sample_proposal(proposal, n)
        used = draws.ids[draws.log_correction.isfinite()]
        assert used.min() >= 0
        assert used.max() < 10


def test_the_largest_random_number_stays_in_the_tail(monkeypatch):
    N = 1000
    generator = torch.Generator().manual_seed(0)
    sq_dist = torch.rand(500, 5, generator=generator) * 5
    ids = torch.stack([torch.randperm(N, generator=generator)[:5] for _ in range(500)])
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, 1 - 2**-53, dtype=torch.float64))
    for t in (0.5, 1.0, 80.0):
        draws = stratified_sample_proposal(neighbour_proposal(sq_dist, ids, t, N), 7)
        drawn = draws.ids[draws.sampled]
        assert drawn.min() >= 0
        assert drawn.max() < N
