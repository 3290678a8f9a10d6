"""The facts of a training that its exported model carries: collected from a checkpoint and its run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_knn.commands.report_runs import read_average, read_distances
from lit_knn.common.checkpoint_file import RUN_KEY
from lit_knn.runs.checkpoints import AVERAGE_KEY
from lit_knn.runs.folder import CONFIG_NAME, RunFolder
from lit_knn.runs.names import Options
from lit_knn.runs.record import RECORD_NAME, read_record

# The other parts of a configuration, and the trainer's other options, do not change the weights.
PARTS = ("seed_everything", "model", "data", "trainer")
OF_THE_TRAINER = (
    "max_steps",
    "precision",
    "devices",
    "num_nodes",
    "accumulate_grad_batches",
    "gradient_clip_val",
)
# These facts of the data are in a checkpoint; the card gives them these names.
OF_THE_DATA = {
    "images": "images",
    "data": "hash",
    "shards": "hash of the shards",
    "labels": "hash of the labels",
}

Metrics = dict[str, tuple[int, float]]
"""The last (images seen, value) of each metric."""


@dataclass(frozen=True)
class Facts:
    """Facts of a training for its model card, as plain values; an unknown one is empty."""

    steps: int
    images_seen: int
    hours: float  # of the training steps, without validations
    hardware: list[str]
    # number and hash of the images, and with a record class, shape and fingerprint of the data
    data: dict[str, object]
    metrics: Metrics  # measured up to these weights
    versions: dict[str, str]
    # the parts of config.yaml that make the weights, without paths of the machine
    config: Options
    autoencoder: str = ""  # the class that decodes the samples, if they are latents


def collect(checkpoint: Mapping[str, Any], file: Path) -> Facts:
    """Collect the available facts of a checkpoint from its content, and from the run folder that holds its file.

    Args:
        checkpoint: the content of the file.
        file: lies in a folder of the run's folder. Without a run the card knows less.
    """
    run = file.resolve().parent.parent
    identity = checkpoint.get(RUN_KEY) or {}
    data: dict[str, object] = {}
    versions: dict[str, str] = {}
    if (run / RECORD_NAME).is_file():
        record = read_record(run)
        data |= record.data
        versions["python"] = record.python
        versions |= record.packages
        versions["revision"] = record.revision or "-"
    for key, name in OF_THE_DATA.items():
        if key in identity:
            data[name] = identity[key]

    config = _configuration(run)
    time = checkpoint.get("training_time") or {}
    return Facts(
        steps=int(checkpoint.get("global_step", 0)),
        images_seen=int(checkpoint.get("images_seen", 0)),
        hours=float(time.get("seconds", 0)) / 3600,
        hardware=list(time.get("hardware", ())),
        data=data,
        metrics=_metrics(checkpoint, file),
        versions=versions,
        config=config,
        autoencoder=_autoencoder(identity, config),
    )


def _metrics(checkpoint: Mapping[str, Any], file: Path) -> Metrics:
    """Return the last measurements up to these weights."""
    run = file.resolve().parent.parent
    average = checkpoint.get(AVERAGE_KEY)
    # The tables of a run are measured with its usual average.
    if average:
        distances = read_average(file.parent, average["length"])
    elif (run / RECORD_NAME).is_file():
        distances = read_distances(RunFolder(run).parts())
    else:
        distances = read_distances([run])

    seen = int(checkpoint.get("images_seen", 0))
    metrics = {}
    for name, points in distances.items():
        earlier = [point for point in points if point[0] <= seen]
        if earlier:
            metrics[name] = earlier[-1]
    return metrics


def _configuration(run: Path) -> Options:
    """Return the settings of a run that make its weights; an empty dictionary without a run."""
    if not (run / CONFIG_NAME).is_file():
        return {}

    config = RunFolder(run).config()
    settings = without_paths({name: config[name] for name in PARTS if name in config})
    trainer = settings.get("trainer")
    if trainer:
        settings["trainer"] = {name: trainer[name] for name in OF_THE_TRAINER if name in trainer}
    return settings


def _autoencoder(run: Mapping[str, str], settings: Options) -> str:
    """Return the class of the autoencoder of a training, with its path if it is known; "" for none."""
    if "autoencoder" not in run:
        return ""

    data = settings.get("data") or {}
    coder = (data.get("init_args") or {}).get("autoencoder")
    if isinstance(coder, dict) and "class_path" in coder:
        return str(coder["class_path"])

    return str(json.loads(run["autoencoder"])["autoencoder"])


def without_paths(value: Any) -> Any:
    """Replace each option that is an absolute path by its last part, so that the card does not describe the machine."""
    if isinstance(value, dict):
        return {name: without_paths(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_paths(part) for part in value]

    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return value
