"""The folder of a training run: the names of its files, its configuration, and its last checkpoint."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_knn.common.errors import InputError

CONFIG_NAME = "config.yaml"
EARLIER = re.compile(r"config_(\d+)\.yaml")


def config_of_run(run: str | Path, name: str = CONFIG_NAME) -> dict[str, Any]:
    """Read config.yaml in a run's folder; raise InputError if it is missing, unreadable or not from a training run."""
    import yaml  # What needs no configuration needs no YAML either.

    path = Path(run) / name
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the folder of a training run, as runs/x/knn_0")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or not {"model", "data", "trainer"} <= config.keys():
        raise InputError(f"{path} is not the configuration of a training run")
    return config


def keep_earlier_config(run: str | Path) -> Path | None:
    """Rename config.yaml of an earlier part of a run to `config_N.yaml`; return the new path, if any.

    N counts from 0. It is above the numbers that are there, so that no file is replaced.
    """
    path = Path(run) / CONFIG_NAME
    if not path.is_file():
        return None
    latest = next((int(earlier.stem.removeprefix("config_")) for earlier in earlier_configs(run)), -1)
    return path.rename(path.with_name(f"config_{latest + 1}.yaml"))


def earlier_configs(run: str | Path) -> list[Path]:
    """List `config_N.yaml` of the earlier parts of a run that went on in its folder, the latest first."""
    found = {int(match[1]): path for path in Path(run).glob("config_*.yaml") if (match := EARLIER.fullmatch(path.name))}
    return [found[number] for number in sorted(found, reverse=True)]


def resumed_from(run: str | Path) -> str | None:
    """Return the checkpoint in another folder that a run was resumed from, or None.

    Raises:
        InputError: a configuration is missing, unreadable or not from a training run.
    """
    for path in (Path(run) / CONFIG_NAME, *earlier_configs(run)):
        start = config_of_run(run, path.name).get("ckpt_path")
        if start is None or not is_in(start, run):
            return start
    return None


def is_in(checkpoint: str | Path, run: str | Path) -> bool:
    """Tell whether a checkpoint is one of a run's own, in `RUN/checkpoints`."""
    return Path(checkpoint).parent.parent.resolve() == Path(run).resolve()


def same_model_and_estimator(run: str | Path, model: Mapping[str, Any]) -> bool:
    """Tell whether a run trained this class of model with this estimator, as far as its config.yaml tells.

    Args:
        run: the folder of the run.
        model: class path and arguments of the model.
    """
    try:
        trained = config_of_run(run)["model"]
        return trained["class_path"] == model["class_path"] and _estimator(trained) == _estimator(model)
    except (InputError, KeyError, TypeError):
        return True


def _estimator(model: Mapping[str, Any]) -> Any:
    return (model.get("init_args") or {}).get("estimator")
