"""Networks of convolutions alone. Without attention and normalisation, every pixel sees only its surroundings.

The analytic models of `docs/analytic.md` predict what such networks learn. Group norm would tell every pixel a
statistic of the whole image.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_knn.errors import InputError
from lit_knn.nets.layers import MOST_BLOCKS
from lit_knn.nets.unet import Downsample, NoiseEmbedding, Upsample


class ConvolutionalNet(nn.Module):
    """Checks what both networks need, and maps images to images of the same shape."""

    def __init__(self, in_channels: int, channels: int, num_classes: int, augment_dim: int) -> None:
        super().__init__()
        name = type(self).__name__
        if min(in_channels, channels) < 1:
            raise InputError(f"{name}: in_channels and channels must be at least 1, got {in_channels} and {channels}")
        if min(num_classes, augment_dim) < 0:
            raise InputError(
                f"{name}: num_classes={num_classes} and augment_dim={augment_dim} must be at least 0, which is for none"
            )
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.augment_dim = augment_dim
        self.embedding = NoiseEmbedding(channels, 4 * channels, num_classes, augment_dim)
        self.conv_in = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.conv_out = nn.Conv2d(channels, in_channels, 3, padding=1)
        # With zero weights, an untrained preconditioned network returns c_skip·z.
        nn.init.zeros_(self.conv_out.weight)

    factor = 1
    """The sides of an image must be divisible by this number."""

    def forward(
        self,
        z_scaled: Tensor,
        noise_label: Tensor,
        class_label: Tensor | None = None,
        augment_label: Tensor | None = None,
    ) -> Tensor:
        """Map z_scaled (B, C, H, W), noise_label (B,) = ln(t)/4 and class_label (B,) int to (B, C, H, W).

        `augment_label` is (B, augment_dim); None, like zeros, means that nothing was augmented.

        Raises:
            InputError: another number of channels, or sides that cannot be halved as often as needed.
        """
        name, shape = type(self).__name__, tuple(z_scaled.shape[1:])
        if len(shape) != 3 or shape[0] != self.in_channels:
            raise InputError(f"{name}: images must be ({self.in_channels}, H, W) as in_channels says, but are {shape}")
        if any(side % self.factor for side in shape[1:]):
            raise InputError(f"{name}: image sides {shape[1]}x{shape[2]} are not divisible by {self.factor}")
        embedding = self.embedding(noise_label, class_label, augment_label)
        return self.conv_out(self._features(self.conv_in(z_scaled), embedding))

    def _features(self, h: Tensor, embedding: Tensor) -> Tensor:
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

    Raises:
        InputError: an option is out of its range.
    """

    def __init__(
        self, in_channels: int = 3, channels: int = 64, layers: int = 8, num_classes: int = 0, augment_dim: int = 0
    ) -> None:
        super().__init__(in_channels, channels, num_classes, augment_dim)
        if not 1 <= layers <= MOST_BLOCKS:
            raise InputError(f"ConvResNet: layers must be 1 to {MOST_BLOCKS}, got {layers}")
        self.layers = nn.ModuleList(Layer(channels, channels, 4 * channels) for _ in range(layers))

    def _features(self, h: Tensor, embedding: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + layer(h, embedding)
        return h


class ConvUNet(ConvolutionalNet):
    """U-Net of convolutions alone: two 3×3 layers with zero padding at each resolution, on the way down and up.

    Args:
        in_channels: channels of the images, 3 for colour, 1 for grey.
        channels: width at full resolution.
        multipliers: width at each resolution in units of `channels`; each entry after the first halves the
            image, whose sides must be divisible by 2^(entries − 1).
        num_classes: number of class labels, 0 for an unconditional network.
        augment_dim: width of the augmentation labels, 0 for none.

    Raises:
        InputError: an option is out of its range.
    """

    def __init__(
        self,
        in_channels: int = 3,
        channels: int = 32,
        multipliers: Sequence[int] = (1, 2, 4),
        num_classes: int = 0,
        augment_dim: int = 0,
    ) -> None:
        super().__init__(in_channels, channels, num_classes, augment_dim)
        if not multipliers or min(multipliers) < 1:
            raise InputError(f"ConvUNet: multipliers must be numbers of at least 1, got {list(multipliers)}")
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

    def _features(self, h: Tensor, embedding: Tensor) -> Tensor:
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
