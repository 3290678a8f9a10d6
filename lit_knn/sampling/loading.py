"""Loads, writes and converts files of trained models, in plain PyTorch. No code of a file runs.

`lit-knn convert in.pkl out.safetensors` converts a published EDM pickle.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.common.checkpoint_file import (
    CHECKPOINTS,
    MODEL_KEY,
    last_checkpoint,
    read_checkpoint_file,
)
from lit_knn.common.errors import InputError, first_line, prefixed
from lit_knn.common.files import written_whole
from lit_knn.nets.architecture import build_network, load_weights
from lit_knn.nets.base import ImageNetwork, name_classes
from lit_knn.nets.flow import FlowDenoiser
from lit_knn.nets.precond import EDMPrecond
from lit_knn.nets.published.configs import architecture_from_config
from lit_knn.nets.published.edm_pickle import read_edm_pickle
from lit_knn.sampling import KINDS, DiffusionModel, GenerativeModel
from lit_knn.sampling.denoising_model import DenoisingModel
from lit_knn.sampling.schedules import NoiseGrid

WEIGHTS_NAME = "model.safetensors"
FORMAT, VERSION = "lit_knn.generative_model", "1"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Layers for augmentation labels, in the published networks and in `UNet`. They have no bias, so without labels they add
# nothing.
AUGMENTATION_WEIGHTS = ("map_augment.weight", "embedding.augmentation.weight")
# What a file holds: a model's description, as `GenerativeModel.description` returns it, and its raw network's weights.
Parts = tuple[dict[str, Any], dict[str, Tensor]]


# Models


def load(path: str | os.PathLike[str], net: nn.Module | None = None) -> GenerativeModel:
    """Load a trained model for sampling, in plain PyTorch. No code of a file is run.

    Args:
        path: the folder of a training run (its `checkpoints/last.ckpt`, or else the kept checkpoint of the most
            images); a `.ckpt`; a folder that `lit-knn export` wrote, or its `.safetensors`; a published EDM
            `.pkl`, or the `.safetensors` that was converted from it. A checkpoint gives its averaged weights.
        net: the raw network, if the file's network is not from `lit_knn.nets`; its weights are replaced.

    Returns:
        The model, on the CPU, in evaluation mode, without gradients; `sample(seeds)` draws images. Without `net`, its
        weights are float32.
    """
    file = find_file(path)
    parts = _read(file)
    with prefixed(os.fspath(file)):
        return build(*parts, net)


def load_network(
    path: str | os.PathLike[str], net: nn.Module | None = None, fp16: bool = False
) -> EDMPrecond | FlowDenoiser:
    """Load only the denoiser D(z, σ) of a diffusion or flow model.

    `path` and `net` are those of `load`. `fp16` makes the network compute in float16, except its embedding. EDM's own
    code does the same on GPUs for files with `use_fp16`. The weights stay in float32.

    Returns:
        `denoiser(z, sigma, class_label=None)`, on the CPU, in evaluation mode, without gradients.
    """
    model, denoiser = _denoising_model(path, net)
    denoiser.fp16, denoiser.drops_labels = fp16, model.drops_labels
    return denoiser.eval()


def load_network_to_tune(path: str | os.PathLike[str], net: nn.Module | None = None) -> EDMPrecond:
    """Load an EDM denoiser for more training, without the layer for augmentation labels.

    Training without augmentation leaves this layer out of all gradients, which distributed training would refuse.

    `net` is the architecture, for instance with another dropout; it gets the file's weights, and its frozen parameters
    stay frozen. None builds the architecture that the file stores.

    Returns:
        `denoiser(z, sigma, class_label=None)`, on the CPU, in training mode, with gradients.
    """
    frozen = (
        set()
        if net is None
        else {name for name, value in net.named_parameters() if not value.requires_grad}
    )
    model, denoiser = _denoising_model(path, net, augmented=False)
    if not isinstance(denoiser, EDMPrecond):
        raise InputError(
            f"{os.fspath(path)}: a {model.kind} model cannot be tuned: give a diffusion model"
        )
    for name, value in model.net.named_parameters():
        value.requires_grad_(name not in frozen)
    return denoiser.train()


def _denoising_model(
    path: str | os.PathLike[str], net: nn.Module | None, augmented: bool = True
) -> tuple[GenerativeModel, EDMPrecond | FlowDenoiser]:
    """Load a model and its denoiser; `augmented=False` omits the layer for augmentation labels."""
    file = find_file(path)
    description, weights = _read(file)
    if description.get("kind") == DiffusionModel.kind and isinstance(
        description.get("options"), dict
    ):
        # Only the sampler needs the process, and a file cannot name a user's own process.
        description["options"]["process"] = None
    if not augmented:
        weights = {
            name: value for name, value in weights.items() if name not in AUGMENTATION_WEIGHTS
        }
        architecture = description.get("architecture")
        if isinstance(architecture, dict) and isinstance(architecture.get("options"), dict):
            architecture["options"]["augment_dim"] = 0
    with prefixed(os.fspath(file)):
        model = build(description, weights, net)
        if not isinstance(model, DenoisingModel):
            raise InputError(
                f"a {model.kind} model has no denoiser: give a diffusion or a flow model"
            )
        return model, model.denoiser


def build(
    description: Mapping[str, Any], weights: Mapping[str, Tensor], net: nn.Module | None = None
) -> GenerativeModel:
    """Make the model that `GenerativeModel.description` describes, with the raw network's weights; see `load`."""
    for name, value in weights.items():
        known = value.dtype in FLOATS or not (value.is_floating_point() or value.is_complex())
        if not known or value.layout != torch.strided:
            raise InputError(f"{name!r:.80} is not an ordinary tensor of weights")
        if value.is_floating_point() and not value.isfinite().all():
            raise InputError(f"{name!r:.80} holds a weight that is not finite")
    kind, options = description.get("kind"), description.get("options")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"kind must be one of {', '.join(KINDS)}, got {kind!r:.80}")
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise InputError(f"options must be a dict, got {options!r:.80}")
    if net is None:
        made = _network(description.get("architecture"), weights)
    else:
        load_weights(made := net, weights)
    if "class_names" in description:
        name_classes(made, description["class_names"])
    try:
        model = KINDS[kind].around(made, description.get("image_shape"), **options)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(
            f"a model of kind {kind} cannot have the options {', '.join(options)!r:.200}"
        ) from error
    missing = model.options().keys() - options.keys()
    if missing:
        raise InputError(f"a model of kind {kind} needs the option {min(missing)}")
    if isinstance(made, ImageNetwork):
        with prefixed("image_shape"):
            made.check_shape(model.image_shape)
    return (model.float() if net is None else model).eval().requires_grad_(False)


def _network(architecture: object, weights: Mapping[str, Tensor]) -> nn.Module:
    if architecture is None:
        raise InputError("the file does not tell the architecture of its network: give net")
    if not isinstance(architecture, dict):
        raise InputError(f"architecture must be a dict, got {architecture!r:.80}")
    # PyTorch rounds differently if weights are stored channels last or at an unaligned address.
    plain = {
        name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()
    }
    return build_network(architecture, plain)


# Reading


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


def _read(file: Path) -> Parts:
    readers = {".ckpt": _read_checkpoint, ".safetensors": read_exported, ".pkl": _read_published}
    if file.suffix not in readers:
        found = "" if file.exists() else "no such file or folder of a run; "
        raise InputError(f"{file}: {found}a network file must be one of {', '.join(readers)}")
    if not file.is_file():  # Opening a pipe would wait for somebody to write to it.
        raise InputError(
            f"{file}: {'a pipe, a socket or a device' if file.exists() else 'no such file'}"
        )
    return readers[file.suffix](file)


def _read_checkpoint(file: Path) -> Parts:
    """Read the averaged weights. The averaging callback stores them in `state_dict`, and the current ones elsewhere."""
    checkpoint = read_checkpoint_file(file)
    state_dict, description = checkpoint.get("state_dict"), checkpoint.get(MODEL_KEY)
    if not isinstance(state_dict, dict) or not all(isinstance(name, str) for name in state_dict):
        raise InputError(f"{file}: no checkpoint of a training: it has no state_dict")
    if not isinstance(description, dict) or not isinstance(description.get("prefix"), str):
        raise InputError(
            f"{file}: no checkpoint of lit_knn: {MODEL_KEY} must be a dict with a prefix"
        )
    prefix = description["prefix"]
    weights = {
        name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)
    }
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise InputError(f"{file}: no weights named {prefix[:80]}*")
    return description, weights


def prefix_of(module: nn.Module, net: nn.Module) -> str:
    """Return the prefix of the names of `net`'s weights in the state of `module`, which contains `net`."""
    return next(name for name, part in module.named_modules() if part is net) + "."


def read_exported(file: Path) -> Parts:
    """Read a file of `write_exported`: the description and the weights. Raises InputError if it is another kind."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{file} is not a safetensors file, or a damaged one") from error
    if metadata.get("format") != FORMAT:
        raise InputError(f"{file} is not a model that lit_knn exported or converted")
    if metadata.get("format_version") != VERSION:
        found = metadata.get("format_version")
        raise InputError(
            f"{file} has format version {found!r:.40}; this version of lit_knn reads {VERSION}"
        )
    try:
        description = json.loads(metadata.get("model", ""))
    except (ValueError, RecursionError):
        description = None
    if not isinstance(description, dict):
        raise InputError(f"{file} holds no description of its model")
    return description, weights


def _read_published(file: Path) -> Parts:
    """Describe a published network as one of ours. EDM's sampler stays within the noise levels of the network."""
    config, weights = read_edm_pickle(file)
    with prefixed(os.fspath(file)):
        architecture = architecture_from_config(config)
    grid, side = NoiseGrid(), config["img_resolution"]
    options = {
        "sigma_data": config["sigma_data"],
        "sigma_min": max(grid.sigma_min, config["sigma_min"]),
        "sigma_max": min(grid.sigma_max, config["sigma_max"]),
        "rho": grid.rho,
        "num_steps": 18,
        "sampling_class": None,
        "drops_labels": bool(config.get("label_dropout", 0)),
    }
    shape = [config["img_channels"], side, side]
    told = {
        "kind": DiffusionModel.kind,
        "image_shape": shape,
        "options": options,
        "architecture": architecture,
    }
    return told, {name.removeprefix("model."): value for name, value in weights.items()}


# Writing


def write_exported(path: Path, model: GenerativeModel) -> None:
    """Write a safetensors file with the weights; its metadata describe the model completely.

    The file appears under its name only when it is complete.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Two names may share a tensor, which the format does not allow.
    weights = {
        name: value.detach().cpu().clone().contiguous()
        for name, value in model.net.state_dict().items()
    }
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


def convert(in_path: str | os.PathLike[str], out_path: str | os.PathLike[str]) -> GenerativeModel:
    """Convert a published EDM pickle to safetensors, with float32 weights; an existing file is never replaced.

    Returns the model that was written.
    """
    out_path = Path(out_path).expanduser()
    if out_path.suffix != ".safetensors":
        raise InputError(f"{out_path}: the output must be named .safetensors")
    if out_path.exists():
        raise InputError(f"{out_path} exists already, and is not replaced")
    model = load(in_path)
    write_exported(out_path, model)
    return model
