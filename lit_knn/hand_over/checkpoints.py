"""Reads the model of a checkpoint that training wrote, with the averaged weights."""

import os
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_knn.checkpoint_file import MODEL_KEY, read_checkpoint_file
from lit_knn.errors import InputError, prefixed
from lit_knn.hand_over.parts import Parts
from lit_knn.nets.architecture import KNOWN
from lit_knn.run_folder import config_of_run

# Checkpoints of earlier versions have no description. Their weights tell their kind, and their hyper-parameters its
# options. The number of steps has its own name in each module.
OLDER = {
    "consistency_function.net.": (
        "consistency",
        {"sigma_data": "sigma_data", "sigma_min": "sigma_min", "sampling_sigmas": "sampling_sigmas"}
        | {"num_steps": "predict_steps", "sampling_class": "sampling_class"},
    ),
    "denoiser.model.": (
        "diffusion",
        {"sigma_data": "sigma_data", "sigma_min": "sigma_min", "sigma_max": "sigma_max", "rho": "rho"}
        | {"num_steps": "sampling_steps", "sampling_class": "sampling_class"},
    ),
}


def prefix_of(module: nn.Module, net: nn.Module) -> str:
    """Return what the names of `net`'s weights begin with in the state of `module`, which holds it."""
    return next(name for name, part in module.named_modules() if part is net) + "."


def read_checkpoint_parts(path: str | os.PathLike[str]) -> Parts:
    """Read the model of a training checkpoint. Its tensors are on the CPU.

    Raises:
        InputError: the file is missing, damaged, or no checkpoint of a training of `lit_knn`.
    """
    return parts_of_checkpoint(path, read_checkpoint_file(path))


def parts_of_checkpoint(path: str | os.PathLike[str], checkpoint: Mapping[Any, Any]) -> Parts:
    """Take the model from the content of a checkpoint; `path` finds the configuration of an older one's run."""
    with prefixed(os.fspath(path)):
        state_dict = checkpoint.get("state_dict")
        if not isinstance(state_dict, dict) or not all(isinstance(name, str) for name in state_dict):
            raise InputError("no checkpoint of a training: it has no state_dict")
        description = checkpoint.get(MODEL_KEY)
        if description is None:
            description = _older(Path(path), checkpoint, state_dict)
        if not isinstance(description, dict) or not isinstance(description.get("prefix"), str):
            raise InputError(f"{MODEL_KEY} must be a dict with a prefix")
        prefix = description["prefix"]
        weights = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
            raise InputError(f"no weights named {prefix[:80]}*")
        return Parts(description, weights)


def _older(path: Path, checkpoint: Mapping[Any, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the model of a checkpoint of an earlier version by its hyper-parameters and its run's config.yaml."""
    hparams = checkpoint.get("hyper_parameters")
    for prefix, (kind, names) in OLDER.items():
        if any(name.startswith(prefix) for name in state_dict) and isinstance(hparams, dict):
            options = {option: hparams[name] for option, name in names.items() if name in hparams}
            shape = checkpoint.get("image_shape")
            return {
                "kind": kind,
                "image_shape": shape,
                "options": options,
                "architecture": architecture_of_run(path.parent.parent),
                "prefix": prefix,
            }
    raise InputError("no checkpoint of a model that lit_knn trains, or one without its hyper-parameters")


def architecture_of_run(run: Path) -> dict[str, Any] | None:
    """Return the architecture in a run's config.yaml; None without a config or with a network of another package."""
    try:
        net = config_of_run(run)["model"]["init_args"]["net"]
        module, _, name = net["class_path"].rpartition(".")
        given = dict(net.get("init_args") or {})
    except (InputError, KeyError, TypeError, AttributeError, ValueError):
        return None
    if name not in KNOWN or not (module == "" or module == "lit_knn.nets" or module.startswith("lit_knn.nets.")):
        return None
    defaults = {
        option: p.default for option, p in signature(KNOWN[name]).parameters.items() if p.default is not p.empty
    }
    return {"class": name, "options": {**defaults, **given}}
