"""Loads network files (EDM's published pickles, safetensors, our own checkpoints) and converts pickles to safetensors.

`load_edm_pickle` and `load_network` make the denoiser. `read_*` return its parts: the constructor arguments that the
file stores (`model_type`, `img_resolution`, `img_channels`, `label_dim`, `sigma_min`, `model_channels`, ...), and the
weights, named as in the published files ("model.enc.16x16_conv.weight"). `python -m lit_knn.edm_checkpoint in.pkl
out.safetensors` converts a published pickle. No code of a file is run.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.checkpoint_file import MODEL_KEY, read_checkpoint_file
from lit_knn.errors import InputError, told_in_one_line
from lit_knn.nets import network_from_config
from lit_knn.nets.architecture import build_network
from lit_knn.nets.precond import EDMPrecond
from lit_knn.nets.published.edm_converted import read_converted, write_converted
from lit_knn.nets.published.edm_pickle import (
    Parts,
    check_sigma,
    checked_config,
    checked_weights,
    naming,
    read_edm_pickle,
)

# Prefix of the inner network's weights in a checkpoint of LitEDM.
OWN_PREFIX = "denoiser.model."
MODEL_PREFIX = "model."
SIGMAS = ("sigma_min", "sigma_max", "sigma_data")
# Layers for augmentation labels, in the published networks and in `UNet`. They have no bias, so without labels they add
# nothing.
AUGMENTATION_WEIGHTS = ("model.map_augment.weight", "model.embedding.augmentation.weight")
# In the published networks, the names of buffers end in one of these words.
BUFFERS = ("resample_filter", "freqs")


# Networks


def load_edm_pickle(path: str | os.PathLike[str], fp16: bool = False) -> EDMPrecond:
    """Make the denoiser of a published `.pkl` without running any of the file's code. See `load_network` for the rest.

    Raises:
        InputError: as `read_edm_pickle`; no published network has this architecture.
    """
    return denoiser_of(path, *read_edm_pickle(path), None, fp16)


def load_network(path: str | os.PathLike[str], net: nn.Module | None = None, fp16: bool = False) -> EDMPrecond:
    """Make the denoiser D(z, σ) of any network file.

    Args:
        path: a published `.pkl`, a `.safetensors` that `convert` wrote, or a `.ckpt` that training `LitEDM` wrote (its
            averaged weights are used).
        net: the architecture, for a `.ckpt` that does not store it; its weights are replaced. None builds the
            architecture that the file stores.
        fp16: compute the network, except its embedding, in float16, as EDM's own code does on GPUs for files with
            `use_fp16`. The weights stay in float32.

    Returns:
        `denoiser(z, sigma, class_label=None)`, on the CPU, in evaluation mode, without gradients. If `net` is None, its
        weights are float32.

    Raises:
        InputError: as `load_network_parts`; the file stores no architecture and `net` is None; the weights do not fit
            the architecture.
    """
    return denoiser_of(path, *load_network_parts(path), net, fp16)


def load_network_to_tune(path: str | os.PathLike[str], net: nn.Module | None = None) -> EDMPrecond:
    """Make the denoiser of any network file for more training, without the layer for augmentation labels.

    Training without augmentation leaves this layer out of all gradients, which distributed training would refuse.

    Args:
        path: as for `load_network`.
        net: the architecture, for instance with another dropout; it gets the file's weights. None builds the
            architecture that the file stores.

    Returns:
        `denoiser(z, sigma, class_label=None)`, on the CPU, in training mode, with gradients. Parameters of `net` that
        had none keep none.

    Raises:
        InputError: as `load_network`.
    """
    config, state_dict = load_network_parts(path)
    weights = {name: value for name, value in state_dict.items() if name not in AUGMENTATION_WEIGHTS}
    if "augment_dim" in config:
        config = {**config, "augment_dim": 0}
    if "architecture" in config:
        told = config["architecture"]
        config = {**config, "architecture": {**told, "options": {**dict(told.get("options") or {}), "augment_dim": 0}}}
    frozen = set() if net is None else {name for name, value in net.named_parameters() if not value.requires_grad}
    denoiser = denoiser_of(path, config, weights, net, False)
    for name, value in denoiser.model.named_parameters():
        value.requires_grad_(name not in frozen)
    return denoiser.train()


def denoiser_of(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    net: nn.Module | None,
    fp16: bool,
) -> EDMPrecond:
    """Make the denoiser of what `load_network_parts` read; see `load_network`."""
    if net is None and not {"model_type", "architecture"} & config.keys():
        raise InputError(f"{os.fspath(path)} does not tell its architecture: give net")
    try:
        with naming(path):
            sigma_data = config.get("sigma_data", 0.5)
            check_sigma("sigma_data", sigma_data)
            denoiser = EDMPrecond(_network_of(config, state_dict) if net is None else net, sigma_data, fp16)
        denoiser.load_state_dict(state_dict, assign=net is None)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{os.fspath(path)} does not fit the architecture: {reason}") from error
    return (denoiser.float() if net is None else denoiser).eval().requires_grad_(False)


def _network_of(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> nn.Module:
    """Build the network without memory or random numbers, because the file has every weight."""
    if "architecture" in config:
        inner = {name.removeprefix(MODEL_PREFIX): value for name, value in state_dict.items()}
        return build_network(config["architecture"], inner)
    num_weights = len(state_dict)
    blocks = config.get("num_blocks")
    if isinstance(blocks, int) and blocks > num_weights:  # Building so many blocks might not end.
        raise InputError(f"num_blocks={blocks} is more than its {num_weights} weights can fill")
    with torch.device("meta"):
        return network_from_config(config)


# Conversion


def convert(in_path: str | os.PathLike[str], out_path: str | os.PathLike[str]) -> Parts:
    """Convert a published EDM pickle to safetensors, with the configuration in the metadata.

    The file appears under its name only when it is complete; an existing file is never replaced.

    Args:
        in_path: the `.pkl`.
        out_path: the `.safetensors` to write.

    Returns:
        The configuration and state dict that were written.

    Raises:
        InputError: as `read_edm_pickle`; the output exists already, cannot be written, or is not named `.safetensors`.
    """
    out_path = Path(out_path)
    if out_path.suffix != ".safetensors":
        raise InputError(f"{out_path}: the output must be named .safetensors")
    if out_path.exists():
        raise InputError(f"{out_path} exists already, and is not replaced")
    if not out_path.parent.is_dir():
        raise InputError(f"{out_path}: no such folder")
    config, state_dict = read_edm_pickle(in_path)
    write_converted(out_path, config, state_dict)
    return config, state_dict


# Parts of any file


def load_network_parts(path: str | os.PathLike[str]) -> Parts:
    """Read configuration and weights from any file that holds an EDM network.

    Args:
        path: a published `.pkl`, a converted `.safetensors`, or a `.ckpt` that training `LitEDM` wrote.

    Returns:
        As `read_own_checkpoint` for a `.ckpt`, otherwise as `read_edm_pickle`.

    Raises:
        InputError: the file is of another kind, or its reader refuses it.
    """
    readers = {".pkl": read_edm_pickle, ".safetensors": read_converted, ".ckpt": read_own_checkpoint}
    suffix = Path(path).suffix
    if suffix not in readers:
        raise InputError(f"{os.fspath(path)}: a network file must be one of {', '.join(readers)}")
    if not Path(path).is_file():
        raise InputError(f"{os.fspath(path)}: no such file")
    return readers[suffix](path)


def read_own_checkpoint(path: str | os.PathLike[str]) -> Parts:
    """Read the network of a checkpoint that training `LitEDM` wrote.

    Its `state_dict` holds the averaged weights (EMA), because the averaging callback stores the current weights
    elsewhere. In names, `denoiser.model.` becomes `model.`; weights outside the denoiser are left out.

    Args:
        path: the `.ckpt`; only plain values and tensors are loaded from it.

    Returns:
        The configuration and the averaged weights. The configuration holds the hyper-parameters `sigma_min`,
        `sigma_max` and `sigma_data`, and for a network of `lit_knn.nets` its `architecture`, see
        `lit_knn.nets.architecture`; checkpoints of earlier versions have `model_type` and the other published arguments
        in its place. For other networks it has neither, so the caller must know the architecture.

    Raises:
        InputError: the file is missing or damaged, names a global that PyTorch refuses in weights, has no denoiser,
            an impossible `sigma_data`, or a weight that is not finite.
    """
    checkpoint = read_checkpoint_file(path)
    with naming(path):
        return _parts_of_own(checkpoint)


def _parts_of_own(checkpoint: dict[Any, Any]) -> Parts:
    if not isinstance(checkpoint.get("state_dict"), dict):
        raise InputError("no state_dict in the checkpoint")
    state_dict = {
        MODEL_PREFIX + name.removeprefix(OWN_PREFIX): value
        for name, value in checkpoint["state_dict"].items()
        if isinstance(name, str) and name.startswith(OWN_PREFIX) and isinstance(value, Tensor)
    }
    if not state_dict:
        raise InputError(f"no parameters named {OWN_PREFIX}*: not a checkpoint of LitEDM")
    hparams, stored = (checkpoint.get(name, {}) for name in ("hyper_parameters", "network_config"))
    if not isinstance(hparams, dict) or not isinstance(stored, dict):
        raise InputError("hyper_parameters and network_config must be dicts")
    config = {name: hparams[name] for name in SIGMAS if name in hparams}
    for name, value in config.items():
        check_sigma(name, value)
    model = checkpoint.get(MODEL_KEY)
    if isinstance(model, dict) and isinstance(model.get("architecture"), dict):
        return {**config, "architecture": model["architecture"]}, checked_weights(state_dict)
    return (checked_config({**config, **stored}) if stored else config), checked_weights(state_dict)


# The command


def describe(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> str:
    """Describe a network in one line: kind, image size, classes and number of parameters."""
    size, classes = config["img_resolution"], config["label_dim"]
    count = sum(value.numel() for name, value in state_dict.items() if not name.endswith(BUFFERS))
    return (
        f"{config['model_type']}, {size}x{size} images of {config['img_channels']} channels, "
        f"{f'{classes} classes' if classes else 'unconditional'}, {count:,} parameters"
    )


def main(args: Sequence[str] | None = None) -> None:
    """Convert one file. Bad input ends with one line and exit status 2."""
    parser = argparse.ArgumentParser(
        prog="lit-knn convert",
        description="Convert a published EDM network (.pkl) to safetensors, executing none of its code.",
    )
    parser.add_argument("input", help="the published .pkl file")
    parser.add_argument("output", help="the .safetensors file to write; must not exist")
    options = parser.parse_args(args)
    with told_in_one_line():
        found = describe(*convert(options.input, options.output))
    print(f"{found} -> {options.output}")


if __name__ == "__main__":
    main()
