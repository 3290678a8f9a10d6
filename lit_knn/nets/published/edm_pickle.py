"""Reader of published EDM pickles: turns inert records into a configuration and a state dict."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.nets.published.inert_numpy import ArrayRecord
from lit_knn.nets.published.inert_objects import Record, printable
from lit_knn.nets.published.inert_pickle import TensorRecord, load_inert

Parts = tuple[dict[str, Any], dict[str, Tensor]]

PRECONDITIONING = "EDMPrecond"
# Attributes of the preconditioned network that hold constructor arguments, given or default.
ATTRIBUTES = ("img_resolution", "img_channels", "label_dim", "use_fp16", "sigma_min", "sigma_max", "sigma_data")
# Order of the arguments of the preconditioned network's constructor.
POSITIONAL = (*ATTRIBUTES, "model_type")
SIGMAS = {"sigma_min", "sigma_max", "sigma_data"}
# Names that the inner network uses for img_channels of the preconditioned network.
INNER_ONLY = {"in_channels", "out_channels"}
# No real network exceeds these limits. A malicious file could, with modules and lists that contain each other.
MAX_MODULES, MAX_DEPTH, MAX_CONFIG_VALUES, MAX_CONFIG_DEPTH = 20_000, 24, 5_000, 8


def read_edm_pickle(path: str | os.PathLike[str]) -> Parts:
    """Read the averaged network of a published EDM pickle without running any code of the file.

    Args:
        path: the `.pkl`: a dict with the network under `ema`, or the network itself.

    Returns:
        The configuration (plain values only), and the state dict on the CPU in the file's dtypes.

    Raises:
        InputError: the file is missing, truncated, damaged or no pickle; it names a global outside the allow-list; it
            has no `ema`, another preconditioning than EDM's, or lacks parameters or constructor arguments; an
            impossible `sigma_data`; a weight is not finite.
    """
    loaded = load_inert(path)
    with naming(path):
        network = _averaged_network(loaded)
        config = _config_of(network)
        return config, checked_weights(_state_dict_of(network, Path(path).stat().st_size))


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Prefix an InputError with the file's name."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{os.fspath(path)}: {error}") from error


def _averaged_network(loaded: object) -> Record:
    if isinstance(loaded, dict):
        if "ema" not in loaded:
            keys = ", ".join(sorted(repr(key)[:40] for key in loaded if isinstance(key, str))[:8])
            raise InputError(f"no network under 'ema', only {keys or 'nothing'}")
        loaded = loaded["ema"]
    if not isinstance(loaded, Record):
        raise InputError(f"'ema' must be a network, got {type(loaded).__name__}")
    if loaded.class_name != PRECONDITIONING:
        # Under another preconditioning the same weights would silently give a wrong denoiser.
        raise InputError(
            f"the network must be an {PRECONDITIONING}, got {loaded.class_name[:40]!r}: "
            "other preconditionings, as in the published baseline-*.pkl, are not supported"
        )
    return loaded


def _config_of(network: Record) -> dict[str, Any]:
    """Merge the constructor arguments of both networks; the preconditioned network's override the inner one's."""
    inner = _children(network, "_modules", "the network").get("model")
    if not isinstance(inner, Record):
        raise InputError("the network has no submodule 'model'")
    inner_kwargs = _arguments(inner, (), "model")
    config = {name: value for name, value in inner_kwargs.items() if name not in INNER_ONLY}
    config |= {name: network.state[name] for name in ATTRIBUTES if name in network.state}
    config |= _arguments(network, POSITIONAL, "the network")
    config = checked_config({"model_type": inner.class_name, **config})
    if config["model_type"] != inner.class_name:
        raise InputError(f"model_type is {config['model_type']!r}, the network a {inner.class_name!r}")
    return config


def _arguments(record: Record, positional: Sequence[str], where: str) -> dict[str, Any]:
    args, kwargs = record.state.get("_init_args", ()), record.state.get("_init_kwargs")
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise InputError(f"{where} lacks its constructor arguments (_init_args, _init_kwargs)")
    if len(args) > len(positional):
        raise InputError(f"{where} has {len(args)} positional constructor arguments, more than {len(positional)}")
    return {**dict(zip(positional, args, strict=False)), **kwargs}


def checked_config(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Check and copy a stored configuration, and fill in `label_dim`.

    Raises:
        InputError: a value is not plain (number, text, list, dict); an argument is missing, of the wrong type or
            impossible.
    """
    budget = [MAX_CONFIG_VALUES]
    plain = _plain(dict(config), "", budget, MAX_CONFIG_DEPTH)
    plain.setdefault("label_dim", 0)
    model_type = plain.get("model_type")
    if not isinstance(model_type, str) or not model_type.isidentifier():
        raise InputError(f"model_type must be the name of a network, got {model_type!r}")
    for name, least in (("img_resolution", 1), ("img_channels", 1), ("label_dim", 0)):
        if type(plain.get(name)) is not int or plain[name] < least:
            raise InputError(f"{name} must be an integer of at least {least}, got {plain.get(name)!r}")
    for name in SIGMAS & plain.keys():
        check_sigma(name, plain[name])
    dropout = plain.get("label_dropout", 0)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
        raise InputError(f"label_dropout must be a number from 0 to 1, got {dropout!r:.80}")
    return plain


def check_sigma(name: str, value: object) -> None:
    """Refuse a noise level that is no number: `sigma_data` above 0 and finite, the others from 0 on, even infinite."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (0 < value < math.inf if name == "sigma_data" else value >= 0):  # type: ignore[operator]
        kind = "a positive number" if name == "sigma_data" else "a number from 0"
        raise InputError(f"{name} must be {kind}, got {value!r:.80}")


def checked_weights(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights; raise InputError if a value is NaN or infinite."""
    for name, tensor in state_dict.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise InputError(f"{printable(name)} holds a weight that is not finite")
    return state_dict


def _plain(value: object, name: str, budget: list[int], depth: int) -> Any:
    """Copy plain values; tuples become lists. `budget` limits the number of values, `depth` the nesting."""
    budget[0] -= 1
    if budget[0] < 0 or depth < 0 or (isinstance(value, ArrayRecord) and value.count > budget[0]):
        raise InputError(f"the constructor argument {name} holds too many values")
    if isinstance(value, ArrayRecord):
        value = value.tolist()
    if value is None or isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, name, budget, depth - 1) for item in value]
    if isinstance(value, dict) and all(map(_is_name, value)):
        return {key: _plain(item, name or key, budget, depth - 1) for key, item in value.items()}
    raise InputError(f"the constructor argument {name} is not a plain value" if name else "impossible argument names")


def _is_name(key: object) -> bool:
    return isinstance(key, str) and re.fullmatch(r"[\w-]+", key) is not None


def _state_dict_of(network: Record, max_bytes: int) -> dict[str, Tensor]:
    """Collect parameters and persistent buffers of all modules; each tensor gets its own memory."""
    tensors: dict[str, Tensor] = {}
    for prefix, module in _modules(network):
        transient = module.state.get("_non_persistent_buffers_set")
        for kind in ("_parameters", "_buffers"):
            for name, value in _children(module, kind, prefix or "the network").items():
                if value is None or (kind == "_buffers" and isinstance(transient, set) and name in transient):
                    continue
                if not isinstance(value, TensorRecord):
                    raise InputError(f"{prefix}{name} must be a tensor, got {type(value).__name__}")
                max_bytes -= value.nbytes
                if max_bytes < 0:
                    raise InputError("the tensors are larger than the file")
                tensors[prefix + name] = value.to_tensor()
    if not any(name.startswith("model.") for name in tensors):
        raise InputError("the network has no parameters")
    return tensors


def _modules(network: Record) -> Iterator[tuple[str, Record]]:
    """Yield every module, parents first, with the prefix of its parameter names."""
    pending, count = [("", network)], 0
    while pending:
        prefix, module = pending.pop()
        yield prefix, module
        count += 1
        if count > MAX_MODULES or prefix.count(".") > MAX_DEPTH:
            raise InputError(f"more than {MAX_MODULES} modules, or modules nested deeper than {MAX_DEPTH}")
        for name, child in reversed(_children(module, "_modules", prefix or "the network").items()):
            if child is not None and not isinstance(child, Record):
                raise InputError(f"{prefix}{name} must be a module, got {type(child).__name__}")
            if child is not None:
                pending.append((f"{prefix}{name}.", child))


def _children(module: Record, kind: str, where: str) -> dict[str, Any]:
    children = module.state.get(kind)
    if not isinstance(children, dict):
        raise InputError(f"{where.rstrip('.')} lacks its {kind.strip('_')}")
    if not all(map(_is_name, children)):
        raise InputError(f"{where.rstrip('.')} has {kind.strip('_')} of an impossible name")
    return children
