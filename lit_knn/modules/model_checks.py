"""Checks before a training: that the network accepts an image, and that the weights of a checkpoint fit the network."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, first_line
from lit_knn.common.memory import is_out_of_memory
from lit_knn.common.rng import keyed_default_rng
from lit_knn.nets.architecture import Architecture, architecture_of


def check_device(device: torch.device) -> None:
    """Raise InputError if the estimators cannot run on the device."""
    if device.type == "mps":
        problem = "Apple's GPU has no float64, which the estimators need"
        raise InputError(f"{problem}: use --trainer.accelerator cpu")


def try_blank_image(
    evaluate: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Evaluate a network on one blank image, to find errors before the training.

    Args:
        evaluate: the network, a function of z (B, *shape) and the noise level (B,).
        shape: the shape of an image.
        device: the device of the network.

    Raises:
        InputError: the network fails, or its result has another shape.
    """
    blank = torch.zeros(1, *shape, device=device)
    level = torch.ones(1, device=device)
    # A compiled net would be compiled for this one image, which takes minutes. The batches of the training would then
    # be compiled for varying sizes.
    eager = torch.compiler.set_stance("force_eager")

    try:
        with torch.no_grad(), keyed_default_rng(device, 0), eager:
            output = evaluate(blank, level)
    except InputError:
        raise
    # The net may be a user's, which may raise anything.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"the net does not accept images of shape {shape}: {reason}") from error

    result = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
    if result != tuple(shape):
        raise InputError(f"the net maps images of shape {shape} to {result}")


def check_preconditioning(owner: str, saved: Mapping[str, Any], **options: float) -> None:
    """Raise InputError for the first option of the module that has another value in the checkpoint.

    Args:
        owner: class of the module.
        saved: the options of the checkpoint. It may lack some, which are not compared.
        options: the options of the module.
    """
    for name, value in options.items():
        if saved.get(name, value) != value:
            difference = f"{name} is {saved[name]} in the checkpoint, {value} in {owner}"
            raise InputError(f"the checkpoint is of another preconditioning: {difference}")


def check_architecture(
    state: Mapping[str, Tensor], saved: Mapping[str, Tensor], kind: str | None
) -> None:
    """Raise InputError for the first parameter that is missing, unexpected or of another shape.

    Args:
        state: the parameters of the model.
        saved: those of the checkpoint.
        kind: the kind of model that the checkpoint is of, if known.
    """
    for name in [*state, *saved]:
        in_model = _shape_of(state, name)
        in_checkpoint = _shape_of(saved, name)
        if in_model != in_checkpoint:
            difference = f"{name} is {in_checkpoint} in the checkpoint, {in_model} in the model"
            hint = "" if kind is None else f"; the checkpoint is of a {kind} model"
            raise InputError(f"the checkpoint is of another architecture: {difference}{hint}")


def check_network_options(net: nn.Module, saved: Architecture | None) -> None:
    """Raise InputError for an option that keeps the shapes of all parameters, but makes another network of them.

    Examples are the number of heads, and what a model of `diffusers` gets as its timestep. A dropout may change.

    Args:
        net: the raw network of the model.
        saved: the network of the checkpoint; None if it is not known.
    """
    now = architecture_of(net)
    if now is None or saved is None or now["class"] != saved["class"]:
        return

    # A checkpoint may have lists in place of tuples.
    before = json.loads(json.dumps(dict(_flattened(saved["options"]))))
    after = json.loads(json.dumps(dict(_flattened(now["options"]))))
    for name, value in after.items():
        if "dropout" not in name and before.get(name, value) != value:
            difference = f"{name} is {before[name]} in the checkpoint, {value} in the model"
            raise InputError(f"the checkpoint is of another architecture: {difference}")


def _flattened(options: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield name and value of each option; those of a model of `diffusers`, in `config`, have names of their own."""
    for name, value in options.items():
        if name == "config" and isinstance(value, Mapping):
            yield from value.items()
        else:
            yield name, value


def _shape_of(state: Mapping[str, Tensor], name: str) -> tuple[int, ...] | str:
    """Return the shape of a parameter, or "absent"."""
    if name not in state:
        return "absent"
    return tuple(state[name].shape)
