"""ADM (Dhariwal & Nichol 2021) in the configuration of EDM (Karras et al. 2022)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from lit_knn.common.errors import InputError
from lit_knn.nets.base import NumberOfData, NumbersOfData
from lit_knn.nets.embeddings import PositionalEmbedding
from lit_knn.nets.layers import ResidualBlock, group_norm, linear, zero_
from lit_knn.nets.residual_unet import ResidualUNet

NORM_EPS = 1e-5


class ADMBlock(ResidualBlock):
    """Residual block of ADM. The embedding scales and shifts the features. An untrained block equals its shortcut."""

    norm_eps = NORM_EPS
    residual_scale = 1.0
    modulations = 2
    weighs_resampled_shortcut = False

    def modulate(self, h: Tensor, modulation: Tensor) -> Tensor:
        scale, shift = modulation.chunk(2, dim=1)
        return self.norm1(h) * (1 + scale) + shift

    def start(self) -> None:
        """Set the last layer of each residual branch to zero. Other layers keep PyTorch's initial weights."""
        zero_(self.conv1)
        if self.heads:
            zero_(self.proj)


@dataclass(eq=False, repr=False)
class ADM(ResidualUNet):
    """ADM. The defaults are EDM's for ImageNet at 64x64, except `num_classes`, which EDM sets to 1000.

    The network loads the published EDM checkpoints strictly, under the prefix `model.` of `EDMPrecond`. For half
    precision use autocast: it keeps the embedding in float32. `torch.compile` makes one graph (tried with inductor on
    the CPU).

    `ResidualUNet` documents the other options.

    Args:
        head_width: channels per attention head; divides the width of every block that attends.
    """

    block = ADMBlock
    taps = (1, 1)
    last_decoder_block_attends_alone = False

    image_size: NumberOfData = 64
    channels: int = 192
    multipliers: NumbersOfData = (1, 2, 3, 4)
    blocks: int = 3
    attention_at: Sequence[int] = (32, 16, 8)
    dropout: float = 0.1
    head_width: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        channels, width = self.channels, self.embedding_width
        self.map_noise = PositionalEmbedding(channels, endpoint=False, sines_first=False)
        self.map_augment = (
            nn.Linear(self.augment_dim, channels, bias=False) if self.augment_dim else None
        )
        self.map_layer0 = nn.Linear(channels, width)
        self.map_layer1 = nn.Linear(width, width)
        self.map_label = (
            nn.Linear(self.num_classes, width, bias=False) if self.num_classes else None
        )
        self._build_encoder_and_decoder(stem_width=self.widths[0])
        self.out_norm = group_norm(self.widths[0], NORM_EPS)
        self.out_conv = nn.Conv2d(self.widths[0], self.in_channels, 3, padding=1)
        for layer in self.modules():
            if isinstance(layer, ADMBlock):
                layer.start()
        zero_(self.out_conv)
        if self.map_augment is not None:
            nn.init.zeros_(self.map_augment.weight)
        if self.map_label is not None:
            nn.init.normal_(self.map_label.weight)  # a table of class embeddings

    def heads(self, width: int) -> int:
        if width % self.head_width:
            rule = f"must divide the {width} channels of attention"
            raise InputError(f"ADM: head_width {rule}, got {self.head_width}")
        return width // self.head_width

    def embed(
        self, noise_label: Tensor, classes: Tensor | None, augment_label: Tensor | None
    ) -> Tensor:
        """Apply an MLP to the noise embedding, then add the class embedding."""
        features = self.map_noise(noise_label)
        if self.map_augment is not None and augment_label is not None:
            features = features + linear(self.map_augment, augment_label)

        embedding = self.map_layer1(F.silu(linear(self.map_layer0, features)))
        if self.map_label is not None and classes is not None:
            embedding = embedding + linear(self.map_label, classes)
        return F.silu(embedding)

    def output(self, h: Tensor) -> Tensor:
        return self.out_conv(F.silu(self.out_norm(h)))
