"""One process of a distributed training, which alone may get a signal; it writes what it agrees on with the others."""

import signal
from types import SimpleNamespace

import torch.distributed as dist

from lit_knn.runs.interruption import Interruption


def main(rank, world_size, folder, how):
    """Give the signal to the rank `how`, and write the signal that ends the run after the batch."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    trainer = SimpleNamespace(
        world_size=world_size,
        received_sigterm=rank == how,
        strategy=SimpleNamespace(launcher=None),
        global_step=0,
    )
    interruption = Interruption()
    interruption.on_train_start(trainer, None)
    trainer.global_step = 1
    interruption.on_train_batch_end(trainer, SimpleNamespace(finish_batch=lambda: None))
    (folder / f"{rank}.txt").write_text(str(signal.Signals(interruption.stops).name))
    dist.destroy_process_group()
