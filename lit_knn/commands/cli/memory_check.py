"""Refuses a run whose data and estimators do not fit into the memory."""

import pytorch_lightning as pl

from lit_knn.commands.plan import GB, Plan, data_parts, device_memory, estimators_of
from lit_knn.common.errors import InputError
from lit_knn.common.memory import machine_bytes
from lit_knn.data import ReferenceDataModule


def check_fits(trainer: pl.Trainer, model: pl.LightningModule, datamodule: pl.LightningDataModule | None) -> None:
    """Refuse a run whose images and arrays of estimators exceed the memory. Only sizes that are known count."""
    if not isinstance(datamodule, ReferenceDataModule):
        return
    device = trainer.strategy.root_device
    try:
        stored = datamodule.stored()
        if stored is None:
            return
        held, loading = data_parts(trainer, model, datamodule, stored, device)
    except InputError:
        return  # Loading or binding reports what cannot be read or does not fit the set.
    parts = [part for part in held if not part.estimated]
    host = [part for part in loading if not part.temporary]
    ranks = trainer.world_size // trainer.num_nodes
    plan = Plan(device, parts, host, device_memory(device), machine_bytes(), ranks)
    for counted, (where, needed, there) in zip((parts, host), plan.needed, strict=False):
        if there is not None and needed > there:
            told = ", ".join(f"{part.name} {part.bytes / GB:.4g} GB" for part in counted if part.bytes)
            names = ", ".join(dict.fromkeys(type(e).__name__ for e in estimators_of(trainer, model)))
            raise InputError(
                f"{names or type(datamodule).__name__}: the set does not fit: {told} for each of {ranks} rank(s), more "
                f"than the {there / GB:.4g} GB of {where}; `lit-knn plan` shows what a run needs"
            )
