"""Networks: any module `net(z_scaled, noise_label, class_label=None)` can take their place."""

from lit_knn.nets.unet import UNet

__all__ = ["UNet"]
