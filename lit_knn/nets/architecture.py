"""Architectures as plain data: the class of one of our networks and its options. No code of a file is run."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.errors import InputError
from lit_knn.nets.adm import ADM
from lit_knn.nets.song_unet import DDPMpp, NCSNpp
from lit_knn.nets.unet import UNet

# A file can name these classes alone.
KNOWN: dict[str, type[nn.Module]] = {net.__name__: net for net in (ADM, DDPMpp, NCSNpp, UNet)}


def architecture_of(net: nn.Module) -> dict[str, Any] | None:
    """Describe one of our networks as {"class": …, "options": {…}}, which JSON can hold; None for other networks."""
    if type(net) not in KNOWN.values():
        return None
    # Each of our networks keeps the arguments of its constructor under their names.
    options = {name: getattr(net, name) for name in signature(type(net)).parameters}
    return {"class": type(net).__name__, "options": options}


def build_network(architecture: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """Build one of our networks and give it the weights. They keep their types, and no random number is drawn.

    Args:
        architecture: what `architecture_of` returned.
        weights: by their names in the network; the network shares their memory.

    Raises:
        InputError: an unknown class, an option that is unknown, missing, of the wrong type or out of its range; weights
            of other names or shapes. Sizes that the weights cannot have are refused before anything is built.
    """
    make = _constructor(architecture, weights)
    # Without memory and random numbers, because the weights replace the new ones.
    with torch.device("meta"):
        net = make()
    load_weights(net, weights, assign=True)
    if any(buffer.is_meta for buffer in net.buffers()):
        # A buffer is not stored, such as the frequencies of UNet. The weights have shown that the sizes are right.
        with torch.random.fork_rng(devices=[]):
            net = make()
        load_weights(net, weights, assign=True)
    return net


def load_weights(net: nn.Module, weights: Mapping[str, Tensor], assign: bool = False) -> None:
    """Give a network its weights: copies, or with `assign` the tensors themselves.

    Raises:
        InputError: a weight is missing, unexpected or of another shape.
    """
    try:
        net.load_state_dict(weights, assign=assign)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"the weights do not fit the architecture: {reason}") from error


def check_image_shape(net: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise InputError if one of our networks cannot take images of this shape, as far as its options tell."""
    channels, side, factor = (getattr(net, name, None) for name in ("in_channels", "image_size", "factor"))
    name = type(net).__name__
    if isinstance(channels, int) and (len(shape) != 3 or shape[0] != channels):
        raise InputError(f"image_shape must be (channels, height, width) with in_channels={channels}, got {shape}")
    if isinstance(side, int) and shape[1:] != (side, side):
        raise InputError(f"image_shape={shape}, but {name} has image_size={side}")
    if isinstance(factor, int) and any(length % factor for length in shape[1:]):
        raise InputError(f"image_shape={shape}, but {name} halves its images to 1/{factor}")


def _constructor(architecture: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    name, options = architecture.get("class"), architecture.get("options")
    if not isinstance(name, str) or name not in KNOWN:
        raise InputError(f"architecture: class must be one of {', '.join(KNOWN)}, got {name!r:.80}")
    if not isinstance(options, dict):
        raise InputError("architecture: options must be a dict")
    known = signature(KNOWN[name]).parameters
    for option, value in options.items():
        if option not in known:
            raise InputError(f"architecture: {name} has no option {option!r:.80}")
        _check_option(f"architecture: {name}.{option}", value)
    missing = [option for option in known if option not in options]
    if missing:
        raise InputError(f"architecture: {name} needs the option {missing[0]}")
    _check_size(name, options, weights)

    def make() -> nn.Module:
        try:
            return KNOWN[name](**options)
        except InputError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a size that no tensor can have.
            raise InputError(f"architecture: {name} cannot have the options {options!r:.300}") from error

    return make


def _check_option(name: str, value: object) -> None:
    numbers = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise InputError(f"{name} must be a number or a list of numbers, got {value!r:.80}")
    if any(number != number for number in numbers):  # NaN would pass every comparison that follows.
        raise InputError(f"{name} must not be NaN")


def _check_size(name: str, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse sizes that the weights cannot have: building such a network might not end."""
    values = sum(weight.numel() for weight in weights.values())
    for option, value in options.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if number > max(values, 1):
                raise InputError(f"architecture: {name}.{option}={number} is more than {values} weights can fill")
    blocks, levels = options.get("blocks"), options.get("multipliers")
    if isinstance(blocks, int) and isinstance(levels, list | tuple) and blocks * len(levels) > len(weights):
        raise InputError(
            f"architecture: blocks={blocks} at {len(levels)} resolutions are more than {len(weights)} weights can fill"
        )
