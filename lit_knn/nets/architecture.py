"""Describes our networks as plain data: a class and its options. Building one runs no code from a file."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, first_line
from lit_knn.nets.adm import ADM
from lit_knn.nets.base import ImageNetwork
from lit_knn.nets.song_unet import DDPMpp, NCSNpp
from lit_knn.nets.unet import UNet

# A file can name only these classes.
KNOWN: dict[str, type[ImageNetwork]] = {net.__name__: net for net in (ADM, DDPMpp, NCSNpp, UNet)}


def architecture_of(net: nn.Module) -> dict[str, Any] | None:
    """Describe one of our networks as {"class": …, "options": {…}}, which JSON can hold; None for other networks."""
    if type(net) not in KNOWN.values():
        return None
    options = {name: getattr(net, name) for name in signature(type(net)).parameters}
    return {"class": type(net).__name__, "options": options}


def build_network(architecture: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the network that `architecture_of` described. It uses the given tensors as its weights, without a copy."""
    name, options = architecture.get("class"), architecture.get("options")
    if not isinstance(name, str) or name not in KNOWN:
        raise InputError(f"architecture: class must be one of {', '.join(KNOWN)}, got {name!r:.80}")
    known = signature(KNOWN[name]).parameters.keys()
    if not isinstance(options, dict) or options.keys() != known:
        raise InputError(
            f"architecture: the options of {name} must be {', '.join(known)}, got {options!r:.300}"
        )

    try:
        # A new network would take memory, time and random numbers for nothing.
        with torch.device("meta"):
            net = KNOWN[name](**options)
    except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"architecture: {name} cannot have the options {options!r:.300}: "
            f"{first_line(error):.300}"
        ) from error

    load_weights(net, weights, assign=True)
    return net


def load_weights(net: nn.Module, weights: Mapping[str, Tensor], assign: bool = False) -> None:
    """Copy weights into a network; `assign` uses the tensors without a copy. Raises InputError if they do not fit."""
    try:
        net.load_state_dict(weights, assign=assign)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"the weights do not fit the architecture: {reason}") from error
