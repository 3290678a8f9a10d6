"""What FAISS can do on a GPU is checked before the build, and moves and searches there are right."""

import sys

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet

pytestmark = pytest.mark.filterwarnings("ignore:.* images are few")
GPU = torch.device("cuda", 0)


def pixels(N=300, shape=(3, 4, 4)):
    return torch.randint(256, (N, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def noisy(images, count, sigma=0.5):
    x = images[:count].float() / 127.5 - 1
    return x + sigma * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))


def searched(index, k, device, images=None, z=None):
    images = pixels() if images is None else images
    reference = ReferenceSet(images, index).to(device)
    sq_dist, ids = reference.search((noisy(images, 20) if z is None else z).to(device), k)
    return sq_dist.cpu(), ids.cpu()


# By hand from 48 KiB of shared memory: 4 lists of 512 neighbours take 24 KiB, and d = 3072 ranges the other 24 KiB.
@pytest.mark.parametrize(
    ("factory", "d", "k", "largest"),
    [
        ("IVF4,SQ8", 48, 513, 512),
        ("IVF4,SQ8", 3072, 513, 512),
        ("IVF4,SQ8", 3073, 512, 256),
        ("IVF4,SQ8", 3072, 2048, 512),
        ("IVF4,SQ8", 4608, 257, 256),
        ("IVF4,SQ8", 6138, 2, 1),
        ("IVF4,SQ8", 6139, 1, 0),
        ("IVF4,SQ8", 6144, 1, 0),
        ("IVF4,SQ8", 12_288, 2048, 0),
        ("PCA16,IVF4,SQ8", 12_288, 2048, 512),
        ("IVF4,Flat", 12_288, 2049, 2048),
        ("Flat", 48, 2049, 2048),
        ("PCA8,Flat", 48, 2049, 2048),
    ],
)
def test_lists_too_long_for_shared_memory_are_refused_before_the_build(factory, d, k, largest):
    index = FaissIndex(factory)
    index.check(10**6, d, torch.device("cpu"), k)
    with pytest.raises(InputError, match=rf"^k={k}: FAISS .* at most {largest} neighbours .* at d=\d+; .*TorchIndex"):
        index.check(10**6, d, GPU, k)
    if largest:
        index.check(10**6, d, GPU, largest)


@pytest.mark.parametrize("factory", ["SQ8", "PCA8,SQ8"])
def test_8_bits_without_lists_are_refused_on_a_gpu_before_the_build(factory):
    FaissIndex(factory).check(5000, 48, torch.device("cpu"), 8)
    with pytest.raises(InputError, match=rf"factory='{factory}' to a GPU.*TorchIndex"):
        FaissIndex(factory).check(5000, 48, GPU, 8)


def test_more_lists_than_a_gpu_searches_are_refused_before_the_build():
    FaissIndex("IVF5000,Flat", nprobe=2048).check(10**6, 48, GPU, 8)
    with pytest.raises(InputError, match="nprobe=2049: FAISS on a GPU searches at most 2048 lists"):
        FaissIndex("IVF5000,Flat", nprobe=2049).check(10**6, 48, GPU, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "IVF4,SQ8", "PCA12,Flat", "PCA12,IVF4,SQ8"])
def test_a_gpu_finds_what_the_cpu_finds(factory):
    nprobe = 2 if "IVF" in factory else None
    (true, ids), (sq_dist, found) = (searched(FaissIndex(factory, nprobe), 40, place) for place in ("cpu", "cuda"))
    assert (ids == found).float().mean() > 0.98
    torch.testing.assert_close(sq_dist, true, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("factory", "lossless"), [("Flat", False), ("IVF4,SQ8", True), ("IVF4,SQ8", False), ("PCA12,IVF4,Flat", False)]
)
def test_an_index_comes_back_from_a_gpu_as_it_went(factory, lossless):
    reference = ReferenceSet(pixels(), FaissIndex(factory, lossless=lossless))
    z = noisy(reference.images, 20)
    before = reference.search(z, 30)
    reference.to("cuda")
    reference.search(z.to("cuda"), 30)
    after = reference.to("cpu").search(z, 30)
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=1e-5)
    assert (after[1] == before[1]).float().mean() > 0.98
    if not factory.startswith("PCA"):
        assert torch.equal(after[0], before[0])


@pytest.mark.gpu
def test_moving_a_set_to_the_gpu_where_it_is_does_nothing(monkeypatch):
    import faiss

    copies, copy = [], faiss.index_cpu_to_gpu
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", lambda *args: copies.append(args) or copy(*args))
    reference = ReferenceSet(pixels(), labels=torch.arange(300) % 2).to("cuda")
    reference.build_index()
    made = reference.cached("something", lambda: [])
    for place in ("cuda", "cuda:0", torch.device("cuda"), GPU):
        assert reference.to(place) is reference
        reference.index.to(torch.device(place))
    assert reference.cached("something", lambda: None) is made
    assert len(copies) == 1
    assert reference.device == GPU
    assert reference.search(reference.gather(torch.arange(3, device="cuda")), 1)[1].flatten().tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_queries_of_another_device_are_refused():
    reference = ReferenceSet(pixels()).to("cuda")
    reference.build_index()
    with pytest.raises(InputError, match="FaissIndex is on cuda:0 but the queries are on cpu"):
        reference.index.search(torch.zeros(2, reference.d), 3)
    reference.to("cpu")
    with pytest.raises(InputError, match="FaissIndex is on cpu but the queries are on cuda:0"):
        reference.index.search(torch.zeros(2, reference.d, device="cuda"), 3)


def test_the_search_runs_on_the_device_of_the_index_when_another_is_current(stand_in):
    reference = ReferenceSet(pixels()).to("cuda")
    reference.build_index()
    z = noisy(reference.images.cpu(), 20).to("cuda")
    expected = reference.search(z, 5)
    with torch.cuda.device(1):
        sq_dist, ids = reference.search(z, 5)
        assert torch.cuda.current_device() == 1
    assert torch.equal(ids, expected[1])
    assert torch.equal(sq_dist, expected[0])


def test_a_search_of_a_faiss_index_waits_for_nothing(stand_in):
    reference = ReferenceSet(pixels(), FaissIndex("PCA12,IVF4,Flat")).to("cuda")
    reference.build_index()
    z = noisy(reference.images.cpu(), 20).to("cuda")
    with stand_in.record() as seen:
        reference.search(z, 5)
    assert seen.syncs == 0, seen.report()


def test_a_faiss_that_does_not_load_is_told_with_its_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"FaissIndex needs faiss \(.*faiss.*\): pip install"):
        FaissIndex().check(10, 4)
