"""Reads published EDM pickles: finds the averaged network, its configuration and its weights."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_knn.common.errors import InputError, prefixed
from lit_knn.nets.published.safe_pickle import Record, StoredTensor, load_safely

PRECONDITIONING = "EDMPrecond"
# Attributes of the preconditioned network that hold constructor arguments, given or default.
ATTRIBUTES = ("img_resolution", "img_channels", "label_dim", "use_fp16", "sigma_min", "sigma_max", "sigma_data")
# Order of the arguments of the preconditioned network's constructor.
POSITIONAL = (*ATTRIBUTES, "model_type")
# Names that the inner network uses for img_channels of the preconditioned network.
INNER_ONLY = {"in_channels", "out_channels"}
# No real network exceeds these limits. A malicious file could, with modules that contain each other.
MAX_MODULES, MAX_DEPTH, MAX_VALUES = 20_000, 8, 100


def read_edm_pickle(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the averaged network of a published EDM pickle without running any code of the file.

    Args:
        path: the `.pkl`: a dict with the network under `ema`, or the network itself.

    Returns:
        The constructor arguments (numbers, text and lists of them), with the noise levels from `sigma_min` to
        `sigma_max` of the network; and the weights on the CPU in the file's types, named as in the file
        ("model.enc.16x16_conv.weight").

    Raises:
        InputError: the file cannot be read, see `load_safely`; it has no `ema`, another preconditioning than EDM's, or
            lacks parameters or constructor arguments.
    """
    loaded = load_safely(path)
    with prefixed(os.fspath(path)):
        if isinstance(loaded, dict):
            if "ema" not in loaded:
                found = ", ".join(map(repr, sorted(loaded)))[:200] or "nothing"
                raise InputError(f"no network under 'ema', only {found}")
            loaded = loaded["ema"]
        if not isinstance(loaded, Record):
            raise InputError(f"'ema' must be a network, got {type(loaded).__name__}")
        if loaded.class_name != PRECONDITIONING:
            # Under another preconditioning the same weights would silently give a wrong denoiser.
            advice = "other preconditionings, as in the published baseline-*.pkl, are not supported"
            raise InputError(f"the network must be an {PRECONDITIONING}, got {loaded.class_name!r:.40}: {advice}")
        return _config_of(loaded), _weights_of(loaded, Path(path).stat().st_size)


def _config_of(network: Record) -> dict[str, Any]:
    """Merge the constructor arguments of both networks; the preconditioned network's override the inner one's."""
    inner = _children(network, "_modules", "the network").get("model")
    if not isinstance(inner, Record):
        raise InputError("the network has no submodule 'model'")
    config: dict[str, Any] = {"model_type": inner.class_name, "sigma_min": 0, "sigma_max": math.inf}
    config |= {name: value for name, value in _arguments(inner, (), "model").items() if name not in INNER_ONLY}
    config |= {name: network.state[name] for name in ATTRIBUTES if name in network.state}
    config |= _arguments(network, POSITIONAL, "the network")
    config = {name: _plain(name, value) for name, value in config.items()}
    if config["model_type"] != inner.class_name:
        raise InputError(f"model_type is {config['model_type']!r:.40}, the network a {inner.class_name!r:.40}")
    low, high = config["sigma_min"], config["sigma_max"]
    if not all(type(level) in (int, float) for level in (low, high)) or not 0 <= low < high:
        raise InputError(f"sigma_min and sigma_max must be ascending noise levels, got {low!r:.40} and {high!r:.40}")
    return config


def _arguments(module: Record, positional: Sequence[str], where: str) -> dict[str, Any]:
    kwargs, args = _children(module, "_init_kwargs", where), module.state.get("_init_args", ())
    if not isinstance(args, tuple | list) or len(args) > len(positional):
        raise InputError(f"{where} has more than {len(positional)} positional constructor arguments")
    return {**dict(zip(positional, args, strict=False)), **kwargs}


def _plain(name: str, value: object) -> Any:
    """Return a number, text or short list of them; tuples become lists. Messages may print all of these."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if len(items) > MAX_VALUES or not all(item is None or isinstance(item, int | float | str) for item in items):
        raise InputError(f"the constructor argument {name} is not a plain value")
    if any(isinstance(item, int) and abs(item) >= 2**63 for item in items):
        raise InputError(f"the constructor argument {name} is too large")
    return items if isinstance(value, list | tuple) else value


def _weights_of(network: Record, max_bytes: int) -> dict[str, Tensor]:
    """Collect parameters and persistent buffers of all modules; each tensor gets its own memory."""
    weights: dict[str, Tensor] = {}
    modules = [("", network)]
    for prefix, module in modules:  # The list grows in the loop.
        where = prefix.rstrip(".") or "the network"
        kinds = [_children(module, f"_{kind}", where) for kind in ("parameters", "buffers", "modules")]
        parameters, buffers, children = ({name: v for name, v in kind.items() if v is not None} for kind in kinds)
        transient = module.state.get("_non_persistent_buffers_set")
        tensors = {**parameters, **buffers}
        for kind, values, known in (("tensor", tensors, StoredTensor), ("module", children, Record)):
            for name, value in values.items():
                if not isinstance(value, known):
                    raise InputError(f"{prefix}{name} must be a {kind}, got {type(value).__name__}")
        # Many names may share the values of one storage, and many modules the same names.
        max_bytes -= sum(map(len, kinds)) + sum(value.values.nbytes for value in tensors.values())
        if max_bytes < 0:
            raise InputError("the tensors are larger than the file")
        modules += [(f"{prefix}{name}.", child) for name, child in children.items()]
        if len(modules) > MAX_MODULES or (children and prefix.count(".") > MAX_DEPTH):
            raise InputError(f"more than {MAX_MODULES} modules, or modules nested deeper than {MAX_DEPTH}")
        for name, value in tensors.items():
            if not (isinstance(transient, set) and name in transient):
                weights[prefix + name] = value.to_tensor()
    return weights


def _children(module: Record, kind: str, where: str) -> dict[str, Any]:
    children = module.state.get(kind) if isinstance(module.state, dict) else None
    if not isinstance(children, dict) or not all(re.fullmatch(r"[\w-]{1,50}", name) for name in children):
        raise InputError(f"{where} lacks its {kind}, or has some of impossible names")
    return children
