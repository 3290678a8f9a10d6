"""Networks out of checkpoint files: EDM's published pickles, their conversion to safetensors, and our own checkpoints.

`python -m lit_knn.edm_checkpoint in.pkl out.safetensors` converts a published pickle, of which nothing is executed.
Every reader returns (config, state dict): the constructor arguments that the file stores (`model_type`,
`img_resolution`, `img_channels`, `label_dim`, `sigma_min`, `model_channels`, ...) and the weights, named as in the
published files ("model.enc.16x16_conv.weight").
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_knn.edm_pickle import Parts, checked_config, naming, read_edm_pickle
from lit_knn.errors import InputError

FORMAT = "lit_knn.edm_network"
# Where LitEDM keeps the preconditioned network, and the network in it.
OWN_PREFIX = "denoiser.model."
SIGMAS = ("sigma_min", "sigma_max", "sigma_data")
# Last part of the names of the published networks' buffers.
BUFFERS = ("resample_filter", "freqs")


# Converted files


def convert(in_path: str | os.PathLike[str], out_path: str | os.PathLike[str]) -> Parts:
    """Convert a published EDM pickle to safetensors, the configuration in the metadata.

    The file appears under its name only when it is complete; an existing one is never replaced.

    Args:
        in_path: the `.pkl`.
        out_path: the `.safetensors` to write.

    Returns:
        What was written, as `read_edm_pickle`.

    Raises:
        InputError: as `read_edm_pickle`; an output that exists already, cannot be written, or is not named
            `.safetensors`.
    """
    out_path = Path(out_path)
    if out_path.suffix != ".safetensors":
        raise InputError(f"{out_path}: the output must be named .safetensors")
    if out_path.exists():
        raise InputError(f"{out_path} exists already, and is not replaced")
    if not out_path.parent.is_dir():
        raise InputError(f"{out_path}: no such folder")
    config, state_dict = read_edm_pickle(in_path)
    _write(out_path, config, state_dict)
    return config, state_dict


def _write(path: Path, config: Mapping[str, Any], state_dict: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(state_dict, partial, metadata={"format": FORMAT, "config": json.dumps(config)})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {_first_line(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_converted(path: str | os.PathLike[str]) -> Parts:
    """Read what `convert` wrote.

    Args:
        path: the `.safetensors`.

    Returns:
        As `read_edm_pickle`.

    Raises:
        InputError: no such file, damaged or truncated, or a safetensors file of something else.
    """
    from safetensors import SafetensorError, safe_open

    _check_is_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state_dict = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
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
        return checked_config(config), state_dict


# Any file


def load_network_parts(path: str | os.PathLike[str]) -> Parts:
    """Read configuration and weights from any file that holds an EDM network.

    Args:
        path: a published `.pkl`, a converted `.safetensors`, or a `.ckpt` that training `LitEDM` wrote.

    Returns:
        As `read_edm_pickle`; of a `.ckpt` as `read_own_checkpoint`.

    Raises:
        InputError: another kind of file, or what its reader says.
    """
    readers = {".pkl": read_edm_pickle, ".safetensors": read_converted, ".ckpt": read_own_checkpoint}
    suffix = Path(path).suffix
    if suffix not in readers:
        raise InputError(f"{os.fspath(path)}: a network file must be one of {', '.join(readers)}")
    return readers[suffix](path)


def read_own_checkpoint(path: str | os.PathLike[str]) -> Parts:
    """Read the network of a checkpoint that training `LitEDM` wrote.

    Its `state_dict` holds the averaged weights (EMA): while training, the averaging callback moves the current ones
    elsewhere. Of these names, `denoiser.model.` becomes `model.`, and what is outside the denoiser is left out.

    Args:
        path: the `.ckpt`; only plain values and tensors of it are loaded.

    Returns:
        The configuration and the averaged weights. The configuration is what the checkpoint holds under
        `network_config` (`LitEDM` writes it for DDPM++, NCSN++ and ADM) and, of its hyper-parameters, `sigma_min`,
        `sigma_max` and `sigma_data`. With another network there is no `model_type`, and who reads the file has to
        know it.

    Raises:
        InputError: no such file, damaged, a global that PyTorch does not allow in weights, or no denoiser in it.
    """
    _check_is_file(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # Damaged files raise anything.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        problem = f"names the global {refused[1]}, which is refused" if refused else "is damaged, or no checkpoint"
        raise InputError(f"{os.fspath(path)} {problem}") from error
    with naming(path):
        return _parts_of_own(checkpoint)


def _parts_of_own(checkpoint: object) -> Parts:
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise InputError("no state_dict in the checkpoint")
    state_dict = {
        "model." + name.removeprefix(OWN_PREFIX): value
        for name, value in checkpoint["state_dict"].items()
        if isinstance(name, str) and name.startswith(OWN_PREFIX) and isinstance(value, Tensor)
    }
    if not state_dict:
        raise InputError(f"no parameters named {OWN_PREFIX}*: not a checkpoint of LitEDM")
    hparams, stored = (checkpoint.get(name, {}) for name in ("hyper_parameters", "network_config"))
    if not isinstance(hparams, dict) or not isinstance(stored, dict):
        raise InputError("hyper_parameters and network_config must be dicts")
    config = {name: hparams[name] for name in SIGMAS if name in hparams}
    return (checked_config({**config, **stored}) if stored else config), state_dict


def _check_is_file(path: str | os.PathLike[str]) -> None:
    if not Path(path).is_file():
        raise InputError(f"{os.fspath(path)}: no such file")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# The command


def describe(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> str:
    """One line: network kind, image size, classes and number of parameters."""
    size, classes = config["img_resolution"], config["label_dim"]
    count = sum(value.numel() for name, value in state_dict.items() if not name.endswith(BUFFERS))
    return (
        f"{config['model_type']}, {size}x{size} images of {config['img_channels']} channels, "
        f"{f'{classes} classes' if classes else 'unconditional'}, {count:,} parameters"
    )


def main(args: Sequence[str] | None = None) -> None:
    """Convert one file; bad input ends with one line and exit status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_knn.edm_checkpoint",
        description="Convert a published EDM network (.pkl) to safetensors, executing none of its code.",
    )
    parser.add_argument("input", help="the published .pkl file")
    parser.add_argument("output", help="the .safetensors file to write; must not exist")
    options = parser.parse_args(args)
    try:
        found = describe(*convert(options.input, options.output))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print(f"{found} -> {options.output}")


if __name__ == "__main__":
    main()
