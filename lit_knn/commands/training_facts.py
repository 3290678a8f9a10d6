"""Facts of a training for the card and the configuration of its exported model, from a checkpoint and its run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_knn.commands.report_runs import read_average, read_distances
from lit_knn.common.checkpoint_file import RUN_KEY, TIME_KEY
from lit_knn.runs.checkpoints import AVERAGE_KEY
from lit_knn.runs.folder import CONFIG_NAME, RunFolder, run_of
from lit_knn.runs.names import PARTS_OF_A_RUN, Options, option_of
from lit_knn.runs.record import RECORD_NAME, read_record

# Of the trainer's options, these change the weights.
OF_THE_TRAINER = (
    "max_steps",
    "precision",
    "devices",
    "num_nodes",
    "accumulate_grad_batches",
    "gradient_clip_val",
)
# Facts of the data by their names in a checkpoint, with their names in the card.
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
    """Facts of a training for its model card, as plain values; an unknown fact is 0 or empty."""

    steps: int
    images_seen: int
    hours: float  # duration of the training steps, without validations
    hardware: list[str]
    # number and hash of the images; if the run has a record, also class, shape and fingerprint of the data
    data: dict[str, object]
    metrics: Metrics  # the last measurements until these weights
    versions: dict[str, str]
    # the parts of config.yaml that make the weights, without paths of the machine
    config: Options
    autoencoder: str = ""  # the class that decodes the samples, if they are latents


def facts_of_training(checkpoint: Mapping[str, Any], file: Path) -> Facts:
    """Return the facts of the training of a checkpoint, from its content and from the run's folder if that is there.

    Args:
        checkpoint: the content of the checkpoint.
        file: path of the checkpoint, in a subfolder of the run's folder.
    """
    run = run_of(file)
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
    time = checkpoint.get(TIME_KEY) or {}
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
    """Return the last measurement of each metric that has no more images seen than these weights."""
    run = run_of(file)
    average = checkpoint.get(AVERAGE_KEY)
    # The tables of a run measure the average of its training. One from `lit-knn average` has tables beside it.
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
    """Return the settings of a run that change its weights; an empty dictionary if the run's folder is not there."""
    if not (run / CONFIG_NAME).is_file():
        return {}

    config = RunFolder(run).config()
    settings = without_paths({name: config[name] for name in PARTS_OF_A_RUN if name in config})
    trainer = settings.get("trainer")
    if trainer:
        settings["trainer"] = {name: trainer[name] for name in OF_THE_TRAINER if name in trainer}
    return settings


def _autoencoder(identity: Mapping[str, str], settings: Options) -> str:
    """Return the class of the data's autoencoder, as a class path if that is known; "" without an autoencoder.

    Args:
        identity: the identity of the run in the checkpoint, which has the name of the class.
        settings: the settings of the run, which may have its class path.
    """
    if "autoencoder" not in identity:
        return ""

    coder = option_of(settings.get("data"), "autoencoder")
    if isinstance(coder, dict) and "class_path" in coder:
        return str(coder["class_path"])

    return str(json.loads(identity["autoencoder"])["autoencoder"])


def without_paths(value: Any) -> Any:
    """Return options with only the last part of each absolute path, so that the card tells nothing of the machine."""
    if isinstance(value, dict):
        return {name: without_paths(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_paths(part) for part in value]

    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return value
