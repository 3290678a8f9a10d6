"""Describes our networks as plain data: a class and its options. Building one runs no code from a file."""

from collections.abc import Mapping
from inspect import signature
from typing import TypedDict

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, first_line, joined_lines
from lit_knn.common.extras import missing
from lit_knn.nets.adm import ADM
from lit_knn.nets.base import ImageNetwork
from lit_knn.nets.dit import DiT
from lit_knn.nets.song_unet import DDPMpp, NCSNpp
from lit_knn.nets.unet import UNet

# A file can name only these classes, and the wrapper of models of `diffusers`.
NETWORKS = (ADM, DDPMpp, DiT, NCSNpp, UNet)
KNOWN: dict[str, type[ImageNetwork]] = {network.__name__: network for network in NETWORKS}
# The wrapper's module is imported only when a file names it: its library is an extra, and takes seconds to import.
WRAPPER, WRAPPER_MODULE = "Diffusers", "lit_knn.nets.diffusers_model"

# The class of a network and its options, all values that JSON can hold. This form is needed because `class` is a
# keyword of Python.
Architecture = TypedDict("Architecture", {"class": str, "options": dict[str, object]})


def architecture_of(net: nn.Module) -> Architecture | None:
    """Describe one of our networks, or a wrapped model of `diffusers`; None for other networks."""
    kind = type(net)
    if kind in KNOWN.values():
        options = {name: getattr(net, name) for name in signature(kind).parameters}
        return {"class": kind.__name__, "options": options}

    if (kind.__module__, kind.__name__) == (WRAPPER_MODULE, WRAPPER):
        options = net.options()  # type: ignore[operator]
        return {"class": WRAPPER, "options": options}
    return None


def check_options(net: nn.Module, saved: Architecture | None) -> None:
    """Raise InputError for an option that keeps the shapes of all weights, but makes another network of them.

    Examples are the number of heads, and what a model of `diffusers` gets as its timestep. A dropout may change.

    Args:
        net: the network that gets the weights of a file.
        saved: the network of the file; None if it is not known.
    """
    now = architecture_of(net)
    if now is None or saved is None or now["class"] != saved["class"]:
        return

    before, after = _compared_options(saved["options"]), _compared_options(now["options"])
    for name, value in after.items():
        if before.get(name, value) != value:
            difference = f"{name} is {before[name]} in the file, {value} in the model"
            raise InputError(f"the weights are of another architecture: {difference}")


def _compared_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that must be equal, with those of a model of `diffusers` beside its own; lists for tuples."""
    config = options.get("config")
    inner = config if isinstance(config, Mapping) else {}
    compared = {}
    for name, value in {**options, **inner}.items():
        if name != "config" and "dropout" not in name:
            compared[name] = list(value) if isinstance(value, tuple) else value

    # Without classes there is no number for "no class", and a U-Net takes images of any size.
    if not options.get("num_classes"):
        compared.pop("null_class", None)
    if str(options.get("model")).startswith("UNet"):
        compared.pop("sample_size", None)
    return compared


def build_network(architecture: Architecture, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the network that `architecture_of` described. It uses the given tensors as its weights, without a copy."""
    name, options = architecture["class"], architecture["options"]
    kind = network_class(name)
    # A default in the place of an option could give another network with the same weights.
    known = signature(kind).parameters.keys()
    if options.keys() != known:
        rule = f"the options of {name} must be {', '.join(known)}"
        raise InputError(f"architecture: {rule}, got {options!r:.300}")
    # Without arguments the wrapper would read a folder of this machine, which the file names.
    if "config" in known and not isinstance(options["config"], Mapping):
        raise InputError(f"architecture: config must be a mapping, got {options['config']!r:.80}")
    _check_depth(options, weights)

    # On this device, weights take no memory, time and random numbers until the file's replace them.
    with torch.device("meta"):
        net = kind(**options)
    load_weights(net, weights, assign=True)
    if not any(buffer.is_meta for buffer in net.buffers()):
        return net

    # Models of `diffusers` compute some buffers that no file stores, such as the positions of patches.
    with torch.random.fork_rng(devices=[]):
        net = kind(**options)
    load_weights(net, weights, assign=True)
    return net


def network_class(name: str) -> type[nn.Module]:
    """Return the class that a file names; raise InputError if there is none, or if it needs an extra."""
    if name == WRAPPER:
        try:
            from lit_knn.nets.diffusers_model import Diffusers
        except ImportError as error:
            raise InputError(missing(error) or first_line(error)) from error
        return Diffusers

    if name not in KNOWN:
        names = ", ".join(sorted([*KNOWN, WRAPPER], key=str.lower))
        raise InputError(f"architecture: class must be one of {names}, got {name!r:.80}")
    return KNOWN[name]


def _check_depth(options: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    """Raise InputError if a network of these options has more layers than the file has weights.

    A file could ask for so many blocks or resolutions that they fill the memory. As each has weights, there cannot be
    more of them than weights in the file.

    Args:
        options: the options of the network; those of a model of `diffusers` are in `config`.
        weights: the weights of the file.
    """
    config = options.get("config")
    if isinstance(config, Mapping):
        options = config

    for name in ("blocks", "depth", "layers_per_block", "multipliers", "num_layers"):
        number = options.get(name)
        if isinstance(number, list):
            number = len(number)
        if isinstance(number, int) and number > len(weights):
            count = f"{len(weights)} are too few"
            raise InputError(f"the weights do not fit the architecture: {count}")


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
        reason = joined_lines(error)[:300]
        raise InputError(f"the weights do not fit the architecture: {reason}") from error
