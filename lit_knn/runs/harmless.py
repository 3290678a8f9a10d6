"""Decides which options change what a run trains, and which are harmless."""

import pkgutil
from collections.abc import Iterable, Mapping

from lit_knn.runs.names import Options

# These options, and the options of the objects that they name, do not change the steps of a training, so a run can go
# on with other values. They set when a run measures, logs and saves, what it shows, how long it trains and on which
# devices. A module lists its own harmless options in `untrained_options`.
HARMLESS = (
    # where it starts, what it saves and logs
    "ckpt_path",
    "weights_only",
    "last_checkpoint",
    "sample_writer",
    "trainer.logger",
    "trainer.default_root_dir",
    "trainer.enable_checkpointing",
    "trainer.enable_autolog_hparams",
    "trainer.log_every_n_steps",
    # what it shows and watches
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.profiler",
    "trainer.detect_anomaly",
    # when and what it measures
    "trainer.val_check_interval",
    "trainer.check_val_every_n_epoch",
    "trainer.num_sanity_val_steps",
    "trainer.limit_val_batches",
    "trainer.limit_test_batches",
    "trainer.limit_predict_batches",
    "data.val_images",
    "data.predict_samples",
    # how long it trains
    "trainer.max_time",
    "trainer.max_steps",
    "trainer.min_steps",
    "trainer.max_epochs",
    "trainer.min_epochs",
    # on which devices, and how the data come there
    "trainer.accelerator",
    "trainer.strategy",
    "data.num_workers",
    "data.pin_memory",
    "data.cache_dir",
    "data.index.cache_dir",
)
# These callbacks of Lightning only watch a training, or end it. So do all callbacks of lit_knn but the one below, whose
# averages need the whole training.
WATCHERS = (
    "DeviceStatsMonitor",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "RichModelSummary",
    "RichProgressBar",
    "ThroughputMonitor",
    "Timer",
    "TQDMProgressBar",
)
OF_THE_WHOLE_TRAINING = "PowerAverages"


def harmful(different: Iterable[str], model: Options) -> list[str]:
    """Return the options among `different` that change what a run trains.

    Args:
        different: names of options on the command line, such as the keys of `lit_knn.runs.changes.changes`.
        model: the class and the options of the run's module. The class lists its harmless options.
    """
    harmless = list(HARMLESS)
    if "class_path" in model:
        kind = pkgutil.resolve_name(model["class_path"])
        for name in getattr(kind, "untrained_options", ()):
            harmless.append(f"model.{name}")

    # With a dot at its end, `trainer.logger` is a prefix of `trainer.logger.name`, but of no other option whose name
    # begins with the same letters.
    prefixes = tuple(f"{name}." for name in harmless)
    return [name for name in different if not f"{name}.".startswith(prefixes)]


def watches(callback: object) -> bool:
    """Return whether a callback leaves the steps of a training as they are.

    Args:
        callback: the class path of the callback, or its configuration with `class_path`.
    """
    path = callback
    if isinstance(callback, Mapping):
        path = callback.get("class_path")

    package, _, name = str(path).rpartition(".")
    if package.startswith("lit_knn.callbacks"):
        return name != OF_THE_WHOLE_TRAINING
    return package.startswith("pytorch_lightning.callbacks") and name in WATCHERS
