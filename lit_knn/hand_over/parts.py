"""A model as plain data and weights, checked before a model is made of them. No code of a file is run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_knn.errors import InputError
from lit_knn.generative_models import KINDS, GenerativeModel
from lit_knn.nets.architecture import build_network, check_image_shape, load_weights

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Parts(NamedTuple):
    """What a file holds of a model.

    Attributes:
        description: as `GenerativeModel.description` returned it.
        weights: by their names in the raw network.
    """

    description: Mapping[str, Any]
    weights: Mapping[str, Tensor]


def build(parts: Parts, net: nn.Module | None = None) -> GenerativeModel:
    """Make the model, on the CPU, in evaluation mode, without gradients.

    Args:
        parts: from a file.
        net: the raw network, if the file does not tell its architecture; its weights are replaced. A network that is
            made here has float32 weights.

    Raises:
        InputError: a value is missing, of the wrong type or out of its range; the weights do not fit; a weight is not
            finite; there is no architecture and `net` is None.
    """
    description, weights = parts.description, checked_weights(parts.weights)
    kind, options = description.get("kind"), description.get("options")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"kind must be one of {', '.join(KINDS)}, got {kind!r:.80}")
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise InputError(f"options must be a dict, got {options!r:.80}")
    if net is None:
        # PyTorch rounds otherwise where weights are laid out channels last, or lie at an address that is not aligned.
        plain = {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
        made = _network(description.get("architecture"), plain)
    else:
        made = net
        load_weights(net, weights)
    try:
        model = KINDS[kind].around(made, description.get("image_shape"), **options)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(f"a model of kind {kind} cannot have the options {', '.join(options)!r:.200}") from error
    missing = model.options().keys() - options.keys()
    if missing:
        raise InputError(f"a model of kind {kind} needs the option {min(missing)}")
    check_image_shape(made, model.image_shape)
    return (model.float() if net is None else model).eval().requires_grad_(False)


def checked_weights(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights; raise InputError if one is no ordinary tensor, or a value is NaN or infinite."""
    for name, value in weights.items():
        # A tensor may repeat one number of a small file as often as it likes.
        whole = value.layout == torch.strided and value.numel() * value.itemsize <= value.untyped_storage().nbytes()
        if not whole or value.is_complex() or (value.is_floating_point() and value.dtype not in FLOATS):
            raise InputError(f"{name!r:.80} is not an ordinary tensor of weights")
        if value.is_floating_point() and not value.isfinite().all():
            raise InputError(f"{name!r:.80} holds a weight that is not finite")
    return weights


def _network(architecture: object, weights: Mapping[str, Tensor]) -> nn.Module:
    if architecture is None:
        raise InputError("the file does not tell the architecture of its network: give net")
    if not isinstance(architecture, dict):
        raise InputError(f"architecture must be a dict, got {architecture!r:.80}")
    return build_network(architecture, weights)
