"""What FAISS can do on a GPU is checked before the build; moves and searches there are right."""

import sys

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet
from tests.toys import noisy, pixels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


# By hand from 48 KiB of shared memory: 4 lists of 512 neighbours take 24 KiB, and d = 3072 ranges the other 24 KiB.
@pytest.mark.parametrize(
    ("factory", "d", "k", "largest"),
    [
        ("IVF4,SQ8", 48, 513, 512),
        ("IVF4,SQ8", 3072, 513, 512),
        ("IVF4,SQ8", 3073, 512, 256),
        ("IVF4,SQ8", 6138, 2, 1),
        ("IVF4,SQ8", 6139, 1, 0),
        ("IVF4,SQ8", 12_288, 2048, 0),
        ("PCA16,IVF4,SQ8", 12_288, 2048, 512),
        ("IVF4,Flat", 12_288, 2049, 2048),
        ("PCA8,Flat", 48, 2049, 2048),
    ],
)
def test_lists_too_long_for_shared_memory_are_refused_before_the_build(factory, d, k, largest):
    index = FaissIndex(factory)
    index.check(10**6, d, CPU, k)
    with pytest.raises(InputError, match=rf"^k={k}: FAISS .* at most {largest} neighbours .* at d=\d+; .*TorchIndex"):
        index.check(10**6, d, GPU, k)
    if largest:
        index.check(10**6, d, GPU, largest)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (FaissIndex("SQ8"), "factory='SQ8' to a GPU.*TorchIndex"),
        (FaissIndex("PCA8,SQ8"), "factory='PCA8,SQ8' to a GPU.*TorchIndex"),
        (FaissIndex("IVF5000,Flat", nprobe=2049), "nprobe=2049: FAISS on a GPU searches at most 2048 lists"),
    ],
)
def test_what_faiss_has_for_the_cpu_alone_is_refused_before_the_build(index, message):
    index.check(10**6, 48, CPU, 8)
    with pytest.raises(InputError, match=message):
        index.check(10**6, 48, GPU, 8)
    FaissIndex("IVF5000,Flat", nprobe=2048).check(10**6, 48, GPU, 8)


@pytest.mark.gpu
@pytest.mark.usefixtures("real_gpu")
@pytest.mark.filterwarnings("ignore:.* images are few")
@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "IVF4,SQ8", "IVF4,SQ8 lossless", "PCA12,IVF4,SQ8"])
def test_an_index_on_a_gpu_finds_what_it_found_before_and_comes_back(factory):
    factory, _, lossless = factory.partition(" ")
    index = FaissIndex(factory, 2 if "IVF" in factory else None, lossless=bool(lossless))
    reference = ReferenceSet(pixels(), index)
    z = noisy(reference.gather(torch.arange(20)), 0.5)
    before = reference.search(z, 40)
    reference.to("cuda")
    with pytest.raises(InputError, match="FaissIndex is on cuda:0 but the queries are on cpu"):
        index.search(z.flatten(1), 3)
    on_gpu = reference.search(z.cuda(), 40)
    assert all(part.is_cuda for part in on_gpu)
    assert reference.search(reference.gather(torch.arange(3).cuda()), 1)[1].flatten().tolist() == [0, 1, 2]
    reference.to("cpu")
    with pytest.raises(InputError, match="FaissIndex is on cpu but the queries are on cuda:0"):
        index.search(z.flatten(1).cuda(), 3)
    for sq_dist, ids in (on_gpu, reference.search(z, 40)):
        # Sums in another order swap neighbours of nearly equal distance.
        assert (ids.cpu() == before[1]).float().mean() > 0.98
        torch.testing.assert_close(sq_dist.cpu(), before[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("real_gpu")
def test_moving_a_set_to_the_gpu_where_it_is_does_nothing(monkeypatch):
    import faiss

    copies, copy = [], faiss.index_cpu_to_gpu
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", lambda *args: copies.append(args) or copy(*args))
    reference = ReferenceSet(pixels(), FaissIndex("Flat")).to("cuda")
    reference.build_index()
    made = reference.cached("something", lambda: [])
    for place in ("cuda", "cuda:0", torch.device("cuda"), GPU):
        assert reference.to(place) is reference
        reference.index.to(torch.device(place))
    assert reference.cached("something", lambda: None) is made
    assert len(copies) == 1


def test_a_faiss_that_does_not_load_is_told_with_its_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"FaissIndex needs faiss \(.*faiss.*\): pip install"):
        FaissIndex().check(10, 4)
