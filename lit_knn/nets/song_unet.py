"""DDPM++ and NCSN++ (Song et al. 2021) in the configuration of EDM (Karras et al. 2022)."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from lit_knn.nets.embeddings import FourierEmbedding, PositionalEmbedding
from lit_knn.nets.layers import BlurredStridedConv, ResidualBlock, group_norm, linear
from lit_knn.nets.residual_unet import ResidualUNet

NORM_EPS = 1e-6
# Gain of layers that start so small that a block is nearly its shortcut.
NEARLY_ZERO = 1e-5
# Factor that keeps the variance when two features are added.
INVERSE_ROOT_OF_2 = math.sqrt(0.5)
# Song et al. initialise query, key and value with a tenth of Glorot's variance each. Here one layer holds all three.
# Its mean fan is twice as large, so it needs a fifth of its own Glorot variance.
ATTENTION_GAIN = math.sqrt(0.2)


def glorot_(layer: nn.Conv2d | nn.Linear, gain: float = 1.0) -> None:
    """Initialise a layer in place: uniform weights with gain² times Glorot's variance, and bias zero."""
    nn.init.xavier_uniform_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class SongBlock(ResidualBlock):
    """Residual block of DDPM++ and NCSN++. The embedding shifts the features, and sums are divided by √2."""

    norm_eps = NORM_EPS
    residual_scale = INVERSE_ROOT_OF_2
    modulations = 1
    weighs_resampled_shortcut = True

    def modulate(self, h: Tensor, modulation: Tensor) -> Tensor:
        return self.norm1(h + modulation)

    def start(self) -> None:
        """Initialise the weights so that the block is nearly its shortcut."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                glorot_(layer)
        glorot_(self.conv1, NEARLY_ZERO)
        if self.heads:
            glorot_(self.qkv, ATTENTION_GAIN)
            glorot_(self.proj, NEARLY_ZERO)


@dataclass(eq=False, repr=False)
class DDPMpp(ResidualUNet):
    """DDPM++: positional noise embedding, box filters. The defaults are EDM's for CIFAR-10.

    Attention has one head; in the decoder only the last block of a resolution attends. The network loads the published
    EDM checkpoints strictly, under the prefix `model.` of `EDMPrecond`. For half precision use autocast: it keeps the
    embedding and NCSN++'s frequencies in float32. `torch.compile` makes one graph (tried with inductor on the CPU).
    `ResidualUNet` documents the options.
    """

    block = SongBlock
    taps: ClassVar[tuple[float, ...]] = (1, 1)
    last_decoder_block_attends_alone = True
    noise_width_factor: ClassVar[int] = 1  # features of the noise embedding, in units of `channels`

    def __post_init__(self) -> None:
        super().__post_init__()
        # Class and augmentation labels are added to the noise embedding.
        noise_width = self.noise_width_factor * self.channels
        self.map_noise = self.noise_embedding()
        self.map_label = nn.Linear(self.num_classes, noise_width) if self.num_classes else None
        self.map_augment = (
            nn.Linear(self.augment_dim, noise_width, bias=False) if self.augment_dim else None
        )
        self.map_layer0 = nn.Linear(noise_width, self.embedding_width)
        self.map_layer1 = nn.Linear(self.embedding_width, self.embedding_width)
        self._build_encoder_and_decoder(stem_width=self.channels)
        # The names of the last two layers in the published files begin so.
        self.ends = f"{self.image_size}x{self.image_size}_aux"
        self.dec[f"{self.ends}_norm"] = group_norm(self.widths[0], NORM_EPS)
        last = nn.Conv2d(self.widths[0], self.in_channels, 3, padding=1)
        self.dec[f"{self.ends}_conv"] = last
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                glorot_(layer)
        for layer in self.modules():
            if isinstance(layer, SongBlock):
                layer.start()
        glorot_(last, NEARLY_ZERO)

    def noise_embedding(self) -> nn.Module:
        """Make the module from noise labels (B,) to (B, noise_width_factor·channels)."""
        return PositionalEmbedding(self.channels, endpoint=True, sines_first=True)

    def heads(self, width: int) -> int:
        return 1

    def embed(
        self, noise_label: Tensor, classes: Tensor | None, augment_label: Tensor | None
    ) -> Tensor:
        """Add the labels to the noise embedding, then apply an MLP."""
        features = self.map_noise(noise_label)
        if self.map_label is not None:
            if classes is None:
                # The layer has a bias, so an item without label must still pass a row of zeros through it.
                classes = features.new_zeros(len(features), self.num_classes)
            # This scales one-hot labels to unit variance for any number of classes.
            features = features + linear(self.map_label, classes * math.sqrt(self.num_classes))
        if self.map_augment is not None and augment_label is not None:
            features = features + linear(self.map_augment, augment_label)

        return F.silu(self.map_layer1(F.silu(linear(self.map_layer0, features))))

    def output(self, h: Tensor) -> Tensor:
        return self.dec[f"{self.ends}_conv"](F.silu(self.dec[f"{self.ends}_norm"](h)))


@dataclass(eq=False, repr=False)
class NCSNpp(DDPMpp):
    """NCSN++: Fourier noise embedding, smoother filters, and an encoder that sees the image at every resolution.

    Args:
        fourier_scale: standard deviation of the frequencies. Improved consistency training (Song & Dhariwal 2023,
            Section 3.1) and the paper's release use 0.02, the default: student and teacher, one step apart, must see
            nearly the same embedding. Diffusion models use 16 (Song et al. 2021, EDM's VE networks), and so do
            the published files; with 16 the embeddings of neighbouring levels are unrelated.
    """

    taps = (1, 3, 3, 1)
    noise_width_factor = 2

    fourier_scale: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()

        # The pyramid of shrunken images.
        width = self.in_channels
        for level, next_width in enumerate(self.widths[:-1], start=1):
            side = self.image_size // 2**level
            step = BlurredStridedConv(width, next_width, 3, self.taps)
            glorot_(step)
            self.enc[f"{side}x{side}_aux_residual"] = step
            width = next_width

    def noise_embedding(self) -> nn.Module:
        return FourierEmbedding(2 * self.channels, scale=self.fourier_scale)

    def encode(self, image: Tensor, embedding: Tensor) -> list[Tensor]:
        """Encode the image. Each halving adds the shrunken image to the features; the next one shrinks this sum."""
        features = [self.enc[self.stem](image)]
        for name in self.downwards:
            h = self.enc[name](features[-1], embedding)
            if name.endswith("_down"):
                h = image = (
                    h + self.enc[name.replace("_down", "_aux_residual")](image)
                ) * INVERSE_ROOT_OF_2
            features.append(h)
        return features
