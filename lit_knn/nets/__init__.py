"""Networks. Any module `net(z_scaled, noise_label, class_label=None)` can replace them."""

from lit_knn.nets.adm import ADM
from lit_knn.nets.dit import DiT
from lit_knn.nets.song_unet import DDPMpp, NCSNpp
from lit_knn.nets.unet import UNet

__all__ = ["ADM", "DDPMpp", "DiT", "NCSNpp", "UNet"]
