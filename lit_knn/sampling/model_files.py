"""Reads and writes files of trained models as plain values and tensors. No code of a file runs."""

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_knn.common.checkpoint_file import (
    CHECKPOINTS,
    MODEL_KEY,
    last_checkpoint,
    read_checkpoint_file,
)
from lit_knn.common.errors import InputError, first_line, prefixed
from lit_knn.common.files import written_whole
from lit_knn.nets.published.configs import architecture_from_config
from lit_knn.nets.published.edm_pickle import read_edm_pickle
from lit_knn.sampling import DiffusionModel, GenerativeModel
from lit_knn.sampling.schedules import NoiseGrid

WEIGHTS_NAME = "model.safetensors"
FORMAT, VERSION = "lit_knn.generative_model", "1"
# What a file holds: a model's description, as `GenerativeModel.description` returns it, and the
# weights of its raw network.
FileContent = tuple[dict[str, Any], dict[str, Tensor]]


def find_file(path: str | os.PathLike[str]) -> Path:
    """Return the file with the weights: `path` itself, or the file that represents the folder `path`."""
    path = Path(path).expanduser()
    if not path.is_dir():
        return path
    exported = path / WEIGHTS_NAME
    # A run may go on after it was exported into its own folder.
    if exported.is_file() and not (path / CHECKPOINTS).is_dir():
        return exported
    return last_checkpoint(path)


def read_model_file(file: Path) -> FileContent:
    """Read a file of any kind that `lit_knn.load` takes: the description and the weights."""
    readers = {".ckpt": _read_checkpoint, ".safetensors": read_exported, ".pkl": _read_published}
    if file.suffix not in readers:
        rule = f"a network file must be one of {', '.join(readers)}"
        if not file.exists():
            rule = f"no such file or folder of a run; {rule}"
        raise InputError(f"{file}: {rule}")

    if not file.exists():
        raise InputError(f"{file}: no such file")
    if not file.is_file():  # Opening a pipe would wait for somebody to write to it.
        raise InputError(f"{file}: a pipe, a socket or a device")

    return readers[file.suffix](file)


def _read_checkpoint(file: Path) -> FileContent:
    """Read the averaged weights of a checkpoint.

    The averaging callback stores them in `state_dict`, and the current ones elsewhere.
    """
    checkpoint = read_checkpoint_file(file)
    state_dict = checkpoint.get("state_dict")
    if not isinstance(state_dict, dict) or not all(isinstance(name, str) for name in state_dict):
        raise InputError(f"{file}: no checkpoint of a training: it has no state_dict")

    description = checkpoint.get(MODEL_KEY)
    if not isinstance(description, dict) or not isinstance(description.get("prefix"), str):
        raise InputError(
            f"{file}: no checkpoint of lit_knn: {MODEL_KEY} must be a dict with a prefix"
        )

    prefix = description["prefix"]
    weights = {}
    for name, value in state_dict.items():
        if name.startswith(prefix):
            weights[name.removeprefix(prefix)] = value
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise InputError(f"{file}: no weights named {prefix[:80]}*")

    return description, weights


def prefix_of(module: nn.Module, net: nn.Module) -> str:
    """Return the prefix of the names of `net`'s weights in the state of `module`, which contains `net`."""
    return next(name for name, part in module.named_modules() if part is net) + "."


def read_exported(file: Path) -> FileContent:
    """Read a file of `write_exported`: the description and the weights.

    Raises InputError if the file is of another kind.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{file} is not a safetensors file, or a damaged one") from error

    if metadata.get("format") != FORMAT:
        raise InputError(f"{file} is not a model that lit_knn exported or converted")
    version = metadata.get("format_version")
    if version != VERSION:
        raise InputError(
            f"{file} has format version {version!r:.40}; this version of lit_knn reads {VERSION}"
        )

    try:
        description = json.loads(metadata.get("model", ""))
    except (ValueError, RecursionError):
        description = None
    if not isinstance(description, dict):
        raise InputError(f"{file} holds no description of its model")

    return description, weights


def _read_published(file: Path) -> FileContent:
    """Read a published network, and describe it as a model that draws images with EDM's sampler.

    The sampler stays within the noise levels of the network.
    """
    config, weights = read_edm_pickle(file)
    with prefixed(os.fspath(file)):
        architecture = architecture_from_config(config)

    grid = NoiseGrid()
    options = {
        "sigma_data": config["sigma_data"],
        "sigma_min": max(grid.sigma_min, config["sigma_min"]),
        "sigma_max": min(grid.sigma_max, config["sigma_max"]),
        "rho": grid.rho,
        "num_steps": 18,
        "sampling_class": None,
        "drops_labels": bool(config.get("label_dropout", 0)),
    }
    side = config["img_resolution"]
    description = {
        "kind": DiffusionModel.kind,
        "image_shape": [config["img_channels"], side, side],
        "options": options,
        "architecture": architecture,
    }
    raw_weights = {name.removeprefix("model."): value for name, value in weights.items()}
    return description, raw_weights


def write_exported(path: Path, model: GenerativeModel) -> None:
    """Write a safetensors file with the weights; its metadata describe the model completely.

    The file appears under its name only when it is complete.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weights = {}
    for name, value in model.net.state_dict().items():
        # Two names may share a tensor, which the format does not allow.
        weights[name] = value.detach().cpu().clone().contiguous()

    metadata = {
        "format": FORMAT,
        "format_version": VERSION,
        "model": json.dumps(model.description()),
    }

    try:
        with written_whole(path) as partial:
            save_file(weights, partial, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {first_line(error)}") from error
