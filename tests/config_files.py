"""Reads run configs as plain dictionaries with their parts filled in; the application parses nothing."""

from pathlib import Path

import yaml

from lit_knn.commands.cli.from_data import numbers_of_data
from tests import ROOT

CONFIGS = ROOT / "configs"
PARTS = ("data", "models", "estimators", "trainer", "evaluate", "schedules")
RUNS = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in PARTS)
# Options of networks that are null in a config; these are of RGB images of 32x32 without classes.
OF_DATA = numbers_of_data((3, 32, 32), 0)


def resolved(path):
    """Read a config file; replace each string that names another config by its contents.

    Options that a run takes from its data are those of RGB images of 32x32.
    """
    return _with_parts(yaml.safe_load(Path(path).read_text()), Path(path).parent)


def _with_parts(value, folder):
    if isinstance(value, str) and value.endswith(".yaml"):
        return resolved(folder / value)
    if isinstance(value, dict):
        parts = {name: _with_parts(part, folder) for name, part in value.items()}
        nulls = [name for name in OF_DATA if name in parts and parts[name] is None]
        return {**parts, **{name: OF_DATA[name] for name in nulls}}
    return [_with_parts(part, folder) for part in value] if isinstance(value, list) else value
