"""Base class of the published networks. It has the U-shape of residual blocks, module names and input checks."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_knn.deferred_checks import refuse
from lit_knn.errors import InputError
from lit_knn.guidance import NO_CLASS
from lit_knn.nets.layers import MOST_BLOCKS, Direction, ResidualBlock


class ResidualUNet(nn.Module):
    """Encoder and decoder of residual blocks. Subclasses add the embedding and the output.

    Modules are named as in the published EDM checkpoints (`enc.16x16_block0.conv0`, `dec.8x8_in0.qkv`, ...). `ADM`
    documents the arguments.
    """

    block: ClassVar[type[ResidualBlock]]
    taps: ClassVar[tuple[float, ...]]  # low-pass filter of all resampling
    last_decoder_block_attends_alone: ClassVar[bool]

    def __init__(
        self,
        image_size: int,
        in_channels: int,
        channels: int,
        multipliers: Sequence[int],
        blocks: int,
        attention_at: Sequence[int],
        dropout: float,
        num_classes: int,
        label_dropout: float,
        augment_dim: int,
    ) -> None:
        super().__init__()
        self._check_options(image_size, in_channels, channels, multipliers, blocks)
        for name, probability in (("dropout", dropout), ("label_dropout", label_dropout)):
            if not 0 <= probability < 1:
                raise InputError(f"{type(self).__name__}: {name} must be in [0, 1), got {probability}")
        for name, count in (("num_classes", num_classes), ("augment_dim", augment_dim)):
            if count < 0:
                raise InputError(f"{type(self).__name__}: {name} must be at least 0, got {count}")
        self.image_size = image_size
        self.in_channels = in_channels
        self.channels = channels
        self.num_classes = num_classes
        self.label_dropout = label_dropout
        self.augment_dim = augment_dim
        self.embedding_width = 4 * channels
        self.multipliers = list(multipliers)
        self.widths = [channels * m for m in multipliers]
        self.blocks = blocks
        self.attention_at = sorted(attention_at)
        self.dropout = dropout

    def _check_options(
        self, image_size: int, in_channels: int, channels: int, multipliers: Sequence[int], blocks: int
    ) -> None:
        name = type(self).__name__
        if not multipliers or min(in_channels, blocks, *multipliers) < 1:
            raise InputError(
                f"{name}: in_channels, blocks and multipliers must be at least 1, got "
                f"{in_channels}, {blocks} and {list(multipliers)}"
            )
        if blocks > MOST_BLOCKS:
            raise InputError(f"{name}: blocks must be at most {MOST_BLOCKS}, got {blocks}")
        if channels < 4 or channels % 2:
            raise InputError(f"{name}: channels must be even and at least 4, got {channels}")
        factor = 2 ** (len(multipliers) - 1)
        if image_size < factor or image_size % factor:
            raise InputError(
                f"{name}: image_size must be a multiple of {factor} with {len(multipliers)} multipliers, "
                f"got {image_size}"
            )

    def heads(self, width: int) -> int:
        """Number of attention heads in a block of `width` channels."""
        raise NotImplementedError

    def embed(self, noise_label: Tensor, classes: Tensor | None, augment_label: Tensor | None) -> Tensor:
        """Map noise (B,), one-hot classes (B, classes) or None, augmentations (B, features) or None to (B, width)."""
        raise NotImplementedError

    def output(self, h: Tensor) -> Tensor:
        """Map the last features (B, widths[0], H, W) to the image (B, in_channels, H, W)."""
        raise NotImplementedError

    def _make_block(
        self, in_width: int, width: int, *, direction: Direction | None = None, attends: bool = False
    ) -> ResidualBlock:
        return self.block(
            in_width,
            width,
            self.embedding_width,
            direction=direction,
            taps=self.taps,
            heads=self.heads(width) if attends else 0,
            dropout=self.dropout,
        )

    def _build_encoder_and_decoder(self, stem_width: int) -> None:
        width = stem_width
        sides = [self.image_size >> level for level in range(len(self.widths))]
        self.stem = f"{self.image_size}x{self.image_size}_conv"
        self.enc = nn.ModuleDict({self.stem: nn.Conv2d(self.in_channels, width, 3, padding=1)})
        skips = [width]
        for side, next_width in zip(sides, self.widths, strict=True):
            if side < self.image_size:
                self.enc[f"{side}x{side}_down"] = self._make_block(width, width, direction="down")
                skips.append(width)
            for i in range(self.blocks):
                attends = side in self.attention_at
                self.enc[f"{side}x{side}_block{i}"] = self._make_block(width, next_width, attends=attends)
                width = next_width
                skips.append(width)
        self.downwards = [name for name in self.enc if name != self.stem]

        self.dec = nn.ModuleDict()
        for side, next_width in zip(reversed(sides), reversed(self.widths), strict=True):
            if side == sides[-1]:
                self.dec[f"{side}x{side}_in0"] = self._make_block(width, width, attends=True)
                self.dec[f"{side}x{side}_in1"] = self._make_block(width, width)
            else:
                self.dec[f"{side}x{side}_up"] = self._make_block(width, width, direction="up")
            for i in range(self.blocks + 1):
                attends = side in self.attention_at and (i == self.blocks or not self.last_decoder_block_attends_alone)
                self.dec[f"{side}x{side}_block{i}"] = self._make_block(width + skips.pop(), next_width, attends=attends)
                width = next_width
        self.upwards = list(self.dec)

    def encode(self, image: Tensor, embedding: Tensor) -> list[Tensor]:
        """Return the features after every encoder step, the coarsest last."""
        features = [self.enc[self.stem](image)]
        for name in self.downwards:
            features.append(self.enc[name](features[-1], embedding))
        return features

    def decode(self, features: list[Tensor], embedding: Tensor) -> Tensor:
        """Map the encoder's features to (B, widths[0], H, W). This call empties the list of features."""
        h = features[-1]
        for name in self.upwards:
            joins_features = "_block" in name
            h = self.dec[name](torch.cat([h, features.pop()], 1) if joins_features else h, embedding)
        return h

    def forward(
        self,
        z_scaled: Tensor,
        noise_label: Tensor,
        class_label: Tensor | None = None,
        augment_label: Tensor | None = None,
    ) -> Tensor:
        """Map z_scaled (B, C, H, W) at noise_label (B,) to (B, C, H, W).

        Args:
            z_scaled: images divided by about their standard deviation.
            noise_label: ln(t)/4, float.
            class_label: (B,) integers, or (B, num_classes) float. A row of zeros, or the integer `NO_CLASS`, is an item
                without label; None means that no item has a label. On a GPU, integers wait for a range
                check; floats do not.
            augment_label: (B, augment_dim) float; zeros or None mean that nothing was augmented.

        Raises:
            InputError: images of another size or channel count, labels out of range or of another width.
        """
        self._check_images(z_scaled)
        classes = self._classes(class_label, len(z_scaled))
        augmentations = self._augmentations(augment_label, len(z_scaled))
        with torch.autocast(z_scaled.device.type, enabled=False):  # the noise level needs more digits than bf16 has
            embedding = self.embed(noise_label, classes, augmentations)
        return self.output(self.decode(self.encode(z_scaled, embedding), embedding))

    def _check_images(self, z_scaled: Tensor) -> None:
        name = type(self).__name__
        if z_scaled.ndim != 4:
            raise InputError(f"{name}: images must be (B, C, H, W), got the shape {tuple(z_scaled.shape)}")
        _, channels, height, width = z_scaled.shape
        if channels != self.in_channels:
            raise InputError(f"{name}: in_channels={self.in_channels}, but the images have {channels} channels")
        if (height, width) != (self.image_size, self.image_size):
            raise InputError(f"{name}: image_size={self.image_size}, but the images are {height}x{width}")

    def _classes(self, class_label: Tensor | None, batch: int) -> Tensor | None:
        if class_label is None:
            return None
        name = type(self).__name__
        if self.num_classes == 0:
            raise InputError(f"{name}: num_classes=0, but class labels are given")
        if not class_label.is_floating_point():
            class_label = self._one_hot(class_label)
        if class_label.shape != (batch, self.num_classes):
            raise InputError(
                f"{name}: num_classes={self.num_classes} and {batch} images need class labels "
                f"{(batch,)} or {(batch, self.num_classes)}, got {tuple(class_label.shape)}"
            )
        if self.training and self.label_dropout > 0:
            kept = torch.rand(batch, 1, device=class_label.device) >= self.label_dropout
            class_label = class_label * kept
        return class_label

    def _one_hot(self, class_label: Tensor) -> Tensor:
        # A compiled network cannot branch on a value, so the data module must check the labels for it.
        if not torch.compiler.is_compiling() and class_label.numel() > 0:
            ends = torch.stack(class_label.aminmax())
            bad = torch.stack([ends[0] < NO_CLASS, ends[1] >= self.num_classes])
            refuse(f"{type(self).__name__}: labels", bad, lambda: ends, self._unknown_label)
        known = torch.arange(self.num_classes, device=class_label.device)
        return (class_label[..., None] == known).float()

    def _unknown_label(self, check: int, value: float, where: str) -> InputError:
        name = type(self).__name__
        return InputError(f"{name}: num_classes={self.num_classes}, but a class label is {value:.0f}{where}")

    def _augmentations(self, augment_label: Tensor | None, batch: int) -> Tensor | None:
        if augment_label is None:
            return None
        if augment_label.shape != (batch, self.augment_dim) or self.augment_dim == 0:
            raise InputError(
                f"{type(self).__name__}: augment_dim={self.augment_dim}, "
                f"but the augmentation labels are {tuple(augment_label.shape)}"
            )
        return augment_label


def linear(layer: nn.Linear, features: Tensor) -> Tensor:
    """Apply the layer in the precision of its weights, because embeddings are computed in float32."""
    return F.linear(features.to(layer.weight.dtype), layer.weight, layer.bias)
