"""DiT, the diffusion transformer of Peebles & Xie 2023 (arXiv 2212.09748): patches, attention, adaptive layer norm."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_knn.common.errors import InputError, check_at_least, prefixed
from lit_knn.nets.base import ImageNetwork, NumberOfData
from lit_knn.nets.layers import zero_
from lit_knn.nets.unet import NoiseEmbedding

# Sines and cosines of the noise label, and width of a block's MLP in units of `width`, as published.
NOISE_FEATURES = 256
MLP_FACTOR = 4
NORM_EPS = 1e-6


@dataclass(eq=False, repr=False)
class DiT(ImageNetwork):
    """Vision transformer over patches of the image, with layer norms that noise level and class modulate.

    It has no second output for a variance and no embedding of "no class", which is zero here; queries and keys are
    normalised (Dehghani et al. 2023, arXiv 2302.05442). Otherwise it is the network of the paper, with the noise
    embedding of `UNet`. The layers that modulate, and the last one, start at zero, so every block starts as the
    identity, and an untrained preconditioned network returns c_skip·z.

    Args:
        in_channels: channels of the images or latents; 4 for those of Stable Diffusion's autoencoder.
        patch_size: side of a patch in pixels; divides both sides of the images.
        width: features of a patch; a multiple of `heads` and of 4.
        depth: transformer blocks.
        heads: attention heads.
        num_classes: number of class labels, 0 for an unconditional network.
        augment_dim: width of the augmentation labels, 0 for none; a mean flow needs 8 for its second time.
    """

    in_channels: NumberOfData = 3
    patch_size: int = 2
    width: int = 384
    depth: int = 12
    heads: int = 6
    num_classes: NumberOfData = 0
    augment_dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        with prefixed("DiT"):
            check_at_least(1, patch_size=self.patch_size, width=self.width)
            check_at_least(1, depth=self.depth, heads=self.heads)
        if self.width % self.heads or self.width % 4:
            rule = f"a multiple of heads={self.heads} and of 4"
            raise InputError(f"DiT: width must be {rule}, got {self.width}")

        numbers = self.in_channels * self.patch_size**2
        self.embedding = NoiseEmbedding(
            NOISE_FEATURES, self.width, self.num_classes, self.augment_dim
        )
        self.patches_in = nn.Linear(numbers, self.width)
        self.blocks = nn.ModuleList(
            [TransformerBlock(self.width, self.heads) for _ in range(self.depth)]
        )
        self.modulation_out = nn.Linear(self.width, 2 * self.width)
        self.patches_out = nn.Linear(self.width, numbers)
        self._set_first_weights()

    def _set_first_weights(self) -> None:
        """Set the first weights as the paper does: every block is the identity, and the output is zero."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

        for name, weights in self.embedding.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(weights, std=0.02)

        zero_(self.modulation_out)
        zero_(self.patches_out)
        for name, layer in self.blocks.named_modules():
            if name.endswith("modulation"):
                zero_(layer)

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        if shape[1] % self.patch_size or shape[2] % self.patch_size:
            sides = f"{shape[1]}x{shape[2]}"
            raise InputError(f"DiT: patch_size={self.patch_size} does not divide images of {sides}")

    def forward(
        self,
        z_scaled: Tensor,
        noise_label: Tensor,
        class_label: Tensor | None = None,
        augment_label: Tensor | None = None,
    ) -> Tensor:
        """Map z_scaled (B, C, H, W), noise_label (B,) = ln(t)/4 and class_label (B,) int to (B, C, H, W).

        A class `NO_CLASS` is an item without label, as None is for all items. `augment_label` is (B, augment_dim);
        None, like zeros, means that nothing was augmented.
        """
        self.check_shape(z_scaled.shape[1:])
        rows = z_scaled.shape[2] // self.patch_size
        columns = z_scaled.shape[3] // self.patch_size

        embedding = self.embedding(noise_label, class_label, augment_label)
        embedding = embedding.to(self.modulation_out.weight.dtype)

        h = self.patches_in(to_patches(z_scaled, self.patch_size))
        h = h + positions(rows, columns, self.width, h.device).to(h.dtype)
        for block in self.blocks:
            h = block(h, embedding)

        shift, scale = self.modulation_out(embedding).chunk(2, dim=1)
        h = self.patches_out(modulated_norm(h, shift, scale))
        return from_patches(h, rows, columns, self.patch_size)


class TransformerBlock(nn.Module):
    """Self-attention and an MLP; the embedding shifts and scales the norm before each, and scales its result."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.scale_q = nn.Parameter(torch.ones(width // heads))
        self.scale_k = nn.Parameter(torch.ones(width // heads))
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, MLP_FACTOR * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(MLP_FACTOR * width, width),
        )

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        """Map h (B, patches, width) and the embedding (B, width) to (B, patches, width)."""
        modulation = self.modulation(embedding).chunk(6, dim=1)
        attention_shift, attention_scale, attention_gate, mlp_shift, mlp_scale, mlp_gate = (
            modulation
        )

        attended = self.attention(modulated_norm(h, attention_shift, attention_scale))
        h = h + attention_gate.unsqueeze(1) * attended
        return h + mlp_gate.unsqueeze(1) * self.mlp(modulated_norm(h, mlp_shift, mlp_scale))

    def attention(self, h: Tensor) -> Tensor:
        """Attend from every patch to all patches: (B, patches, width) to the same shape."""
        # (B, patches, 3, heads, features) to three of (B, heads, patches, features).
        q, k, v = self.qkv(h).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q = rms_norm(q, self.scale_q)
        k = rms_norm(k, self.scale_k)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.proj(attended.transpose(1, 2).flatten(2))


def rms_norm(h: Tensor, scale: Tensor) -> Tensor:
    """Divide h (..., features) by the root mean square of its features, in the precision of `scale` (features,)."""
    h = h.to(scale.dtype)
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + NORM_EPS) * scale


def modulated_norm(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normalise the features of h (B, patches, width), then scale and shift them by (B, width)."""
    h = F.layer_norm(h, h.shape[-1:], eps=NORM_EPS)
    return h * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def to_patches(images: Tensor, size: int) -> Tensor:
    """Cut images (B, C, H, W) into squares of `size`: (B, H/size · W/size, C · size²), row by row."""
    return F.pixel_unshuffle(images, size).flatten(2).mT


def from_patches(patches: Tensor, rows: int, columns: int, size: int) -> Tensor:
    """Put patches (B, rows · columns, C · size²) together again: (B, C, rows · size, columns · size)."""
    return F.pixel_shuffle(patches.mT.unflatten(2, (rows, columns)), size)


def positions(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """Return sines and cosines of each patch's column and row, (rows · columns, width) float32.

    A quarter of the features each; the frequencies go from 1 down to 1/10,000 radians per patch (Vaswani et al. 2017,
    in two dimensions as by He et al. 2022). They are fixed, so that a network takes images of any size. To compute
    them takes 0.1 ms, less than half a per cent of a call for 32 images, so nothing stores them.
    """
    exponents = torch.arange(width // 4, dtype=torch.float32, device=device) / (width // 4)
    frequencies = 10_000.0**-exponents
    row_angles = torch.arange(rows, dtype=torch.float32, device=device)[:, None] * frequencies
    column_angles = torch.arange(columns, dtype=torch.float32, device=device)[:, None] * frequencies

    across = torch.cat([column_angles.sin(), column_angles.cos()], dim=1)
    down = torch.cat([row_angles.sin(), row_angles.cos()], dim=1)
    grid = [across.expand(rows, -1, -1), down.unsqueeze(1).expand(-1, columns, -1)]
    return torch.cat(grid, dim=2).flatten(0, 1)
