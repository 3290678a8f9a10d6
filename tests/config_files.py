"""Reads run configs as plain dictionaries with their parts filled in; the application parses nothing."""

import importlib
import inspect
from pathlib import Path

import yaml

CONFIGS = Path(__file__).parent.parent / "configs"
# The schedule runs in tests/test_learning_rate.py.
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


# Options that change where a run reads, writes and computes, but not its results.
PLACES = {"accelerator", "cache_dir", "devices", "dirpath", "download", "filename", "folder", "logger", "path", "root"}
PLACES |= {"log_every_n_steps", "num_sanity_val_steps", "start", "weights"}
# The part of a run that each folder of parts fills.
OWNERS = {"data": "data", "models": "model.net", "estimators": "model.estimator", "trainer": "trainer"}


def all_values(path):
    """Return every value of a config that its results depend on, by its option; defaults of the classes included.

    A class gives its name. Callbacks are found by their class: `trainer.callbacks.SampleGrid.num_samples`. An estimator
    that has a name of its own, as in Figure 3, is one value: `KNN(k=256, n=64, include_source=False)`.
    """
    config = resolved(path)
    return dict(_values(OWNERS.get(Path(path).parent.name, ""), config, None))


def _values(key, value, owner):
    if isinstance(value, str) and value.startswith(("lit_knn.", "callbacks.", "pytorch_lightning.")):
        value = {"class_path": value}
    if value is None and owner is not None and owner.__module__.startswith("lit_knn.estimators"):
        # Null of an estimator is the default of its class.
        value = getattr(getattr(owner, key.rpartition(".")[2], None), "default", None)
    if isinstance(value, dict) and "class_path" in value:
        kind = _imported(value["class_path"])
        yield key, kind.__name__
        if inspect.isclass(kind):
            value = {**_defaults(kind), **value.get("init_args", {})}
            yield from _children(key, value, kind)
    elif isinstance(value, dict):
        yield from _children(key, value, None)
    else:
        yield key, list(value) if isinstance(value, tuple) else value


def _children(key, options, owner):
    for name, value in options.items():
        child = f"{key}.{name}".strip(".+")
        if name in PLACES:
            continue
        if key.endswith(".estimators"):
            kind, *own = _values("", value, None)
            yield child, f"{kind[1]}({', '.join(f'{option}={given}' for option, given in own)})"
            continue
        if name in ("callbacks", "callbacks+"):
            for callback in value:
                yield from _values(f"{child}.{callback['class_path'].rpartition('.')[2]}", callback, None)
        else:
            yield from _values(child, value, owner)


def _imported(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _defaults(kind):
    if not kind.__module__.startswith(("lit_knn.", "callbacks.")):
        return {}
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
