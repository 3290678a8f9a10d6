"""Networks. Any module `net(z_scaled, noise_label, class_label=None)` can replace them."""

from lit_knn.nets.adm import ADM
from lit_knn.nets.dit import DiT
from lit_knn.nets.song_unet import DDPMpp, NCSNpp
from lit_knn.nets.unet import UNet

__all__ = ["ADM", "DDPMpp", "DiT", "NCSNpp", "UNet"]


def __getattr__(name: str) -> object:
    """Import `Diffusers` when it is first asked for, because it needs the extra `hub`."""
    if name == "Diffusers":
        from lit_knn.nets.diffusers_model import Diffusers

        return Diffusers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
