"""Base class of the published networks: the U-shape of residual blocks, the names of modules, and labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.nets.base import ImageNetwork, NumberOfData, NumbersOfData, one_hot
from lit_knn.nets.layers import Direction, ResidualBlock


@dataclass(eq=False, repr=False)
class ResidualUNet(ImageNetwork):
    """Encoder and decoder of residual blocks. Subclasses add the embedding and the output.

    Modules are named as in the published EDM checkpoints (`enc.16x16_block0.conv0`, `dec.8x8_in0.qkv`, ...).

    Args:
        image_size: side of the square images, divisible by 2^(entries of `multipliers` − 1).
        in_channels: channels of the images.
        channels: base width; even.
        multipliers: width at each resolution in units of `channels`; each entry after the first halves the image. EDM
            uses (1, 2, 2, 2) for DDPM++ and NCSN++ at 64x64.
        blocks: residual blocks per resolution in the encoder; the decoder has one more.
        attention_at: image sides at which blocks attend. The middle of the network always attends.
        dropout: dropout probability inside the blocks.
        num_classes: number of class labels, 0 for an unconditional network.
        label_dropout: probability of training an item without its class label.
        augment_dim: features of the augmentation label, 0 for none; 9 in the published checkpoints.
    """

    block: ClassVar[type[ResidualBlock]]
    taps: ClassVar[tuple[float, ...]]  # low-pass filter of all resampling
    last_decoder_block_attends_alone: ClassVar[bool]

    image_size: NumberOfData = 32
    in_channels: NumberOfData = 3
    channels: int = 128
    multipliers: NumbersOfData = (2, 2, 2)
    blocks: int = 4
    attention_at: Sequence[int] = (16,)
    dropout: float = 0.13
    num_classes: NumberOfData = 0
    label_dropout: float = 0.0
    augment_dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = 2 ** (len(self.multipliers) - 1)
        if self.image_size % factor:
            rule = f"a multiple of {factor} with {len(self.multipliers)} multipliers"
            option = f"{type(self).__name__}: image_size"
            raise InputError(f"{option} must be {rule}, got {self.image_size}")

        self.multipliers = list(self.multipliers)
        self.attention_at = sorted(self.attention_at)
        self.widths = [self.channels * m for m in self.multipliers]
        self.embedding_width = 4 * self.channels

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        if tuple(shape[1:]) != (self.image_size, self.image_size):
            sides = f"{shape[1]}x{shape[2]}"
            raise InputError(
                f"{type(self).__name__}: image_size={self.image_size}, but the images are {sides}"
            )

    def heads(self, width: int) -> int:
        """Return the number of attention heads in a block of `width` channels."""
        raise NotImplementedError

    def embed(
        self, noise_label: Tensor, classes: Tensor | None, augment_label: Tensor | None
    ) -> Tensor:
        """Return the embedding of noise and labels, (B, width).

        Args:
            noise_label: (B,).
            classes: one-hot, (B, num_classes), or None.
            augment_label: (B, augment_dim), or None.
        """
        raise NotImplementedError

    def output(self, h: Tensor) -> Tensor:
        """Map the last features (B, widths[0], H, W) to the image (B, in_channels, H, W)."""
        raise NotImplementedError

    def _make_block(
        self,
        in_width: int,
        width: int,
        *,
        direction: Direction | None = None,
        attends: bool = False,
    ) -> ResidualBlock:
        """Make a block from `in_width` to `width` channels; `direction` resamples the image."""
        heads = 0
        if attends:
            heads = self.heads(width)

        return self.block(
            in_width,
            width,
            self.embedding_width,
            direction=direction,
            taps=self.taps,
            heads=heads,
            dropout=self.dropout,
        )

    def _build_encoder_and_decoder(self, stem_width: int) -> None:
        """Make the blocks; the encoder's first convolution gives `stem_width` channels."""
        width = stem_width
        sides = [self.image_size // 2**level for level in range(len(self.widths))]
        self.stem = f"{self.image_size}x{self.image_size}_conv"
        self.enc = nn.ModuleDict({self.stem: nn.Conv2d(self.in_channels, width, 3, padding=1)})
        skips = [width]
        for side, next_width in zip(sides, self.widths, strict=True):
            if side < self.image_size:
                self.enc[f"{side}x{side}_down"] = self._make_block(width, width, direction="down")
                skips.append(width)
            for i in range(self.blocks):
                attends = side in self.attention_at
                self.enc[f"{side}x{side}_block{i}"] = self._make_block(
                    width, next_width, attends=attends
                )
                width = next_width
                skips.append(width)

        # Names of the encoder's modules that get the embedding, in the order of their use.
        self.downwards = [name for name in self.enc if name != self.stem]

        self._build_decoder(width, skips)

    def _build_decoder(self, width: int, skips: list[int]) -> None:
        """Make the decoder's blocks.

        Args:
            width: channels of the encoder's last features.
            skips: channels of the features after every encoder step; this call empties the list.
        """
        sides = [self.image_size // 2**level for level in range(len(self.widths))]
        self.dec = nn.ModuleDict()
        for side, next_width in zip(reversed(sides), reversed(self.widths), strict=True):
            if side == sides[-1]:
                self.dec[f"{side}x{side}_in0"] = self._make_block(width, width, attends=True)
                self.dec[f"{side}x{side}_in1"] = self._make_block(width, width)
            else:
                self.dec[f"{side}x{side}_up"] = self._make_block(width, width, direction="up")
            for i in range(self.blocks + 1):
                is_last = i == self.blocks
                may_attend = is_last or not self.last_decoder_block_attends_alone
                self.dec[f"{side}x{side}_block{i}"] = self._make_block(
                    width + skips.pop(),
                    next_width,
                    attends=side in self.attention_at and may_attend,
                )
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
            if "_block" in name:
                h = torch.cat([h, features.pop()], 1)
            h = self.dec[name](h, embedding)
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
        """
        self.check_shape(z_scaled.shape[1:])
        classes = None
        if class_label is not None:
            classes = self._classes(class_label)

        # The noise level needs more digits than bf16 has.
        with torch.autocast(z_scaled.device.type, enabled=False):
            embedding = self.embed(noise_label, classes, augment_label)

        features = self.encode(z_scaled, embedding)
        return self.output(self.decode(features, embedding))

    def _classes(self, class_label: Tensor) -> Tensor:
        """Return one row of `num_classes` numbers for each item. In training some rows become 0."""
        classes = class_label
        if not class_label.is_floating_point():
            classes = one_hot(self, class_label)

        if self.training and self.label_dropout > 0:
            keeps_label = torch.rand(len(classes), 1, device=classes.device) >= self.label_dropout
            classes = classes * keeps_label
        return classes
