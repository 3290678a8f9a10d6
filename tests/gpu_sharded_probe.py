"""One rank with a shard of a reference set on a GPU, or on its stand-in."""

from contextlib import ExitStack

import torch
import torch.distributed as dist

from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import Exact, Switched, Wiener
from lit_knn.index import TorchIndex
from tests.pretend_cuda import PretendCuda, world_of_nccl
from tests.sharded_probe import ESTIMATORS, latents, shard_of

SETTINGS = ("pixels", "mirrored")
# On a GPU both parts of a switched estimator estimate all rows, so random parts would draw other numbers than on a CPU.
ON_GPUS = {**ESTIMATORS, "Switched": lambda: Switched(Wiener(4), Exact(), 0.5)}


def answers(reference, setting, rank, device):
    """Return what the rank finds and estimates, by name; rank 1 has no latents."""
    z, x = (part.to(device) for part in latents(setting, rank))
    sq_dist, ids = reference.search(latents(setting, 0)[0].to(device), 7)
    everything = torch.cat([chunk for _, chunk in reference.chunks(10)])
    means = {
        name: make().bind(reference).posterior_mean(z, 2.0, x, keyed_generator(device.type, rank, 7))
        for name, make in ON_GPUS.items()
    }
    located = reference.locate(everything[5:9].to(device))
    found = {"sq_dist": sq_dist, "ids": ids, "images": everything, "located": located, "mean": reference.mean()}
    return {name: part.cpu() for name, part in (means | found).items()}


def main(rank, world_size, folder, how):
    with ExitStack() as stack:
        real = torch.cuda.is_available()
        if not real:
            stack.enter_context(PretendCuda())
        device = torch.device("cuda", rank if real else 0)
        torch.cuda.set_device(device)
        store = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world_size}
        dist.init_process_group("nccl" if real else "gloo", **store)
        stack.callback(dist.destroy_process_group)
        if not real:
            stack.enter_context(world_of_nccl())
        report = {}
        for setting in SETTINGS:
            reference = shard_of(setting, rank, world_size, TorchIndex("float32")).to(device)
            report[setting] = answers(reference, setting, rank, device)
            report[setting]["fingerprint"] = reference.fingerprint()
        torch.save(report, folder / f"rank_{rank}.pt")
