import json
from pathlib import Path

import pytorch_lightning as pl
import torch

from lit_knn.index import FaissIndex


class DDPProbe(pl.Callback):
    """Writes the weights, data, noise, built index and broadcasts in training of each rank to rank_<r>.json."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.batches: list[list[float]] = []
        self.noise: list[float] = []
        self.builds = 0
        self.broadcasts = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        build = FaissIndex.build

        def counted(index, *args):
            self.builds += 1
            build(index, *args)

        FaissIndex.build = counted
        solver = pl_module.solver

        def watched(z, t, t_next, posterior_mean):
            self.noise.append(float(z.double().sum()))
            return solver(z, t, t_next, posterior_mean)

        pl_module.solver = watched

    def on_train_start(self, trainer, pl_module) -> None:
        broadcast = torch.distributed.broadcast

        def counted(*args, **options):
            self.broadcasts += 1
            return broadcast(*args, **options)

        torch.distributed.broadcast = counted

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.batches.append(batch[0].flatten(1).sum(1).tolist())

    def on_train_end(self, trainer, pl_module) -> None:
        weights = torch.cat([p.detach().double().flatten() for p in pl_module.parameters()])
        report = {
            "world_size": trainer.world_size,
            "weights": [float(weights.sum()), float(weights.square().sum()), float(weights[::7].sum())],
            "batches": self.batches,
            "noise": self.noise,
            "builds": self.builds,
            "broadcasts": self.broadcasts,
            "images_seen": pl_module.images_seen,
            "fd_pixels": float(trainer.callback_metrics["fd_pixels"]),
        }
        Path(self.folder, f"rank_{trainer.global_rank}.json").write_text(json.dumps(report))


class FailingRank(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise RuntimeError("one rank fails")
