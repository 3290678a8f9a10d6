"""Builds a model that samples from its description and its weights; no code of a file runs."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lit_knn.common.checkpoint_file import not_finite
from lit_knn.common.errors import InputError, prefixed
from lit_knn.nets.architecture import Architecture, build_network, check_options, load_weights
from lit_knn.nets.base import ImageNetwork, name_classes
from lit_knn.sampling import KINDS, GenerativeModel
from lit_knn.sampling.described_parts import ModelDescription


def build(
    description: ModelDescription, weights: Mapping[str, Tensor], net: nn.Module | None = None
) -> GenerativeModel:
    """Make a model from a description and weights; raise InputError if they do not fit.

    Args:
        description: what `GenerativeModel.description` returned.
        weights: the weights of the raw network, by name.
        net: see `load`.
    """
    bad = not_finite(weights)
    if bad is not None:
        raise InputError(f"{bad!r:.80} holds a weight that is not finite")

    if net is None:
        network = _network(description.get("architecture"), weights)
    else:
        network = net
        load_weights(network, weights)
        check_options(network, description.get("architecture"))
    if "class_names" in description:
        name_classes(network, description["class_names"])

    kind, options = description["kind"], description["options"]
    model = KINDS[kind].around(network, description["image_shape"], **options)
    # The file must have every option, because a default could differ from what the training used.
    missing = model.options().keys() - options.keys()
    if missing:
        raise InputError(f"a model of kind {kind} needs the option {min(missing)}")
    if isinstance(network, ImageNetwork):
        with prefixed("image_shape"):
            network.check_shape(model.image_shape)

    if net is None:
        model = model.float()
    return model.eval().requires_grad_(False)


def _network(architecture: Architecture | None, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the network that a file describes, with copies of the file's weights."""
    if architecture is None:
        raise InputError("the file does not tell the architecture of its network: give net")

    # PyTorch rounds differently if weights are stored channels last or at an unaligned address.
    plain = {}
    for name, value in weights.items():
        plain[name] = value.clone(memory_format=torch.contiguous_format)
    return build_network(architecture, plain)
