"""Search in PyTorch against an exhaustive search in float64."""

import pytest
import torch

from lit_knn.estimators import KNN
from lit_knn.index import FaissIndex, FlatIndex, SubspaceIndex, TorchIndex
from lit_knn.index.precision import is_native
from lit_knn.index.torch_index import SCORE_BYTES
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean
from tests.toys import pixels

CPU = torch.device("cpu")
TYPES = ["float32", *(["bfloat16"] if is_native(torch.bfloat16, CPU) else [])]


def exhaustive(reference, z, k):
    x = reference.gather(torch.arange(reference.N)).flatten(1).double()
    sq_dist = torch.cdist(z.flatten(1).double(), x).square()
    return sq_dist.topk(k, dim=1, largest=False)


def noisy(reference, t, rows=20):
    generator = torch.Generator().manual_seed(1)
    x = reference.gather(torch.arange(rows))
    return x + t * torch.randn(x.shape, generator=generator)


@pytest.mark.parametrize("compute", TYPES)
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("t", [0.01, 0.5, 5.0])
def test_finds_the_nearest_of_pictures(compute, hflip, t):
    reference = ReferenceSet(pixels(), index=TorchIndex(compute), hflip=hflip)
    z, k = noisy(reference, t), 12
    sq_dist, ids = reference.search(z, k)
    expected, nearest = exhaustive(reference, z, k)
    recall = (ids.unsqueeze(2) == nearest.unsqueeze(1)).any(2).double().mean()
    assert recall > (0.999 if compute == "float32" else 0.9)
    assert (sq_dist.diff(dim=1) >= 0).all()
    # Rounding the query changes a distance by at most a few per cent of the distances' spread.
    found = (reference.gather(ids) - z.unsqueeze(1)).double().flatten(2).square().sum(2)
    tolerance = {"float32": 1e-5, "bfloat16": 0.05}[compute]
    assert ((sq_dist - found).abs() / found.mean()).max() < tolerance
    assert (found.sort(1).values / expected).max() < 1.1


@pytest.mark.parametrize("compute", TYPES)
def test_all_components_find_what_all_dimensions_find(compute):
    x = torch.randn(200, 10, generator=torch.Generator().manual_seed(0))
    reference = ReferenceSet(x, index=SubspaceIndex(10, compute))
    z = noisy(reference, 0.5)
    sq_dist, ids = reference.search(z, 5)
    expected, nearest = exhaustive(reference, z, 5)
    assert (ids[:, 0] == nearest[:, 0]).double().mean() > 0.9
    torch.testing.assert_close(sq_dist.double(), expected, rtol=0.05, atol=0.3 if compute == "bfloat16" else 1e-3)


@pytest.mark.parametrize("k", [1, 7, 300])
def test_chunks_make_no_difference(k):
    reference = ReferenceSet(pixels(N=6000), index=TorchIndex("float32"))
    z = noisy(reference, 0.5, rows=2000)
    assert 4 * reference.N * len(z) > 2 * SCORE_BYTES
    few_at_a_time = zip(*(reference.search(rows, k) for rows in z.split(100)), strict=True)
    expected_sq_dist, expected_ids = (torch.cat(parts) for parts in few_at_a_time)
    sq_dist, ids = reference.search(z, k)
    torch.testing.assert_close(sq_dist, expected_sq_dist)
    # Products of other shapes round differently, which may swap neighbours.
    assert (ids == expected_ids).float().mean() > 0.9999


@pytest.mark.parametrize("kind", ["pixels", "latents"])
def test_codes_of_8_bits_lose_nothing_of_pixels_and_half_a_step_of_floats(kind):
    latents = torch.randn(300, 8, generator=torch.Generator().manual_seed(0)) * 3 - 4  # The largest are below 0.
    reference = ReferenceSet(pixels() if kind == "pixels" else latents, TorchIndex("float32"))
    assert reference.index.nbytes(300, reference.d, CPU) == 300 * (reference.d + 4)
    z = noisy(reference, 0.5)
    sq_dist, ids = reference.search(z, 300)
    true = (reference.gather(ids) - z.unsqueeze(1)).double().flatten(2).norm(dim=2)
    half_a_step = latents.abs().max() / 127 / 2 if kind == "latents" else 1e-6
    assert (sq_dist.double().sqrt() - true).abs().max() <= half_a_step * reference.d**0.5 * 1.001


@pytest.mark.parametrize("index", [TorchIndex("float32"), FlatIndex(), SubspaceIndex(4, "float32")], ids=type)
def test_a_moved_index_searches_on_its_new_device(index):
    reference, meta = ReferenceSet(pixels(N=50), index), torch.device("meta")
    reference.build_index()
    index.to(meta)
    found = index.search(torch.empty(2, reference.d, device=meta), 3)
    assert [(part.device, tuple(part.shape)) for part in found] == [(meta, (2, 3))] * 2


@pytest.mark.parametrize(("generation", "native"), [(6, False), (7, False), (8, True)])
def test_types_that_a_gpu_multiplies_depend_on_its_generation(generation, native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 5))
    assert is_native(torch.bfloat16, torch.device("cuda")) == native
    assert is_native(torch.float32, torch.device("cuda"))


@pytest.mark.parametrize("k", [1, 40])
def test_the_flat_index_finds_what_faiss_finds(k):
    x = torch.randn(300, 20, generator=torch.Generator().manual_seed(0))
    z = noisy(ReferenceSet(x), 0.5)
    sq_dist, ids = ReferenceSet(x, FlatIndex()).search(z, k)
    expected, nearest = ReferenceSet(x, FaissIndex("Flat")).search(z, k)
    assert torch.equal(ids, nearest)
    torch.testing.assert_close(sq_dist, expected, rtol=1e-5, atol=1e-4)
    assert ReferenceSet(x, FlatIndex()).search(x, 1)[0].min() >= 0


@pytest.mark.parametrize("t", [0.3, 1.0, 4.0])
def test_the_estimator_is_as_good_as_with_faiss(t):
    x = pixels(N=1500)
    errors = []
    for index in (FaissIndex("Flat"), TorchIndex(), SubspaceIndex(12)):
        reference = ReferenceSet(x, index=index)
        z = noisy(reference, t, rows=100)
        mu = posterior_mean(z, reference.gather(torch.arange(reference.N)), t)
        estimator = KNN(k=100, n=64).bind(reference)
        generator = torch.Generator().manual_seed(0)
        estimates = [estimator.posterior_mean(z, t, generator=generator) for _ in range(10)]
        errors.append(sum((estimate - mu).square().mean().item() for estimate in estimates))
    assert max(errors[1:]) < 1.3 * errors[0] + 1e-9
