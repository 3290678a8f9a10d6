"""One rank of a distributed run that uses its own classes."""

import torch
import torch.distributed as dist

from lit_knn.estimators import Exact
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import classes_of


def main(rank, ranks, folder, how):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    images = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    index = FaissIndex("IVF2,Flat", cache_dir=str(folder / "cache"))
    reference = ReferenceSet(images, index, labels=torch.arange(60) % 3)
    means = []
    for label in (0, 1) if rank == 0 else (1, 2):
        classes_of(reference)[label].build_index()
        means.append(Exact().bind(classes_of(reference)[label]).posterior_mean(torch.zeros(1, 3), 1.0))
    torch.save(means, folder / f"rank_{rank}.pt")
    dist.destroy_process_group()
