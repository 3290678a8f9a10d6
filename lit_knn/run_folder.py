"""The folder of a training run: the names of its files, its configuration, and its last checkpoint."""

import re
from pathlib import Path
from typing import Any

from lit_knn.errors import InputError

CONFIG_NAME = "config.yaml"
CHECKPOINTS = "checkpoints"
LAST_NAME = "last.ckpt"
# `CheckpointByImages` gives its files these names. Lightning adds -v1 if a name is taken.
KEPT_NAME = re.compile(r"images_seen=(\d+)(-v\d+)?\.ckpt")


def config_of_run(run: str | Path) -> dict[str, Any]:
    """Read config.yaml in a run's folder; raise InputError if it is missing, unreadable or not from a training run."""
    import yaml  # What needs no configuration needs no YAML either.

    path = Path(run) / CONFIG_NAME
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the folder of a training run, as runs/x/version_0")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or not {"model", "data", "trainer"} <= config.keys():
        raise InputError(f"{path} is not the configuration of a training run")
    return config


def kept_in(folder: Path) -> dict[int, Path]:
    """Find the checkpoints in a folder that `CheckpointByImages` kept, by the number of images seen."""
    matches = ((KEPT_NAME.fullmatch(path.name), path) for path in sorted(folder.glob("*.ckpt")))
    return {int(match[1]): path for match, path in matches if match}


def last_checkpoint(run: str | Path) -> Path:
    """Find the checkpoint that stands for a run: `checkpoints/last.ckpt`, or else the kept one of the most images.

    Raises:
        InputError: the folder has neither.
    """
    folder = Path(run) / CHECKPOINTS
    if (folder / LAST_NAME).is_file():
        return folder / LAST_NAME
    kept = kept_in(folder)
    if not kept:
        raise InputError(f"{run} has neither {CHECKPOINTS}/{LAST_NAME} nor a kept checkpoint (images_seen=N.ckpt)")
    return kept[max(kept)]
