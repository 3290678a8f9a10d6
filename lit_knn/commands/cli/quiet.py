"""Hides Lightning's messages that do not matter for a run of this program."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Starts of Lightning's warnings about things that this program does on purpose.
WARNINGS = (
    # Lightning calls PyTorch's own tree functions.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # A run may be resumed into another folder; our checkpoint callbacks keep no best score.
    "The dirpath has changed from",
    # A resumed run goes on in its folder. `LastCheckpoint` refuses to overwrite a longer run.
    "Checkpoint directory .* exists and is not empty",
    # The table of the earlier part has been renamed.
    "Experiment logs directory .* exists and is not empty",
    # A checkpoint holds the averaged weights as the model's; `validate` and `predict` use them.
    "You're using the WeightAveraging callback, but loading a checkpoint outside the 'fit' stage",
    # `validate` and `predict` need no callback that wrote the checkpoint.
    "Be aware that when using `ckpt_path`,",
    # The batches of `predict` are seeds.
    "Couldn't infer the batch indices fetched from your dataloader: `SeedBatches`",
)
# Advertisements for other products, and reports that nothing happened.
LINES = ("💡 Tip", "TPU available: False", "Found current_model_state in the checkpoint")
LOGGERS = ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.rank_zero")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress these warnings and lines."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    with warnings.catch_warnings():
        for beginning in WARNINGS:
            warnings.filterwarnings("ignore", message=beginning)
        for logger in loggers:
            logger.addFilter(_says_something)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LINES)
