"""A reference set whose index is kept in a folder, and one process of a distributed run that builds it."""

import json
import os
import resource
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lit_knn.common import distributed
from lit_knn.common.errors import InputError
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet


def images(n=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 1, 4, 6), dtype=torch.uint8, generator=generator)


def queries(seed=1):
    return torch.randn(7, 1, 4, 6, generator=torch.Generator().manual_seed(seed))


def started(folder, factory="IVF4,SQ8", pictures=None, **options):
    """Make the reference set as a new process does; its index is built or found."""
    index = FaissIndex(factory, cache_dir=str(folder), **options)
    reference = ReferenceSet(images() if pictures is None else pictures, index)
    reference.build_index()
    return reference


class Spied(FaissIndex):
    """Records in `builds` whether it took samples for a build; on request it fails or dies there."""

    builds, how = 0, "well"

    def build(self, vectors):
        def sample(size):
            self.builds = 1
            if self.how == "error":
                raise MemoryError("no room")
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return vectors.sample(size)

        super().build(vectors._replace(sample=sample))


def loaded(rank, index):
    """The reference set of a data module that cannot load its data on rank 1."""
    from lit_knn.data import ReferenceDataModule

    class Lacking(ReferenceDataModule):
        def load(self):
            if rank == 1:
                raise InputError("data.path=x: no such file")
            return images(), None

    data = Lacking(index=index)
    data.setup()
    return data.reference


def main(rank, world_size, folder, how):
    cache = folder / "cache"
    if how == "machines":
        # Each machine has two ranks.
        name = socket.gethostname()
        socket.gethostname = lambda: f"{name}-{rank // 2}"
        cache = folder / f"cache-{rank // 2}"
    if how == "full":
        # A limit on file sizes simulates a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    if how == "folder" and rank == 0:
        cache = folder / "store" / "within a file"
    index = Spied("IVF4,SQ8", cache_dir=str(cache))
    index.how = how
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    distributed.ARRIVAL = timedelta(seconds=2)
    if how == "absent" and rank == 1:
        raise SystemExit(3)
    try:
        reference = loaded(rank, index) if how == "data" else ReferenceSet(images(), index)
        reference.build_index()
    except (InputError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        dist.destroy_process_group()
        raise SystemExit(2) from None
    sq_dist, ids = reference.search(queries(), 50)
    mapped = [
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if ".index" in line
    ]
    report = {
        "builds": index.builds,
        "sq_dist": sq_dist.tolist(),
        "ids": ids.tolist(),
        "mapped": sorted(set(mapped)),
    }
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (folder / f"rank_{rank}.json").write_text(json.dumps(report))
    # The run's process group still works.
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == world_size
    dist.destroy_process_group()
