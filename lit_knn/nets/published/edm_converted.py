"""Safetensors files of EDM networks, with the configuration in the metadata."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_knn.atomic_files import written_whole
from lit_knn.errors import InputError, first_line
from lit_knn.nets.published.edm_pickle import Parts, checked_config, checked_weights, naming

FORMAT = "lit_knn.edm_network"


def write_converted(path: Path, config: Mapping[str, Any], state_dict: dict[str, Tensor]) -> None:
    """Write a network; the file appears under its name only when it is complete.

    Args:
        path: the `.safetensors`.
        config: values that JSON can hold.
        state_dict: parameters and buffers by name.

    Raises:
        InputError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with written_whole(path) as partial:
            save_file(state_dict, partial, metadata={"format": FORMAT, "config": json.dumps(config)})
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {first_line(error)}") from error


def read_converted(path: str | os.PathLike[str]) -> Parts:
    """Read the `.safetensors` at `path` that `write_converted` wrote; returns the same as `read_edm_pickle`.

    Raises:
        InputError: the file is missing, damaged or truncated, or holds something else.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise InputError(f"{os.fspath(path)}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Tensors of the file lie at any address. PyTorch rounds otherwise where they are not aligned.
            state_dict = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{os.fspath(path)} is not a safetensors file, or a damaged one") from error
    if metadata.get("format") != FORMAT:
        raise InputError(f"{os.fspath(path)} is not a converted EDM network")
    try:
        config = json.loads(metadata["config"])
    except (KeyError, ValueError, RecursionError) as error:
        raise InputError(f"{os.fspath(path)} holds no configuration") from error
    with naming(path):
        if not isinstance(config, dict):
            raise InputError("the configuration must be a dict")
        return checked_config(config), checked_weights(state_dict)
