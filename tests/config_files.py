"""Reads run configs as plain dictionaries with their parts filled in; the application parses nothing."""

from pathlib import Path

import yaml

from tests import ROOT

CONFIGS = ROOT / "configs"
PARTS = ("data", "models", "estimators", "trainer", "evaluate", "schedules")
RUNS = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in PARTS)


def resolved(path):
    """Read a config file; replace each string that names another config by its contents."""
    return _with_parts(yaml.safe_load(Path(path).read_text()), Path(path).parent)


def _with_parts(value, folder):
    if isinstance(value, str) and value.endswith(".yaml"):
        return resolved(folder / value)
    if isinstance(value, dict):
        return {name: _with_parts(part, folder) for name, part in value.items()}
    return [_with_parts(part, folder) for part in value] if isinstance(value, list) else value
