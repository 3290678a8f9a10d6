"""Reads published EDM pickles: finds the averaged network, its configuration and its weights."""

import os

from torch import Tensor

from lit_knn.common.errors import InputError, prefixed
from lit_knn.nets.published.pickle_machine import PickledObject, Value
from lit_knn.nets.published.safe_pickle import load_safely

PRECONDITIONING = "EDMPrecond"
# Attributes of the preconditioned network that hold arguments of its constructor, given or default.
ATTRIBUTES = (
    "img_resolution",
    "img_channels",
    "label_dim",
    "use_fp16",
    "sigma_min",
    "sigma_max",
    "sigma_data",
)
# Names that the inner network uses for img_channels of the preconditioned network.
INNER_ONLY = ("in_channels", "out_channels")


def read_edm_pickle(path: str | os.PathLike[str]) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """Read the averaged network of a published EDM pickle without running any code of the file.

    Args:
        path: the `.pkl`: a dict with the network under `ema`, or the network itself.

    Returns:
        The constructor arguments of the inner network, with its class as `model_type` and the `ATTRIBUTES` of the
        preconditioned network; and the weights on the CPU in the file's types, named as in the file
        ("model.enc.16x16_conv.weight").
    """
    loaded = load_safely(path)
    with prefixed(os.fspath(path)):
        if isinstance(loaded, dict):
            loaded = loaded.get("ema", loaded)

        name = type(loaded).__name__
        if isinstance(loaded, PickledObject):
            name = loaded.class_name
        if name != PRECONDITIONING:
            # Under another preconditioning the same weights would silently give a wrong denoiser.
            advice = "other preconditionings, as in the published baseline-*.pkl, are not supported"
            raise InputError(
                f"the network must be an {PRECONDITIONING}, got {name!r:.40}: {advice}"
            )
        try:
            return _config_of(loaded.state), _weights_of(loaded)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise InputError(
                "the network lacks its configuration or some of its weights"
            ) from error


def _config_of(network: dict[str, Value]) -> dict[str, Value]:
    """Return the arguments of the inner network, and those of the preconditioned one."""
    inner = network["_modules"]["model"]
    config = {"model_type": inner.class_name}
    for name, value in inner.state["_init_kwargs"].items():
        if name not in INNER_ONLY:
            config[name] = value

    for name in ATTRIBUTES:
        config[name] = network[name]
    return config


def _weights_of(module: PickledObject, prefix: str = "") -> dict[str, Tensor]:
    """Collect parameters and persistent buffers of a module and of all modules inside it.

    Each tensor is a copy with its own memory, see `to_tensor`. Names begin with `prefix`.
    """
    state = module.state
    not_persistent = state.get("_non_persistent_buffers_set", ())
    stored = {**state["_parameters"], **state["_buffers"]}

    weights = {}
    for name, value in stored.items():
        if value is not None and name not in not_persistent:
            weights[f"{prefix}{name}"] = value.to_tensor()

    for name, child in state["_modules"].items():
        if child is not None:
            weights |= _weights_of(child, f"{prefix}{name}.")
    return weights
