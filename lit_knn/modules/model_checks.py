"""Checks before a training: that the network accepts an image, and that the weights of a checkpoint fit the network."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_knn.common.errors import InputError, class_and_line
from lit_knn.common.memory import is_out_of_memory
from lit_knn.common.rng import keyed_default_rng


def check_device(device: torch.device) -> None:
    """Raise InputError if the estimators cannot run on the device."""
    if device.type == "mps":
        problem = "Apple's GPU has no float64, which the estimators need"
        raise InputError(f"{problem}: use --trainer.accelerator cpu")


def try_noise_image(
    evaluate: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Evaluate a network on one image of noise, to find errors before the training.

    Args:
        evaluate: the network, a function of z (B, *shape) and the noise level (B,).
        shape: the shape of an image.
        device: the device of the network.

    Raises:
        InputError: the network fails, or its result has another shape or is not finite.
    """
    level = torch.ones(1, device=device)
    # A compiled net would be compiled for this one image, which takes minutes. The batches of the training would then
    # be compiled for varying sizes.
    eager = torch.compiler.set_stance("force_eager")

    try:
        with torch.no_grad(), keyed_default_rng(device, 0), eager:
            # A blank image would be no fair trial of a network that divides by the spread of its input.
            output = evaluate(torch.randn(1, *shape, device=device), level)
    except InputError:
        raise
    # The net may be a user's, which may raise anything.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = f"the net does not accept images of shape {shape}"
        raise InputError(f"{problem}: {class_and_line(error)}") from error

    result = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
    if result != tuple(shape):
        raise InputError(f"the net maps images of shape {shape} to {result}")
    if not output.isfinite().all():
        raise InputError(
            "the net's output is not finite for an image of noise at the noise level 1"
        )


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
    state: Mapping[str, object], saved: Mapping[str, object], kind: str | None
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


def _shape_of(state: Mapping[str, object], name: str) -> tuple[int, ...] | str:
    """Return the shape of a parameter, the type of another state of the model, or "absent"."""
    if name not in state:
        return "absent"
    value = state[name]
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
