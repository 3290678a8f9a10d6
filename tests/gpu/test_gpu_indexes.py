"""Indexes on a GPU: FAISS's limits are checked before the build, for each config, too; moves and searches are right."""

import math
import sys

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.commands.plan_data import plan_data
from lit_knn.commands.trainer import Trainer
from lit_knn.common.errors import InputError
from lit_knn.data import DataLayout
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet
from tests.config_files import CONFIGS, RUNS, resolved
from tests.every_estimator import made
from tests.toys import noisy, pixels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


# By hand from 48 KiB of shared memory: 4 lists of 512 neighbours take 24 KiB, and d = 3072 ranges the other 24 KiB.
@pytest.mark.parametrize(
    ("factory", "d", "k", "largest"),
    [
        ("IVF4,SQ8", 3072, 513, 512),
        ("IVF4,SQ8", 3073, 512, 256),
        ("IVF4,SQ8", 6139, 1, 0),
        ("PCA16,IVF4,SQ8", 12_288, 2048, 512),
        ("IVF4,Flat", 12_288, 2049, 2048),
    ],
)
def test_lists_beyond_shared_memory_are_refused_before_build(factory, d, k, largest):
    index = FaissIndex(factory)
    index.check(10**6, d, CPU, k)
    with pytest.raises(
        InputError,
        match=rf"^k={k}: FAISS .* at most {largest} neighbours .* at d=\d+; .*TorchIndex",
    ):
        index.check(10**6, d, GPU, k)
    if largest:
        index.check(10**6, d, GPU, largest)


def test_what_faiss_lacks_is_refused_before_the_build(monkeypatch):
    for index, message in (
        (FaissIndex("PCA8,SQ8"), "factory='PCA8,SQ8' to a GPU.*TorchIndex"),
        (
            FaissIndex("IVF5000,Flat", nprobe=2049),
            "nprobe=2049: FAISS on a GPU searches at most 2048 lists",
        ),
    ):
        index.check(10**6, 48, CPU, 8)
        with pytest.raises(InputError, match=message):
            index.check(10**6, 48, GPU, 8)
    FaissIndex("IVF5000,Flat", nprobe=2048).check(10**6, 48, GPU, 8)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"FaissIndex needs faiss \(.*faiss.*\): pip install"):
        FaissIndex().check(10, 4)


@pytest.mark.gpu
@pytest.mark.usefixtures("real_gpu")
@pytest.mark.filterwarnings("ignore:.* images are few")
@pytest.mark.parametrize(
    "factory", ["Flat", "IVF4,Flat", "IVF4,SQ8", "IVF4,SQ8 lossless", "PCA12,IVF4,SQ8"]
)
def test_index_on_a_gpu_finds_the_same_and_comes_back(factory, monkeypatch):
    import faiss

    copies, copy = [], faiss.index_cpu_to_gpu
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", lambda *args: copies.append(args) or copy(*args))
    factory, _, lossless = factory.partition(" ")
    index = FaissIndex(factory, 2 if "IVF" in factory else None, lossless=bool(lossless))
    reference = ReferenceSet(pixels(), index)
    z = noisy(reference.gather(torch.arange(20)), 0.5)
    before = reference.search(z, 40)
    for place in ("cuda", "cuda:0", GPU):  # It moves once.
        reference.to(place)
    assert len(copies) == 1
    with pytest.raises(InputError, match="FaissIndex is on cuda:0 but the queries are on cpu"):
        index.search(z.flatten(1), 3)
    on_gpu = reference.search(z.cuda(), 40)
    assert all(part.is_cuda for part in on_gpu)
    assert reference.search(reference.gather(torch.arange(3).cuda()), 1)[1].flatten().tolist() == [
        0,
        1,
        2,
    ]
    reference.to("cpu")
    with pytest.raises(InputError, match="FaissIndex is on cpu but the queries are on cuda:0"):
        index.search(z.flatten(1).cuda(), 3)
    for sq_dist, ids in (on_gpu, reference.search(z, 40)):
        # Sums in another order swap neighbours of nearly equal distance.
        assert (ids.cpu() == before[1]).float().mean() > 0.98
        torch.testing.assert_close(sq_dist.cpu(), before[0], rtol=1e-4, atol=1e-4)


# Configs. Nothing is built.

ON_GPUS = [path for path in RUNS if resolved(path)["trainer"].get("accelerator") != "cpu"]
# Data that are not at hand: CelebA, ImageNet, photos, and as many images of one's own as ImageNet has.
SIZES = {"data/celeba64.npy": (202_599, 3, 64, 64), "data/imagenet64.npy": (1_281_167, 3, 64, 64)}
SIZES["photos.npy"] = (100_000, 3, 64, 64)
SIZES["data/imagenet256_latents.npy"] = (1_281_167, 4, 32, 32)
OWN = SIZES["data/imagenet64.npy"]


def estimators_in(value):
    """The estimators that a part of a config names, but those that need files of networks."""
    if isinstance(value, dict):
        kind = value.get("class_path", "")
        if kind.startswith("lit_knn.estimators.") and not kind.endswith(".Network"):
            return [made(value)]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [estimator for part in inner for estimator in estimators_in(part)]


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_a_run_searches_on_a_gpu_and_on_a_cpu_at_its_real_size(path):
    config = resolved(path)
    data, estimators = made(config["data"]), estimators_in([config["model"], config["trainer"]])
    size = SIZES.get(getattr(data, "path", None))
    stored = data.stored() if size is None else DataLayout(size)
    module = pl.LightningModule()
    module.estimators = dict(enumerate(estimators))
    for device in (CPU, GPU):
        on_device = plan_data(
            Trainer(accelerator="cpu", logger=False), module, data, stored, device
        )[0]
        assert None not in on_device.sizes.values()
        # Half of a large GPU is left for the network.
        assert on_device.needed < 40e9
    assert estimators or "lit_knn.estimators.Network" in path.read_text()


def test_all_runs_and_indexes_of_data_are_looked_at():
    assert {"celeba64", "imagenet64", "figure3", "table1", "table2"} <= {
        path.parent.name for path in ON_GPUS
    }
    indexes = [made(resolved(path)) for path in (CONFIGS / "data").glob("*.yaml")]
    indexes = [data for data in indexes if data.index is not None]
    assert indexes
    for data in indexes:
        N, *shape = SIZES.get(getattr(data, "path", None), OWN)
        for device in (CPU, GPU):
            data.index.check(N, math.prod(shape), device, 2048)
