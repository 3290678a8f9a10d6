"""Callbacks of distributed trainings that write what each rank sees, and one process that alone may get a signal."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from lit_knn.index import FaissIndex
from lit_knn.runs.interruption import Interruption


class DDPProbe(pl.Callback):
    """Writes to rank_<r>.json what each rank sees: weights, data, noise, levels, indexes, broadcasts in training."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.report = {"batches": [], "noise": [], "levels": [], "builds": 0, "broadcasts": 0}

    def counted(self, name, function):
        def call(*args, **options):
            self.report[name] += 1
            return function(*args, **options)

        return call

    def setup(self, trainer, pl_module, stage) -> None:
        FaissIndex.build = self.counted("builds", FaissIndex.build)
        solver = pl_module.solver

        def watched(z, t, t_next, posterior_mean):
            self.report["noise"].append(float(z.double().sum()))
            if pl_module.training:
                self.report["levels"].append(t.flatten().tolist())
            return solver(z, t, t_next, posterior_mean)

        pl_module.solver = watched

    def on_train_start(self, trainer, pl_module) -> None:
        dist.broadcast = self.counted("broadcasts", dist.broadcast)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.report["batches"].append(batch[0].flatten(1).sum(1).tolist())

    def on_train_end(self, trainer, pl_module) -> None:
        weights = torch.cat([p.detach().double().flatten() for p in pl_module.parameters()])
        self.report |= {"world_size": trainer.world_size, "images_seen": pl_module.images_seen}
        self.report["weights"] = [
            float(part.sum()) for part in (weights, weights.square(), weights[::7])
        ]
        self.report |= {
            name: float(trainer.callback_metrics[name]) for name in ("fd_pixels", "val/loss")
        }
        Path(self.folder, f"rank_{trainer.global_rank}.json").write_text(json.dumps(self.report))


class FailingRank(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise RuntimeError("one rank fails")


def main(rank, world_size, folder, how):
    """Give SIGTERM to the rank `how`, and write the signal that ends the run after the batch."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
    )
    strategy = SimpleNamespace(launcher=None)
    trainer = SimpleNamespace(
        received_sigterm=rank == how, strategy=strategy, global_step=0, is_global_zero=rank == 0
    )
    interruption = Interruption()
    interruption.on_train_start(trainer, None)
    trainer.global_step = 1
    interruption.on_train_batch_end(trainer, None, None, None, 0)
    (folder / f"{rank}.txt").write_text(str(signal.Signals(interruption.stops).name))
    dist.destroy_process_group()
