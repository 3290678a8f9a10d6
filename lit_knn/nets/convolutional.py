"""Networks with only convolutions. Without attention and normalisation, every pixel sees only its surroundings.

The analytic models of `docs/analytic.md` predict what such networks learn. Group norm would give every pixel a
statistic of the whole image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_knn.nets.base import ImageNetwork, check_options
from lit_knn.nets.unet import Downsample, NoiseEmbedding, Upsample


@dataclass(eq=False, repr=False)
class ConvolutionalNet(ImageNetwork):
    """What both networks share: the embedding, and the first and the last convolution."""

    in_channels: int
    channels: int
    num_classes: int
    augment_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.embedding = NoiseEmbedding(self.channels, 4 * self.channels, self.num_classes, self.augment_dim)
        self.conv_in = nn.Conv2d(self.in_channels, self.channels, 3, padding=1)
        self.conv_out = nn.Conv2d(self.channels, self.in_channels, 3, padding=1)
        # With zero weights, an untrained preconditioned network returns c_skip·z.
        nn.init.zeros_(self.conv_out.weight)

    def forward(
        self,
        z_scaled: Tensor,
        noise_label: Tensor,
        class_label: Tensor | None = None,
        augment_label: Tensor | None = None,
    ) -> Tensor:
        """Map images and labels to images of the same shape, as `UNet` does."""
        self.check_shape(z_scaled.shape[1:])
        embedding = self.embedding(noise_label, class_label, augment_label)
        return self.conv_out(self.features(self.conv_in(z_scaled), embedding))

    def features(self, h: Tensor, embedding: Tensor) -> Tensor:
        """Map (B, channels, H, W) and the embedding (B, 4·channels) to (B, channels, H, W)."""
        raise NotImplementedError


class ConvResNet(ConvolutionalNet):
    """Residual network at full resolution: h ← h + SiLU(conv(h + embedding)), 3×3 with zero padding, in each layer.

    It is translation-equivariant except at the borders. An output pixel depends on 2·(layers + 2) + 1 pixels of each
    axis. It is like the ResNet of Kamb and Ganguli 2024 (arXiv 2412.20292): their public code has eight layers of 256
    channels and ReLU.

    Args:
        in_channels: channels of the images, 3 for colour, 1 for grey.
        channels: width.
        layers: residual layers, 1 to 100.
        num_classes: number of class labels, 0 for an unconditional network.
        augment_dim: width of the augmentation labels, 0 for none.
    """

    def __init__(
        self, in_channels: int = 3, channels: int = 64, layers: int = 8, num_classes: int = 0, augment_dim: int = 0
    ) -> None:
        check_options("ConvResNet", {"layers": layers})
        super().__init__(in_channels, channels, num_classes, augment_dim)
        self.layers = nn.ModuleList(Layer(channels, channels, 4 * channels) for _ in range(layers))

    def features(self, h: Tensor, embedding: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + layer(h, embedding)
        return h


class ConvUNet(ConvolutionalNet):
    """U-Net with only convolutions: two 3×3 layers with zero padding at each resolution, on the way down and up.

    Args:
        in_channels: channels of the images, 3 for colour, 1 for grey.
        channels: width at full resolution.
        multipliers: width at each resolution in units of `channels`; each entry after the first halves the
            image, whose sides must be divisible by 2^(entries − 1).
        num_classes: number of class labels, 0 for an unconditional network.
        augment_dim: width of the augmentation labels, 0 for none.
    """

    def __init__(
        self,
        in_channels: int = 3,
        channels: int = 32,
        multipliers: Sequence[int] = (1, 2, 4),
        num_classes: int = 0,
        augment_dim: int = 0,
    ) -> None:
        self.multipliers = list(multipliers)
        super().__init__(in_channels, channels, num_classes, augment_dim)
        self.factor = 2 ** (len(multipliers) - 1)
        widths, features = [channels * m for m in multipliers], 4 * channels
        before = [channels, *widths[:-1]]
        self.down = nn.ModuleList(TwoLayers(*pair, features) for pair in zip(before, widths, strict=True))
        self.downsample = nn.ModuleList(Downsample(width) for width in widths[:-1])
        self.upsample = nn.ModuleList(Upsample(width) for width in reversed(widths[1:]))
        self.up = nn.ModuleList(
            TwoLayers(coarse + fine, fine, features) for fine, coarse in reversed(list(pairwise(widths)))
        )
        self.last = nn.Conv2d(widths[0], channels, 1) if widths[0] != channels else nn.Identity()

    def features(self, h: Tensor, embedding: Tensor) -> Tensor:
        skips = []
        for block, halve in zip(self.down[:-1], self.downsample, strict=True):
            h = block(h, embedding)
            skips.append(h)
            h = halve(h, embedding)
        h = self.down[-1](h, embedding)
        for double, block in zip(self.upsample, self.up, strict=True):
            h = block(torch.cat([double(h, embedding), skips.pop()], 1), embedding)
        return self.last(h)


class Layer(nn.Module):
    """Adds the embedding, convolves and applies SiLU."""

    def __init__(self, in_width: int, width: int, features: int) -> None:
        super().__init__()
        self.shift = nn.Linear(features, in_width)
        self.conv = nn.Conv2d(in_width, width, 3, padding=1)

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        """Map (B, in_width, H, W) and the embedding (B, features) to (B, width, H, W)."""
        return F.silu(self.conv(h + self.shift(embedding)[:, :, None, None]))


class TwoLayers(nn.Module):
    """Two layers; the second is residual."""

    def __init__(self, in_width: int, width: int, features: int) -> None:
        super().__init__()
        self.first = Layer(in_width, width, features)
        self.second = Layer(width, width, features)

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        """Map (B, in_width, H, W) and the embedding (B, features) to (B, width, H, W)."""
        h = self.first(h, embedding)
        return h + self.second(h, embedding)
