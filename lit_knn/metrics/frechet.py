"""Fréchet distances between sets of images."""

from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance


class PixelFeatures(nn.Module):
    """The pixels themselves as features: (B, *shape) to (B, d)."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.num_features = d

    def forward(self, images: Tensor) -> Tensor:
        """Flatten."""
        return images.flatten(1)


def pixel_frechet_distance(d: int) -> FrechetInceptionDistance:
    """Fréchet distance between the pixels of two sets, ‖m − m'‖² + Tr(C + C' − 2(C C')^½), in model space.

    Cheap and independent of any network, fit for small images such as the digits. It is not FID.

    Args:
        d: flattened dimension of the images.

    Returns:
        A torchmetrics metric: `update(images, real=True)` and `update(images, real=False)` with float images, then
        `compute()`. Real statistics survive `reset()`.
    """
    return FrechetInceptionDistance(feature=PixelFeatures(d), reset_real_features=False)
