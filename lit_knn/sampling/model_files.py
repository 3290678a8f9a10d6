"""Reads and writes files of trained models as plain values and tensors. No code of a file runs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from torch import Tensor, nn

from lit_knn.common.checkpoint_file import (
    CHECKPOINTS,
    MODEL_KEY,
    last_checkpoint,
    read_checkpoint_file,
)
from lit_knn.common.errors import InputError, first_line, prefixed, reading
from lit_knn.common.files import written_whole
from lit_knn.common.hub import download, hub_model
from lit_knn.nets.published.configs import architecture_from_config
from lit_knn.nets.published.edm_pickle import read_edm_pickle
from lit_knn.sampling import DiffusionModel, GenerativeModel
from lit_knn.sampling.described_parts import ModelDescription
from lit_knn.sampling.noise_grid import NoiseGrid

# The names that the Hugging Face Hub expects
WEIGHTS_NAME, CONFIG_NAME = "model.safetensors", "config.json"
FORMAT, VERSION = "lit_knn.generative_model", "1"
# What a file holds: a model's description, and the weights of its raw network.
FileContent = tuple[ModelDescription, dict[str, Tensor]]


def find_file(path: str | os.PathLike[str]) -> Path:
    """Return the file with the weights: `path` itself, or the one of the folder or of the model on the Hub."""
    on_hub = hub_model(path)
    if on_hub is not None:
        return download(on_hub, WEIGHTS_NAME)

    path = Path(path).expanduser()
    if not path.is_dir():
        return path
    exported = path / WEIGHTS_NAME
    # In the folder of a run an export may be older than the checkpoints, because the run may have gone on.
    if exported.is_file() and not (path / CHECKPOINTS).is_dir():
        return exported
    return last_checkpoint(path)


def read_model_file(file: Path) -> FileContent:
    """Read a file of any kind that `lit_knn.load` takes: the description and the weights."""
    readers: dict[str, Callable[[Path], FileContent]] = {
        ".ckpt": _read_checkpoint,
        ".safetensors": read_exported,
        ".pkl": _read_published,
    }
    if file.suffix not in readers:
        rule = f"a network file must be one of {', '.join(readers)}"
        if not file.exists():
            rule = f"no such file or folder of a run; {rule}"
        raise InputError(f"{file}: {rule}")

    if not file.is_file():  # Opening a pipe would wait for somebody to write to it.
        raise InputError(f"{file}: no such file")
    return readers[file.suffix](file)


def _read_checkpoint(file: Path) -> FileContent:
    """Read the averaged weights of a checkpoint.

    The averaging callback stores them in `state_dict`, and the current ones elsewhere.
    """
    checkpoint = read_checkpoint_file(file)
    description = checkpoint.get(MODEL_KEY)
    if description is None:
        raise InputError(f"{file}: no checkpoint of lit_knn: it has no {MODEL_KEY}")

    with reading(file):
        prefix = description["prefix"]
        weights = {}
        for name, value in checkpoint["state_dict"].items():
            if name.startswith(prefix):
                weights[name.removeprefix(prefix)] = value
    return description, weights


def prefix_of(module: nn.Module, net: nn.Module) -> str:
    """Return the prefix of the names of `net`'s weights in the state of `module`, which contains `net`."""
    return next(name for name, part in module.named_modules() if part is net) + "."


def read_exported(file: Path) -> FileContent:
    """Read a file of `write_exported`: the description and the weights.

    Raises InputError if the file is of another kind.
    """
    from safetensors import safe_open

    with reading(file, " as a safetensors file"), safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
        weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    if metadata.get("format") != FORMAT:
        raise InputError(f"{file} is not a model that lit_knn exported or converted")
    version = metadata.get("format_version")
    if version != VERSION:
        reads = f"this version of lit_knn reads {VERSION}"
        raise InputError(f"{file} has format version {version!r:.40}; {reads}")

    with reading(file):
        description = cast(ModelDescription, json.loads(metadata["model"]))
    return description, weights


def _read_published(file: Path) -> FileContent:
    """Read a published network, and describe it as a model that draws images with EDM's sampler.

    The sampler stays within the noise levels of the network.
    """
    config, weights = read_edm_pickle(file)
    with prefixed(os.fspath(file)):
        architecture = architecture_from_config(config)

    grid = NoiseGrid()
    options: dict[str, object] = {
        "sigma_data": config["sigma_data"],
        "sigma_min": max(grid.sigma_min, config["sigma_min"]),
        "sigma_max": min(grid.sigma_max, config["sigma_max"]),
        "rho": grid.rho,
        "num_steps": 18,  # the default of `DiffusionModel`
        "sampling_class": None,
        "drops_labels": bool(config.get("label_dropout", 0)),
    }
    side = config["img_resolution"]
    description: ModelDescription = {
        "kind": DiffusionModel.kind,
        "image_shape": [config["img_channels"], side, side],
        "options": options,
        "architecture": architecture,
    }
    # The file has the names of the preconditioned network, in which the raw network is `model`.
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
        if not isinstance(value, Tensor):
            problem = f"the net's state {name} is {type(value).__name__}"
            raise InputError(f"{problem}, and safetensors files hold tensors alone")
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
