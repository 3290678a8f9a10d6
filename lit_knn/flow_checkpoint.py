"""Loads the networks of flows: the checkpoints of `LitFlow`, as flow networks and as denoisers."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from lit_knn.checkpoint_file import read_checkpoint_file
from lit_knn.edm_checkpoint import filled, load_network, parts_of_own
from lit_knn.errors import InputError
from lit_knn.nets.flow import OUTPUTS, FlowDenoiser, FlowNetwork
from lit_knn.nets.precond import EDMPrecond

FLOW_KEY = "flow"
"""Name of the parameterisation in a checkpoint of `LitFlow`."""

# Prefix of the inner network's weights in a checkpoint of LitFlow.
FLOW_PREFIX = "flow.model."


def load_denoiser(
    path: str | os.PathLike[str], net: nn.Module | None = None, fp16: bool = False
) -> EDMPrecond | FlowDenoiser:
    """Make the denoiser D(z, σ) of any network file: those of `load_network`, and checkpoints of `LitFlow`.

    Args:
        path: the file.
        net: the architecture, for a `.ckpt` that does not store it; its weights are replaced.
        fp16: compute the network in float16.

    Raises:
        InputError: as `load_network`, or as `load_flow`.
    """
    if Path(path).suffix == ".ckpt" and Path(path).is_file() and FLOW_KEY in read_checkpoint_file(path, mmap=True):
        return FlowDenoiser(load_flow(path, net), fp16).eval()
    return load_network(path, net, fp16)


def load_flow(path: str | os.PathLike[str], net: nn.Module | None = None) -> FlowNetwork:
    """Make the flow network v(z, τ) of a checkpoint of `LitFlow`, with its averaged weights.

    Args:
        path: the `.ckpt`; only plain values and tensors are loaded from it.
        net: the architecture, for a checkpoint that does not store it; its weights are replaced.

    Returns:
        `flow(z, tau, class_label=None)`, on the CPU, in evaluation mode, without gradients.

    Raises:
        InputError: the file is missing or damaged, is no checkpoint of LitFlow, or has another parameterisation than
            those of `lit_knn.nets.flow`; the weights do not fit the architecture, or it is not known.
    """
    checkpoint, name = read_checkpoint_file(path), os.fspath(path)
    if FLOW_KEY not in checkpoint:
        raise InputError(f"{name}: not a checkpoint of LitFlow: it does not tell the parameterisation of a flow")
    try:
        config, state_dict = parts_of_own(checkpoint, FLOW_PREFIX, "LitFlow")
        kind, options = _parameterisation(checkpoint[FLOW_KEY])
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    return filled(path, config, state_dict, net, lambda model: kind(model, **options))


def _parameterisation(told: Any) -> tuple[type[FlowNetwork], dict[str, Any]]:
    options = dict(told) if isinstance(told, dict) else {}
    kind = OUTPUTS.get(str(options.pop("output", None)))
    try:
        if kind is not None and kind(nn.Identity(), **options).description() == told:
            return kind, options
    except TypeError:  # another option
        pass
    raise InputError(f"its parameterisation {told!r} is none of {', '.join(OUTPUTS)}")
