"""Every estimator: its contract and limits; its distribution is compared with enumeration in float64."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lit_knn.estimators import (
    KNN,
    STF,
    Exact,
    MonteCarlo,
    OneSample,
    UniformSNIS,
    draws,
)
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet, streaming

NOISE_LEVELS = [0.002, 0.05, 0.5, 2.0, 10.0, 80.0]
MAKERS = {
    "Exact": Exact,
    "MonteCarlo": lambda: MonteCarlo(n=8),
    "UniformSNIS": lambda: UniformSNIS(n=8),
    "STF": lambda: STF(n=8),
    "KNN": lambda: KNN(k=6, n=8),
    "OneSample": OneSample,
}
EVERY = pytest.mark.parametrize("name", MAKERS)
WITH_REFERENCE = pytest.mark.parametrize("name", [name for name in MAKERS if name != "OneSample"])


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def pixel_set(n=20, **options):
    return ReferenceSet(torch.randint(0, 256, (n, 3, 2, 4), dtype=torch.uint8, generator=rng()), **options)


def vector_set(n=40, d=3, **options):
    return ReferenceSet(torch.randn(n, d, generator=rng()), **options)


def make_set(kind):
    return pixel_set() if kind == "uint8" else vector_set()


def everything(reference):
    return reference.gather(torch.arange(reference.N))


def latents(reference, t, b=5, seed=1, dtype=torch.float32):
    ids = torch.randint(reference.N, (b,), generator=rng(seed))
    x = reference.gather(ids).to(dtype)
    return x, x + t * torch.randn(x.shape, dtype=dtype, generator=rng(seed + 1))


def enumerate_mean(reference, z, t):
    """Compute Eq. 8 in float64, z by z."""
    x = everything(reference).flatten(1).double().numpy()
    means = []
    for point, level in zip(z.flatten(1).double().numpy(), np.broadcast_to(np.asarray(t), len(z)), strict=True):
        log_p = -((point - x) ** 2).sum(1) / (2 * float(level) ** 2)
        p = np.exp(log_p - log_p.max())
        means.append((p[:, None] * x).sum(0) / p.sum())
    return torch.tensor(np.array(means)).reshape(z.shape)


def posterior_variance(reference, z, t):
    """Var(x|z,t) per dimension for one z."""
    x = everything(reference).flatten(1).double()
    log_p = -(x - z.flatten().double()).square().sum(1) / (2 * t**2)
    p = torch.softmax(log_p, 0)
    return (p[:, None] * (x - p @ x).square()).sum(0)


def repeated(estimator, z, t, R, x_source=None, seed=0):
    """Make R independent estimates for one z (1, *shape); returns (R, d)."""
    source = None if x_source is None else x_source.expand(R, *x_source.shape[1:])
    return estimator.posterior_mean(z.expand(R, *z.shape[1:]), t, source, rng(seed)).flatten(1).double()


# The contract


@EVERY
@pytest.mark.parametrize("kind", ["uint8", "float"])
def test_an_estimate_has_shape_and_type_of_z_without_gradients_whatever_surrounds_the_call(name, kind):
    reference = make_set(kind)
    estimator = MAKERS[name]()
    assert estimator.bind(reference) is estimator
    x, z = latents(reference, 0.5)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        own, source = z.to(dtype).requires_grad_(), x.to(dtype)
        for method in (estimator.posterior_mean, estimator.score):
            result = method(own, 0.5, source, rng())
            assert (result.shape, result.dtype, result.device) == (z.shape, dtype, z.device)
            assert result.isfinite().all()
            assert not result.requires_grad
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(method(own, 0.5, source, rng()), result)
    # A scalar of any kind means the same for each item.
    expected = estimator.posterior_mean(z, 2.0, x, rng())
    for t in (2, torch.tensor(2.0), torch.full((5,), 2.0), torch.full((5,), 2.0, dtype=torch.float64)):
        assert torch.equal(estimator.posterior_mean(z, t, x, rng()), expected)
        torch.testing.assert_close(estimator.score(z, t, x, rng()), (expected - z) / 4, rtol=1e-5, atol=1e-6)


def test_per_item_t_belongs_to_its_item():
    reference = pixel_set()
    t = torch.tensor(NOISE_LEVELS, dtype=torch.float64)
    _, z = latents(reference, 1.0, b=len(t), dtype=torch.float64)
    expected = enumerate_mean(reference, z, NOISE_LEVELS)
    torch.testing.assert_close(Exact().bind(reference).posterior_mean(z, t), expected, rtol=0, atol=1e-9)
    # With k = N and many draws, the KNN estimate of each item is near the mean at its own t.
    mean = KNN(k=20, n=20_000).bind(reference).posterior_mean(z, t, generator=rng())
    torch.testing.assert_close(mean, expected, rtol=0, atol=0.03)


@EVERY
def test_deepcopy_of_a_module_shares_the_images_and_the_index(name):
    class Module(nn.Module):
        def __init__(self, estimator):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.estimator = estimator

    reference = pixel_set()
    reference.build_index()
    module = Module(MAKERS[name]().bind(reference))
    twin = copy.deepcopy(module)
    assert set(twin.state_dict()) == {"layer.weight", "layer.bias"}
    assert twin.layer.weight.data_ptr() != module.layer.weight.data_ptr()
    assert twin.estimator is not module.estimator
    assert twin.estimator.reference.images.data_ptr() == reference.images.data_ptr()
    x, z = latents(reference, 1.0)
    expected = module.estimator.posterior_mean(z, 1.0, x, rng())
    assert torch.equal(twin.estimator.posterior_mean(z, 1.0, x, rng()), expected)


# Exact


def test_streaming_memory_is_bounded(monkeypatch):
    reference, limit = vector_set(n=60, d=4), 8 * 100
    monkeypatch.setattr(streaming, "WORK_BYTES", limit)
    _, z = latents(reference, 1.0, b=50)
    batches, chunks, seen = 0, 0, []
    for rows in streaming.batches_of(z, reference.d):
        batches += 1
        seen += range(50)[rows]
        ids_seen = []
        for ids, x, sq_dist in streaming.stream_sq_dist(reference, z[rows]):
            chunks += 1
            ids_seen += range(60)[ids]
            assert sq_dist.shape == (len(z[rows]), len(x))
            assert x.double().nbytes <= limit
            assert sq_dist.nbytes <= limit
            expected = (z[rows].double()[:, None] - x.double()).square().sum(2)
            np.testing.assert_allclose(sq_dist, expected, rtol=1e-9, atol=1e-12)
        assert ids_seen == list(range(60))
        assert z[rows].double().nbytes <= limit
    assert seen == list(range(50))
    assert batches > 1
    assert chunks > 10
    small = [MAKERS[name]().bind(reference).posterior_mean(z, 0.7, generator=rng()) for name in ("Exact", "MonteCarlo")]
    monkeypatch.undo()
    torch.testing.assert_close(small[0], Exact().bind(reference).posterior_mean(z, 0.7))


@WITH_REFERENCE
def test_gathering_in_pieces_changes_nothing(monkeypatch, name):
    reference = pixel_set()
    t = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0])
    x, z = latents(reference, 2.0)
    estimator = MAKERS[name]().bind(reference)
    expected = estimator.posterior_mean(z, t, x, rng())
    for gather_bytes in (1, 4 * 8 * 24 * 2, 4 * 8 * 24 * 3):  # one, two and three latents at a time
        monkeypatch.setattr(draws, "GATHER_BYTES", gather_bytes)
        torch.testing.assert_close(estimator.posterior_mean(z, t, x, rng()), expected, rtol=0, atol=1e-6)


# Distribution of the sampling estimators


@pytest.mark.parametrize("t", [1.0, 2.0])
@pytest.mark.parametrize("n", [1, 10])
def test_monte_carlo_is_unbiased_with_variance_over_n(t, n):
    reference, R = vector_set(), 10_000
    _, z = latents(reference, t, b=1)
    mu, variance = enumerate_mean(reference, z, t)[0], posterior_variance(reference, z, t)
    means = repeated(MonteCarlo(n).bind(reference), z, t, R)
    assert ((means.mean(0) - mu).abs() < 5 * (variance / n / R).sqrt() + 1e-7).all()
    # The spread of a sample variance depends on the fourth moment; it is large if few images dominate.
    squared = (means - mu).square()
    assert ((squared.mean(0) - variance / n).abs() < 5 * squared.std(0) / R**0.5).all()
    assert (squared.std(0) / R**0.5 < 0.1 * variance / n).all()


@pytest.mark.parametrize("make", [UniformSNIS, STF, lambda n: KNN(k=5, n=n), lambda n: KNN(k=40, n=n)])
@pytest.mark.parametrize("t", [0.8, 3.0])
def test_snis_estimators_converge_to_exact(make, t):
    reference = vector_set()
    x, z = latents(reference, t, b=6)
    expected = enumerate_mean(reference, z, t)
    errors = []
    for n in (16, 512, 16_384):
        estimates = make(n).bind(reference).posterior_mean(z, t, x, rng(n))
        errors.append((estimates.double() - expected).square().mean().sqrt().item())
    assert errors[0] > 2 * errors[1]
    assert errors[1] > 2 * errors[2]  # 5.7 on average
    assert errors[2] < 0.04


@pytest.mark.parametrize("t", NOISE_LEVELS)
def test_knn_with_all_neighbours_is_multi_sample_monte_carlo(t):
    # k = N makes q the posterior. All weights are equal, so the estimate has the bias and variance of Eq. 9.
    reference = vector_set()
    _, z = latents(reference, t, b=1)
    mu, variance = enumerate_mean(reference, z, t)[0], posterior_variance(reference, z, t)
    n, R = 10, 4000
    means = repeated(KNN(k=40, n=n).bind(reference), z, t, R)
    assert ((means.mean(0) - mu).abs() < 5 * (variance / n / R).sqrt() + 1e-6).all()
    np.testing.assert_allclose(means.var(0), variance / n, rtol=0.15, atol=1e-10)


@pytest.mark.parametrize("k", [3, 12])
def test_knn_has_the_variance_of_eq_12(k):
    reference, t = vector_set(), 0.8
    x = everything(reference).double()
    _, z = latents(reference, t, b=1)
    likelihood = torch.exp(-(x - z.double()).square().sum(1) / (2 * t**2))
    p = likelihood / likelihood.sum()
    q = likelihood.clamp(min=likelihood.topk(k).values[-1])  # Eq. 13
    q = q / q.sum()
    n, R = 400, 4000
    predicted = (p.square() / q) @ (x - p @ x).square() / n
    means = repeated(KNN(k=k, n=n).bind(reference), z, t, R)
    error = (means - p @ x).square().mean(0)
    np.testing.assert_allclose(error, predicted, rtol=0.15)


@pytest.mark.parametrize(
    ("factory", "nprobe", "t"),
    [
        *[("SQ8", None, t) for t in (0.002, 0.3, 1.0, 80.0)],
        *[("IVF8,Flat", 8, t) for t in (0.002, 0.3, 1.0, 80.0)],
        # A search of one list misses near images, and they join the tail. If the tail has no mass they are never drawn,
        # so only larger t show that the weights correct the search.
        *[(factory, 1, t) for factory in ("IVF8,Flat", "IVF8,SQ8") for t in (1.5, 3.0, 80.0)],
    ],
)
def test_knn_with_an_approximate_search_stays_consistent(factory, nprobe, t):
    reference = ReferenceSet(torch.randn(60, 3, generator=rng()), FaissIndex(factory, nprobe))
    _, z = latents(reference, t, b=8)
    if nprobe == 1:
        assert (reference.search(z, 30)[1] < 0).any()
    result = KNN(k=30, n=30_000).bind(reference).posterior_mean(z, t, generator=rng())
    torch.testing.assert_close(result.double(), enumerate_mean(reference, z, t), rtol=0, atol=0.04)


def test_knn_whose_search_finds_nothing_is_uniform_snis():
    class Blind(FaissIndex):
        def search(self, queries, k):
            sq_dist, ids = super().search(queries, k)
            return torch.full_like(sq_dist, torch.inf), torch.full_like(ids, -1)

    reference = ReferenceSet(torch.randn(40, 3, generator=rng()), Blind("Flat"))
    _, z = latents(reference, 1.0)
    result = KNN(k=10, n=60_000).bind(reference).posterior_mean(z, 1.0, generator=rng())
    torch.testing.assert_close(result.double(), enumerate_mean(reference, z, 1.0), rtol=0, atol=0.05)


def near_duplicates(copies):
    """Random images; the first one has `copies` versions, each with one pixel changed by one grey level."""
    images = torch.randint(0, 256, (20 + copies, 3, 8, 8), dtype=torch.uint8, generator=rng())
    images[:copies] = images[0]
    for i in range(1, copies):
        images[i].view(-1)[i] ^= 1
    return ReferenceSet(images)


@pytest.mark.parametrize("copies", [2, 5, 30])
@pytest.mark.parametrize("k", [5, 20])
def test_images_one_grey_level_apart_are_told_apart_at_t_min(copies, k):
    # The posterior depends on a difference of 6e-5 in sq_dist; expanded float32 distances cannot show it.
    reference, t = near_duplicates(copies), 0.002
    x = reference.gather(torch.arange(2))
    z = x.repeat(4, 1, 1, 1) + t * torch.randn(8, 3, 8, 8, generator=rng(1))
    expected = enumerate_mean(reference, z, t)
    exact = Exact().bind(reference).posterior_mean(z, t)
    torch.testing.assert_close(exact.double(), expected, rtol=0, atol=2e-6)
    # The images differ by 1/127.5 in those pixels. A tenth of that is visible.
    estimate = KNN(k=k, n=4000).bind(reference).posterior_mean(z, t, generator=rng())
    torch.testing.assert_close(estimate.double(), expected, rtol=0, atol=8e-4)


# STF


def test_stf_averages_n_images_the_source_included():
    # At large t all weights are equal, so a source far from every image has weight 1/n.
    reference = ReferenceSet(torch.zeros(10, 2))
    for n in (1, 2, 5, 100):
        for b in (1, 300):  # the batch size must not matter
            mean = STF(n).bind(reference).posterior_mean(torch.zeros(b, 2), 1e6, torch.full((b, 2), 1.0))
            torch.testing.assert_close(mean, torch.full((b, 2), 1 / n), rtol=1e-5, atol=0)


def test_stf_is_biased_at_intermediate_t_and_knn_is_not():
    reference, t = ReferenceSet(torch.randn(60, 8, generator=rng())), 1.0
    x, z = latents(reference, t, b=20)
    mu = enumerate_mean(reference, z, t)

    def squared_bias(estimator, R):
        batch = [tensor.repeat(R, 1) for tensor in (z, x)]
        means = estimator.bind(reference).posterior_mean(batch[0], t, batch[1], rng()).double()
        return (means.reshape(R, *z.shape).mean(0) - mu).square().mean().item()

    stf, knn = squared_bias(STF(16), R=200), squared_bias(KNN(k=20, n=16), R=200)
    assert stf > 20 * knn
    assert stf > 0.01
    assert squared_bias(STF(1024), R=20) < stf / 20  # the bias vanishes as n grows


# Limits


def test_small_t_far_from_every_image_gives_the_nearest():
    # Every likelihood underflows, because the latent does not come from the process at this t.
    reference = pixel_set()
    z = torch.randn(5, 3, 2, 4, generator=rng(4))
    nearest = everything(reference)[
        (z.flatten(1)[:, None] - everything(reference).flatten(1)).square().sum(2).argmin(1)
    ]
    for estimator in (Exact(), MonteCarlo(5), KNN(k=3, n=5), KNN(k=20, n=5)):
        mean = estimator.bind(reference).posterior_mean(z, 0.002, generator=rng())
        torch.testing.assert_close(mean, nearest, rtol=0, atol=1e-6)


def test_an_eight_bit_search_tells_near_copies_apart_with_few_draws():
    # SQ8 has an error of half a level. A proposal from only its distances would nearly always draw the wrong copy.
    images = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8, generator=rng())
    images[:5] = images[0]
    for i in range(1, 5):
        images[i].view(-1)[i] ^= 1
    reference, t = ReferenceSet(images, FaissIndex("SQ8")), 0.002
    z = reference.gather(torch.arange(2)).repeat(16, 1, 1, 1)
    z += t * torch.randn(z.shape, generator=rng(1))
    estimate = KNN(k=5, n=64).bind(reference).posterior_mean(z, t, generator=rng())
    error = (estimate - enumerate_mean(reference, z, t)).flatten(1).norm(dim=1)
    assert error.max() < 0.25 / 127.5  # a quarter of the level by which they differ
