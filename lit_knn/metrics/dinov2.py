"""DINOv2, a network whose features metrics compare."""

import os
from functools import cached_property
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, joined_lines
from lit_knn.metrics.feature_networks import NetworkExtractor, sha256_of

# Mean and deviation of each channel, in [0, 1], with which the network was trained.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def resized_by_pillow(pixels: Tensor, side: int) -> Tensor:
    """Resize pixels (B, 3, H, W), uint8, by Pillow's bicubic filter on the CPU: (B, 3, side, side), uint8."""
    from PIL import Image

    resized = pixels.new_empty(len(pixels), side, side, 3, device="cpu")

    for place, image in enumerate(pixels.permute(0, 2, 3, 1).cpu().numpy()):
        picture = Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)
        resized[place] = torch.from_numpy(np.array(picture))

    return resized.permute(0, 3, 1, 2).to(pixels.device)


class DINOv2(NetworkExtractor):
    """DINOv2's ViT-L/14; the Fréchet distance of its features is FD-DINOv2 (Stein et al. 2023, arXiv 2306.04675).

    Pillow resizes the images, as in the authors' `dgm-eval`: its bicubic filter works on bytes, and rounds after the
    rows and again after the columns. PyTorch's filter rounds some bytes differently.
    torch.hub downloads the network's code from facebookresearch/dinov2, and runs it.

    Args:
        weights: a local file of the published weights, `dinov2_vitl14_pretrain.pth`; null downloads them if missing.
    """

    metric = "fd_dinov2"
    num_features = 1024

    def __init__(self, weights: str | PathLike[str] | None = None) -> None:
        self.weights = None if weights is None else Path(weights)

    def _load_network(self) -> nn.Module:
        # xFormers, if it is installed, adds in another order, and so rounds differently.
        os.environ.setdefault("XFORMERS_DISABLED", "1")
        try:
            network = torch.hub.load(
                "facebookresearch/dinov2",
                "dinov2_vitl14",
                pretrained=self.weights is None,
                trust_repo=True,
            )
        except (OSError, RuntimeError, ImportError) as error:
            reason = joined_lines(error)[:200]
            problem = f"torch.hub could not load facebookresearch/dinov2 ({reason})"
            advice = "without network access put a copy of a download folder from a machine that"
            raise InputError(
                f"DINOv2: {problem}; {advice} has it at {torch.hub.get_dir()}"
            ) from error
        if self.weights is not None:
            network.load_state_dict(torch.load(self.weights, map_location="cpu", weights_only=True))
        return network

    def _extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        # The network was trained on images of 224x224 pixels.
        x = resized_by_pillow(pixels, 224).float()
        mean, std = (
            x.new_tensor(values).reshape(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD)
        )
        return self.network((x / 255 - mean) / std), None

    def fingerprint(self) -> str:
        return f"dinov2-vit-l-14 pillow-bicubic {self._identity}"

    @cached_property
    def _identity(self) -> str:
        return "published" if self.weights is None else sha256_of(self.weights)
