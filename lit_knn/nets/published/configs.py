"""Conversion between our networks and the constructor arguments that published EDM checkpoints store."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lit_knn.errors import InputError
from lit_knn.nets.adm import ADM
from lit_knn.nets.residual_unet import ResidualUNet
from lit_knn.nets.song_unet import DDPMpp, NCSNpp

OPTIONS = {
    "img_resolution": "image_size",
    "img_channels": "in_channels",
    "model_channels": "channels",
    "channel_mult": "multipliers",
    "num_blocks": "blocks",
    "attn_resolutions": "attention_at",
    "dropout": "dropout",
    "label_dim": "num_classes",
    "label_dropout": "label_dropout",
    "augment_dim": "augment_dim",
}
# Defaults of the published constructors, for options that a file does not store.
DEFAULTS = {
    "SongUNet": {"model_channels": 128, "channel_mult": [1, 2, 2, 2], "num_blocks": 4, "attn_resolutions": [16]},
    "DhariwalUNet": {
        "model_channels": 192,
        "channel_mult": [1, 2, 3, 4],
        "num_blocks": 3,
        "attn_resolutions": [32, 16, 8],
    },
}
# These options distinguish the two families of SongUNet. DDPM++'s are the published constructor's defaults.
DDPMPP_OPTIONS = {
    "embedding_type": "positional",
    "encoder_type": "standard",
    "decoder_type": "standard",
    "channel_mult_noise": 1,
    "resample_filter": [1, 1],
}
NCSNPP_OPTIONS = {
    "embedding_type": "fourier",
    "encoder_type": "residual",
    "decoder_type": "standard",
    "channel_mult_noise": 2,
    "resample_filter": [1, 3, 3, 1],
}
# The published NCSN++ fixes this value; its constructor has no such argument.
PUBLISHED_FOURIER_SCALE = 16.0
# Options of the preconditioning and of the training precision.
NOT_OF_THE_NETWORK = {"sigma_min", "sigma_max", "sigma_data", "use_fp16"}


def network_from_config(config: Mapping[str, Any]) -> ResidualUNet:
    """Build the network of a published checkpoint, with new weights.

    Args:
        config: published constructor arguments: `model_type` ("SongUNet" or "DhariwalUNet"), `img_resolution`,
            `img_channels`, and any others that are stored. Options of the preconditioning (`sigma_data`, ...) and
            `use_fp16` are ignored: the caller handles the first, and the trainer sets the precision.

    Raises:
        InputError: no published network has this model type, option or combination of options.
    """
    config = dict(config)
    model_type = config.pop("model_type", None)
    if model_type not in DEFAULTS:
        raise InputError(f"model_type must be one of {', '.join(DEFAULTS)}, got {model_type}")
    if config.pop("channel_mult_emb", 4) != 4:
        raise InputError("channel_mult_emb must be 4, as in the published networks")
    net: type[ResidualUNet] = ADM if model_type == "DhariwalUNet" else _song_family(config)
    options: dict[str, Any] = {
        "label_dim": 0,
        "augment_dim": 0,
        "label_dropout": 0.0,
        "dropout": 0.10,
        **DEFAULTS[model_type],
    }
    options |= {name: value for name, value in config.items() if name not in NOT_OF_THE_NETWORK}
    unknown = sorted(options.keys() - OPTIONS.keys())
    if unknown:
        raise InputError(f"{model_type} has no option {unknown[0]}, whose value is {options[unknown[0]]}")
    missing = sorted(OPTIONS.keys() - options.keys())
    if missing:
        raise InputError(f"{model_type} needs the option {missing[0]}")
    arguments = {OPTIONS[name]: value for name, value in options.items()}
    if net is NCSNpp:
        arguments["fourier_scale"] = PUBLISHED_FOURIER_SCALE
    try:
        return net(**arguments)
    except TypeError as error:
        raise InputError(f"{model_type}: an option of the wrong type among {options}") from error


def network_to_config(net: nn.Module) -> dict[str, Any] | None:
    """Describe a network by the arguments that `network_from_config` takes; None for networks of other kinds."""
    families = {DDPMpp: ("SongUNet", DDPMPP_OPTIONS), NCSNpp: ("SongUNet", NCSNPP_OPTIONS), ADM: ("DhariwalUNet", {})}
    if type(net) not in families:
        return None
    model_type, family = families[type(net)]
    return {"model_type": model_type, **family, **{name: getattr(net, option) for name, option in OPTIONS.items()}}


def _song_family(config: dict[str, Any]) -> type[DDPMpp] | type[NCSNpp]:
    """Choose DDPM++ or NCSN++ by the family options in `config`, and remove these options."""
    chosen = {name: config.pop(name, default) for name, default in DDPMPP_OPTIONS.items()}
    if isinstance(chosen["resample_filter"], tuple):
        chosen["resample_filter"] = list(chosen["resample_filter"])
    if chosen == DDPMPP_OPTIONS:
        return DDPMpp
    if chosen == NCSNPP_OPTIONS:
        return NCSNpp
    raise InputError(f"SongUNet: neither DDPM++ nor NCSN++ has the options {chosen}")
