"""Safetensors files of models: the weights, and in the metadata all that is needed to build the model."""

import json
import os
from pathlib import Path

from lit_knn.atomic_files import written_whole
from lit_knn.errors import InputError, first_line
from lit_knn.generative_models import GenerativeModel
from lit_knn.hand_over.parts import Parts

WEIGHTS_NAME = "model.safetensors"
FORMAT, VERSION = "lit_knn.generative_model", "1"
# A description has a few hundred characters.
MOST_CHARACTERS = 1_000_000


def write_exported(path: Path, model: GenerativeModel) -> None:
    """Write a model; the file appears under its name only when it is complete.

    Raises:
        InputError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Two names may share a tensor, which the format does not allow.
    weights = {name: value.detach().cpu().clone().contiguous() for name, value in model.net.state_dict().items()}
    metadata = {"format": FORMAT, "format_version": VERSION, "model": json.dumps(model.description())}
    try:
        with written_whole(path) as partial:
            save_file(weights, partial, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {first_line(error)}") from error


def metadata_of(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read the metadata of a safetensors file.

    Raises:
        InputError: the file is missing, damaged or truncated.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise InputError(f"{os.fspath(path)}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{os.fspath(path)} is not a safetensors file, or a damaged one") from error


def read_exported(path: str | os.PathLike[str]) -> Parts:
    """Read a file of `write_exported`.

    Raises:
        InputError: the file is missing, damaged, of another kind or of a later version.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    metadata = metadata_of(path)
    if metadata.get("format") != FORMAT:
        raise InputError(f"{os.fspath(path)} is not a model that lit_knn exported")
    if metadata.get("format_version") != VERSION:
        found = metadata.get("format_version")
        raise InputError(f"{os.fspath(path)} has format version {found!r:.40}; this version of lit_knn reads {VERSION}")
    text = metadata.get("model", "")
    try:
        description = json.loads(text) if len(text) <= MOST_CHARACTERS else None
        weights = load_file(path)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{os.fspath(path)} holds no description of its model") from error
    except (OSError, SafetensorError) as error:
        raise InputError(f"{os.fspath(path)} is not a safetensors file, or a damaged one") from error
    if not isinstance(description, dict):
        raise InputError(f"{os.fspath(path)} holds no description of its model")
    return Parts(description, weights)
