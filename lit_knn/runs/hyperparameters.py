"""The options of a run as one flat dictionary, with which loggers compare runs."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytorch_lightning as pl

from lit_knn.common.settings import RecordsArguments

Flat = dict[str, str | int | float | bool]

# These tell where a run computes and reads, not what.
PLACES = frozenset({"cache_dir", "num_workers", "pin_memory"})


def of_options(options: Mapping[str, Any]) -> Flat:
    """Flatten the parsed options of a command: `estimator`, `estimator.k`, `net.channels`, `lr`, `data.batch_size`.

    A class is told by its name, and a list by its text. Options of null are left out: they stand for a default.
    """
    model, data = options["model"], options.get("data")
    trainer, of_model = options.get("trainer", {}), model.get("init_args", {})
    told = {
        "model": model["class_path"],
        **of_model,
        "data": data,
        "optimizer": options.get("optimizer"),
        "lr_scheduler": options.get("lr_scheduler"),
        **{name: trainer.get(name) for name in ("max_steps", "precision", "accumulate_grad_batches")},
    }
    return _flat(told)


def of_objects(pl_module: pl.LightningModule, datamodule: Any) -> Flat:
    """Flatten what module and data know of their arguments, for runs that no command line started."""
    told: dict[str, Any] = {"model": type(pl_module).__name__, **pl_module.hparams}
    estimator = getattr(pl_module, "estimator", None)
    if estimator is not None:
        told["estimator"] = getattr(estimator, "estimator", estimator)  # `by_class` wraps an estimator.
    if datamodule is not None:
        plain = {name: v for name, v in vars(datamodule).items() if isinstance(v, (str, int, float))}
        own = {name: v for name, v in plain.items() if not name.startswith(("_", "prepare_data", "allow_"))}
        told["data"] = {"class_path": type(datamodule).__name__, "init_args": own}
    return _flat(told)


def _flat(told: Mapping[str, Any]) -> Flat:
    flat = {name: value for key, given in told.items() for name, value in _told(key, given)}
    flat.pop("data.seed", None)  # It is the seed of the model, too.
    return flat


def _told(key: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, RecordsArguments):
        value = {"class_path": type(value).__name__, "init_args": value.settings()}
    if isinstance(value, Mapping):
        if "class_path" in value:
            yield key, _short(value["class_path"])
            value = value.get("init_args") or {}
        for name, part in value.items():
            if name not in PLACES:
                yield from _told(f"{key}.{name}", part)
    elif isinstance(value, (bool, int, float)):
        yield key, value
    elif isinstance(value, (list, tuple)):
        yield key, str([_short(part) if isinstance(part, str) else part for part in value])
    elif value is not None:
        yield key, _short(value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__))


def _short(path: str) -> str:
    """Shorten the path of a class or function to its name."""
    own = path.startswith(("lit_knn.", "torch.", "pytorch_lightning."))
    return path.rpartition(".")[2] if own else path
