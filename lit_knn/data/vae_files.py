"""Loads the variational autoencoders of the library `diffusers`, from a folder or from the Hub."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from lit_knn.common.errors import InputError, reading
from lit_knn.data.hugging_face import HUB

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL


def load_vae(path: str) -> "AutoencoderKL":
    """Load an autoencoder in float32, for evaluation.

    Args:
        path: a folder that `save_pretrained` wrote; or hf://user/name for one of the Hub, perhaps with a folder in it,
            as hf://user/name/vae.
    """
    import diffusers

    name, folder = str(Path(path).expanduser()), ""
    if path.startswith(HUB):
        parts = path.removeprefix(HUB).split("/")
        name, folder = "/".join(parts[:2]), "/".join(parts[2:])
    elif not Path(name, "config.json").is_file():
        rule = "a folder that save_pretrained of diffusers wrote, or hf://user/name of the Hub"
        raise InputError(f"the autoencoder {path} is not {rule}")

    with reading(path, " as an AutoencoderKL of diffusers"):
        kind = diffusers.AutoencoderKL.load_config(name, subfolder=folder)["_class_name"]
        if kind != "AutoencoderKL":
            raise InputError(f"the autoencoder {path} is of class {kind}, not AutoencoderKL")
        # The other way of loading needs a further library.
        vae = diffusers.AutoencoderKL.from_pretrained(
            name, subfolder=folder, low_cpu_mem_usage=False
        )
        return vae.float().eval().requires_grad_(False)


def hash_of_weights(vae: "AutoencoderKL") -> str:
    """Return a hash of the weights and the configuration that decide how images are encoded, 64 digits."""
    factors = vae.config["scaling_factor"], vae.config["shift_factor"]
    digest = hashlib.sha256(f"{factors}".encode())
    for name, values in vae.state_dict().items():
        digest.update(name.encode())
        digest.update(values.cpu().contiguous().numpy())
    return digest.hexdigest()
