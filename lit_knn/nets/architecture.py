"""Describes our networks as plain data: a class and its options. Building one runs no code from a file."""

from collections.abc import Mapping
from inspect import signature
from typing import TypedDict

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.nets.adm import ADM
from lit_knn.nets.base import ImageNetwork
from lit_knn.nets.dit import DiT
from lit_knn.nets.song_unet import DDPMpp, NCSNpp
from lit_knn.nets.unet import UNet

# A file can name only these classes.
NETWORKS = (ADM, DDPMpp, DiT, NCSNpp, UNet)
KNOWN: dict[str, type[ImageNetwork]] = {network.__name__: network for network in NETWORKS}

# The class of a network and its options, all values that JSON can hold. This form is needed because `class` is a
# keyword of Python.
Architecture = TypedDict("Architecture", {"class": str, "options": dict[str, object]})


def architecture_of(net: nn.Module) -> Architecture | None:
    """Describe one of our networks; None for other networks."""
    if type(net) not in KNOWN.values():
        return None
    options = {name: getattr(net, name) for name in signature(type(net)).parameters}
    return {"class": type(net).__name__, "options": options}


def build_network(architecture: Architecture, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the network that `architecture_of` described. It uses the given tensors as its weights, without a copy."""
    name, options = architecture["class"], architecture["options"]
    if name not in KNOWN:
        raise InputError(f"architecture: class must be one of {', '.join(KNOWN)}, got {name!r:.80}")
    # A default in the place of an option could give another network with the same weights.
    known = signature(KNOWN[name]).parameters.keys()
    if options.keys() != known:
        rule = f"the options of {name} must be {', '.join(known)}"
        raise InputError(f"architecture: {rule}, got {options!r:.300}")

    # A file could ask for so many blocks or resolutions that they fill the memory. As each has weights, there cannot be
    # more of them than weights in the file.
    blocks, multipliers = options.get("blocks"), options.get("multipliers")
    too_deep = isinstance(blocks, int) and blocks > len(weights)
    if too_deep or (isinstance(multipliers, list) and len(multipliers) > len(weights)):
        raise InputError(f"the weights do not fit the architecture: {len(weights)} are too few")

    # On this device, weights take no memory, time and random numbers until the file's replace them.
    with torch.device("meta"):
        net = KNOWN[name](**options)
    load_weights(net, weights, assign=True)
    return net


def load_weights(net: nn.Module, weights: Mapping[str, Tensor], assign: bool = False) -> None:
    """Give a network its weights; raise InputError if they do not fit.

    Args:
        net: the network.
        weights: its weights, by name.
        assign: use the tensors themselves, without a copy.
    """
    try:
        net.load_state_dict(weights, assign=assign)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"the weights do not fit the architecture: {reason}") from error
