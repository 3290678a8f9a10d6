"""Trainings of a few steps."""

import pytorch_lightning as pl

TRAINER = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}


def train(model, data, steps, **trainer_args):
    trainer = pl.Trainer(
        max_steps=steps, **{**TRAINER, "enable_checkpointing": False, **trainer_args}
    )
    trainer.fit(model, data)
    return trainer
