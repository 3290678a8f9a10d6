"""Translates the constructor arguments that published EDM checkpoints store into architectures of our networks."""

from collections.abc import Mapping
from inspect import signature

from lit_knn.common.errors import InputError
from lit_knn.nets.architecture import KNOWN, Architecture

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
SHARED = {"label_dim": 0, "augment_dim": 0, "label_dropout": 0.0, "dropout": 0.10}
DEFAULTS: dict[str, dict[str, object]] = {
    "SongUNet": {
        **SHARED, "model_channels": 128, "channel_mult": [1, 2, 2, 2], "num_blocks": 4, "attn_resolutions": [16],
    },
    "DhariwalUNet": {
        **SHARED, "model_channels": 192, "channel_mult": [1, 2, 3, 4], "num_blocks": 3, "attn_resolutions": [32, 16, 8],
    },
}  # fmt: skip
# These options distinguish the two families of SongUNet. DDPM++'s are the published constructor's defaults.
DDPMPP_OPTIONS = {
    "embedding_type": "positional",
    "encoder_type": "standard",
    "decoder_type": "standard",
    "channel_mult_noise": 1,
    "resample_filter": [1, 1],
}
NCSNPP_OPTIONS = DDPMPP_OPTIONS | {
    "embedding_type": "fourier",
    "encoder_type": "residual",
    "channel_mult_noise": 2,
    "resample_filter": [1, 3, 3, 1],
}
# The published NCSN++ fixes this value; its constructor has no such argument.
PUBLISHED_FOURIER_SCALE = 16.0
# Options of the preconditioning and of the training precision.
NOT_OF_THE_NETWORK = {"sigma_min", "sigma_max", "sigma_data", "use_fp16"}


def architecture_from_config(config: Mapping[str, object]) -> Architecture:
    """Describe the network of a published checkpoint as `lit_knn.nets.architecture.architecture_of` does.

    Args:
        config: published constructor arguments: `model_type` ("SongUNet" or "DhariwalUNet"), `img_resolution`,
            `img_channels`, and any others that are stored. Options of the preconditioning (`sigma_data`, ...) and
            `use_fp16` are ignored: the caller handles the first, and the trainer sets the precision.
    """
    stored = {name: value for name, value in config.items() if name not in NOT_OF_THE_NETWORK}
    model_type = stored.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        raise InputError(f"model_type must be one of {', '.join(DEFAULTS)}, got {model_type!s:.80}")
    # This option can be left out, because the weights would not fit an embedding of another width.
    stored.pop("channel_mult_emb", None)

    name = "ADM"
    if model_type == "SongUNet":
        name = _song_family(stored)

    stored = DEFAULTS[model_type] | stored
    # The names that only one of the two has: an option that is missing or ignored could give another network with the
    # same weights.
    odd = stored.keys() ^ OPTIONS.keys()
    if odd:
        names = ", ".join(sorted(odd))
        raise InputError(f"{model_type}: options are missing or unknown: {names:.300}")

    options: dict[str, object] = {}
    for option, parameter in signature(KNOWN[name]).parameters.items():
        options[option] = parameter.default
    for option in stored:
        options[OPTIONS[option]] = stored[option]
    if name == "NCSNpp":
        options["fourier_scale"] = PUBLISHED_FOURIER_SCALE
    return {"class": name, "options": options}


def _song_family(stored: dict[str, object]) -> str:
    """Choose DDPM++ or NCSN++ by the family options in `stored`, and remove these options."""
    chosen = {}
    for name, default in DDPMPP_OPTIONS.items():
        value = stored.pop(name, default)
        if isinstance(value, tuple):
            value = list(value)
        chosen[name] = value

    for name, options in (("DDPMpp", DDPMPP_OPTIONS), ("NCSNpp", NCSNPP_OPTIONS)):
        if chosen == options:
            return name
    raise InputError(f"SongUNet: neither DDPM++ nor NCSN++ has the options {chosen!r:.300}")
