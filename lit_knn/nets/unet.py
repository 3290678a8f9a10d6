"""A compact U-Net for the demo, small photographs and the tests: images of any size and channel count."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_knn.nets.base import NO_CLASS, ImageNetwork, NumberOfData, NumbersOfData
from lit_knn.nets.layers import zero_


@dataclass(eq=False, repr=False)
class UNet(ImageNetwork):
    """Residual U-Net with adaptive group norm and self-attention at the coarsest resolution.

    The last convolution starts at zero, so that an untrained preconditioned network returns c_skip·z.

    Args:
        in_channels: channels of the images, 3 for colour, 1 for grey.
        channels: width at full resolution.
        multipliers: width at each resolution in units of `channels`; each entry after the first halves the
            image. An odd side is rounded up.
        blocks: residual blocks per resolution.
        dropout: dropout probability inside the blocks (the paper trains with 0.3 on CIFAR-10).
        num_classes: number of class labels, 0 for an unconditional network.
        augment_dim: width of the augmentation labels, 0 for none.
    """

    in_channels: NumberOfData = 3
    channels: int = 32
    multipliers: NumbersOfData = (1, 2, 2)
    blocks: int = 2
    dropout: float = 0.0
    num_classes: NumberOfData = 0
    augment_dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.multipliers = list(self.multipliers)
        widths = [self.channels * m for m in self.multipliers]
        embedding = 4 * self.channels
        self.embedding = NoiseEmbedding(
            self.channels, embedding, self.num_classes, self.augment_dim
        )
        block = partial(ResBlock, embedding=embedding, dropout=self.dropout)

        self.conv_in = nn.Conv2d(self.in_channels, widths[0], 3, padding=1)
        self.down = nn.ModuleList()
        width = widths[0]
        skips = [width]
        for level, next_width in enumerate(widths):
            if level > 0:
                self.down.append(Downsample(width))
                skips.append(width)
            for _ in range(self.blocks):
                self.down.append(block(width, next_width))
                width = next_width
                skips.append(width)

        self.middle = nn.ModuleList([block(width, width), Attention(width), block(width, width)])

        self.up = nn.ModuleList()
        for level, next_width in reversed(list(enumerate(widths))):
            for _ in range(self.blocks + 1):
                self.up.append(block(width + skips.pop(), next_width))
                width = next_width
            if level > 0:
                self.up.append(Upsample(width))

        self.norm_out = _norm(width)
        self.conv_out = zero_(nn.Conv2d(width, self.in_channels, 3, padding=1))

    def forward(
        self,
        z_scaled: Tensor,
        noise_label: Tensor,
        class_label: Tensor | None = None,
        augment_label: Tensor | None = None,
    ) -> Tensor:
        """Map z_scaled (B, C, H, W), noise_label (B,) = ln(t)/4 and class_label (B,) int to (B, C, H, W).

        `augment_label` is (B, augment_dim); None, like zeros, means that nothing was augmented.
        """
        self.check_shape(z_scaled.shape[1:])
        embedding = self.embedding(noise_label, class_label, augment_label)

        h = self.conv_in(z_scaled)
        skips = [h]
        for layer in self.down:
            h = layer(h, embedding)
            skips.append(h)

        for layer in self.middle:
            h = layer(h, embedding)

        for layer in self.up:
            if isinstance(layer, Upsample):
                # The size before the halving, at which the next skip was taken.
                h = layer(h, skips[-1].shape[2:])
            else:
                h = layer(torch.cat([h, skips.pop()], 1), embedding)
        return self.conv_out(F.silu(self.norm_out(h)))


class Waves(nn.Module):
    """Sines and cosines of the noise label at `number` frequencies from 1 down to 1/30 radians per unit of the label.

    The label ln(t)/4 spans 2.65 units from t = 0.002 to 80, and one step of an 11-level grid takes up to 0.53 units.
    To a consistency model, neighbouring levels must look nearly alike (Song & Dhariwal 2023, Section 3.1), so no
    frequency is above 1.
    """

    frequencies: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        # No file stores these numbers, so compute them on the CPU even if the network is built on the meta device.
        frequencies = torch.linspace(0, -math.log(30.0), number, device="cpu").exp()
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, noise_label: Tensor) -> Tensor:
        """Map (B,) to (B, 2·number)."""
        angles = noise_label.unsqueeze(1) * self.frequencies.to(noise_label.device)
        return torch.cat([angles.sin(), angles.cos()], 1)


class NoiseEmbedding(nn.Module):
    """Embeds the noise label by sines, cosines and an MLP. Adds learned vectors for class and augmentation labels."""

    def __init__(self, features: int, width: int, num_classes: int, augment_dim: int) -> None:
        super().__init__()
        half = max(features // 2, 1)
        self.waves = Waves(half)
        self.mlp = nn.Sequential(nn.Linear(2 * half, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(num_classes, width) if num_classes > 0 else None
        self.augmentation = nn.Linear(augment_dim, width, bias=False) if augment_dim > 0 else None

    def forward(
        self, noise_label: Tensor, class_label: Tensor | None, augment_label: Tensor | None
    ) -> Tensor:
        """Map noise (B,), classes (B,) or None, and augmentations (B, augment_dim) or None to (B, width).

        A class `NO_CLASS` is like None.
        """
        # Half precision would merge neighbouring noise levels of a fine grid.
        with torch.autocast(noise_label.device.type, enabled=False):
            embedding = self.mlp(self.waves(noise_label))
            if self.classes is not None and class_label is not None:
                # Only `NO_CLASS` is replaced. Other numbers that are no class still make the embedding raise an error.
                unlabelled = class_label == NO_CLASS
                vectors = self.classes(class_label.masked_fill(unlabelled, 0))
                embedding = embedding + vectors.masked_fill(unlabelled[:, None], 0)
            if self.augmentation is not None and augment_label is not None:
                embedding = embedding + self.augmentation(augment_label)
            return F.silu(embedding)


class ResBlock(nn.Module):
    """Two convolutions with group norm. The embedding scales and shifts the second norm."""

    def __init__(self, in_width: int, width: int, embedding: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = _norm(in_width)
        self.conv1 = nn.Conv2d(in_width, width, 3, padding=1)
        self.modulation = nn.Linear(embedding, 2 * width)
        self.norm2 = _norm(width)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = zero_(nn.Conv2d(width, width, 3, padding=1))
        self.skip = nn.Conv2d(in_width, width, 1) if in_width != width else nn.Identity()

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        """Map (B, in_width, H, W) to (B, width, H, W)."""
        scale, shift = self.modulation(embedding)[:, :, None, None].chunk(2, dim=1)
        out = self.norm2(self.conv1(F.silu(self.norm1(h)))) * (1 + scale) + shift
        return self.skip(h) + self.conv2(self.dropout(F.silu(out)))


class Attention(nn.Module):
    """Single-head self-attention over the positions of the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = zero_(nn.Conv2d(width, width, 1))

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        """Map (B, width, H, W) to the same shape; the embedding is not used."""
        q, k, v = self.qkv(self.norm(h)).flatten(2).transpose(1, 2).chunk(3, dim=2)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(h.shape)
        return h + self.out(attended)


class Downsample(nn.Module):
    """Halves the size of the image with a strided convolution; odd sides are rounded up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2, padding=1)

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        """Map (B, width, H, W) to (B, width, ⌈H/2⌉, ⌈W/2⌉); the embedding is not used."""
        return self.conv(h)


class Upsample(nn.Module):
    """Doubles the size of the image by repeating pixels, and then convolves it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, h: Tensor, size: Sequence[int]) -> Tensor:
        """Map (B, width, H, W) to (B, width, *size), where a side of `size` is 2H or 2H − 1."""
        return self.conv(F.interpolate(h, tuple(size), mode="nearest"))


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(width, 8), width)
