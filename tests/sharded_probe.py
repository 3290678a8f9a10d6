"""One rank with a shard of a reference set."""

import os
import signal
import sys

import torch
import torch.distributed as dist

from lit_knn.common.errors import InputError
from lit_knn.common.rng import keyed_generator
from lit_knn.data import PointsOnALine
from lit_knn.estimators import (
    KNN,
    STF,
    Exact,
    MonteCarlo,
    SubspaceKNN,
    Switched,
    UniformSNIS,
    Wiener,
)
from lit_knn.index import FaissIndex, TorchIndex
from lit_knn.reference.classes import classes_of
from lit_knn.reference.principal import projection_of
from lit_knn.reference.sharded import ShardedReferenceSet
from lit_knn.reference.shards import shard_rows
from tests.toys import all_warped

N, K = 61, 40
SHAPES = {"pixels": (3, 4, 4), "mirrored": (3, 4, 4), "floats": (5,), "bfloat16": (5,)}
TIMES = (0.05, 0.5, 2.0, 80.0)
ESTIMATORS = {
    "KNN": lambda: KNN(K, 16),
    "KNN, k = N": lambda: KNN(N, 16),
    "KNN with source": lambda: KNN(5, 16, include_source=True),
    "STF": lambda: STF(8),
    "UniformSNIS": lambda: UniformSNIS(8),
    "Exact": Exact,
    "Wiener": lambda: Wiener(4),
    "SubspaceKNN": lambda: SubspaceKNN(4, 8, "float32"),
    "Switched": lambda: Switched(STF(8), KNN(K, 16), 0.5),
}


def images(setting):
    """Random images: no two have the same distance to a latent, so the order of neighbours is certain.

    FAISS searches a few queries one by one, so every rank rounds them alike.
    """
    generator = keyed_generator("cpu", 4)
    if setting in ("floats", "bfloat16"):
        x = torch.randn(N, *SHAPES[setting], generator=generator)
        return x.bfloat16() if setting == "bfloat16" else x
    return torch.randint(0, 256, (N, *SHAPES[setting]), generator=generator).to(torch.uint8)


def latents(setting, rank):
    """The rank's latents and their sources; the number differs between ranks, and rank 1 has none."""
    generator = keyed_generator("cpu", rank, 5)
    B = 0 if rank == 1 else 3 + rank
    x = torch.randn(B, *SHAPES[setting], generator=generator)
    return x + torch.randn(x.shape, generator=generator), x


def answers(reference, setting, rank):
    """The rank's results of searching, gathering and estimating; its generators depend on the rank."""
    z, x = latents(setting, rank)
    found = [reference.search(z, k) for k in (1, 7, K, reference.N)]
    ids = torch.randint(reference.N, (len(z), 9), generator=keyed_generator("cpu", rank, 6))
    means = {
        f"{name}, t={t}": estimator()
        .bind(reference)
        .posterior_mean(z, t, x, keyed_generator("cpu", rank, 7))
        for name, estimator in ESTIMATORS.items()
        for t in TIMES
    }
    # Rank 0 has rows of both parts, and another rank has rows of one part alone.
    mixed = torch.logspace(-1, 1, len(z), dtype=torch.float64) if rank == 0 else 2.0
    switched = ESTIMATORS["Switched"]().bind(reference)
    means["Switched, mixed"] = switched.posterior_mean(z, mixed, x, keyed_generator("cpu", rank, 7))
    if len(z.shape) == 4:
        warp = all_warped(x).warp
        for name in ("KNN", "STF", "SubspaceKNN", "Switched", "Exact"):
            estimator = ESTIMATORS[name]().bind(reference)
            means[f"{name}, warped"] = estimator.warped_mean(
                z, 2.0, warp, x, keyed_generator("cpu", rank, 7)
            )
    certificate = (
        KNN(K, 16).bind(reference).certified_mean(z, 0.5, x, keyed_generator("cpu", rank, 7))
    )
    return {
        "found": found,
        "gathered": reference.gather(ids),
        "located": reference.locate(reference.gather(ids[:, 0])),
        "mean": reference.mean(),
        "chunks": torch.cat([chunk for _, chunk in reference.chunks(10)]),
        "labels": reference.labels,
        "classes": reference.labels.unique(),
        "means": means,
        "sq_error": certificate.sq_error,
    }


def refusals(reference):
    """The error messages of calls that every rank must refuse."""
    messages = []
    for attempt in (
        lambda: MonteCarlo().bind(reference),
        lambda: KNN(k=reference.N + 1).bind(reference),
        lambda: reference.search(torch.zeros(1, *reference.shape), 0),
        lambda: classes_of(reference),
    ):
        try:
            attempt()
        except InputError as error:
            messages.append(str(error))
    return messages


class Failing(FaissIndex):
    """An index whose build fails or dies on rank 1."""

    how = ""

    def build(self, vectors):
        if dist.get_rank() == 1 and self.how == "error":
            raise MemoryError("no room")
        if dist.get_rank() == 1 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        super().build(vectors)


def shard_of(setting, rank, world_size, index):
    rows = shard_rows(N, rank, world_size)
    return ShardedReferenceSet(
        images(setting)[rows].clone(),
        index,
        hflip=setting == "mirrored",
        labels=torch.arange(N)[rows],
    )


def main(rank, world_size, folder, setting):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    try:
        if setting in ("error", "killed"):
            index = Failing("Flat")
            index.how = setting
            shard_of("pixels", rank, world_size, index).build_index()
        elif setting == "differing":
            ShardedReferenceSet(torch.zeros(4, 3 + rank))
        elif setting == "few":
            PointsOnALine(num_points=1, sharded=True).setup()
        else:
            report = {}
            for kind in SHAPES:
                reference = shard_of(
                    kind, rank, world_size, FaissIndex("Flat", cache_dir=str(folder / "cache"))
                )
                report[kind] = answers(reference, kind, rank)
                # Only one rank calls it, because the others need not take part.
                report[kind]["share"] = (
                    list(reference.share(rank, world_size, 10)) if rank == 0 else []
                )
                dist.barrier()
                report[kind]["share"] = report[kind]["share"] or list(
                    reference.share(rank, world_size, 10)
                )
            # Every rank has the same queries, because TorchIndex rounds a query relative to the largest of its batch.
            reference = shard_of("pixels", rank, world_size, TorchIndex("float32"))
            report["TorchIndex"] = reference.search(latents("pixels", 0)[0], K)
            report["refusals"] = refusals(reference)
            report["stored"] = (len(reference.images), reference.N, reference.images.nbytes)
            report["traffic"] = traffic(reference)
            report["coordinates"] = projection_of(
                shard_of("pixels", rank, world_size, None), 4
            ).coordinates
            report["fingerprint"] = reference.fingerprint()
            mirrored = shard_of("mirrored", rank, world_size, None)
            report["fingerprints"] = [mirrored.fingerprint(mirrored=each) for each in (True, False)]
            report["largest"] = ShardedReferenceSet(torch.full((2, 3), float(rank))).largest
            torch.save(report, folder / f"rank_{rank}.pt")
    except (InputError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        dist.destroy_process_group()


def traffic(reference):
    """Bytes for B = 6 latents on each rank: of a search, a gather of distinct images, and the exact mean."""
    z = torch.zeros(6, *reference.shape)
    sent, exact = [], Exact().bind(reference)
    for call in (
        lambda: reference.search(z, 10),
        lambda: reference.gather(torch.arange(reference.N)),
        lambda: exact.posterior_mean(z, 1.0),
    ):
        before = reference.exchange.bytes_sent
        call()
        sent.append(reference.exchange.bytes_sent - before)
    return sent
