"""Building blocks of the published diffusion networks: resampling, residual blocks, attention."""

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Direction = Literal["up", "down"]
Layer = TypeVar("Layer", bound=nn.Module)


def fir_kernel(taps: Sequence[float]) -> Tensor:
    """Return the separable low-pass filter of n taps that sums to one: (1, 1, n, n) float32.

    The taps are symmetric, and their number is even.
    """
    line = torch.tensor(taps, dtype=torch.float32)
    plane = torch.outer(line, line)
    return (plane / plane.sum())[None, None]


def resample(h: Tensor, kernel: Tensor, direction: Direction) -> Tensor:
    """Double or halve the height and width of images.

    Args:
        h: (B, C, H, W).
        kernel: (1, 1, n, n), a low-pass filter, n even.
        direction: double or halve.
    """
    taps, channels = kernel.shape[-1], h.shape[1]
    # Two symmetric taps are always the box filter.
    if taps == 2 and direction == "down":
        return F.avg_pool2d(h, 2)
    if taps == 2:
        return F.interpolate(h, scale_factor=2.0, mode="nearest")

    margin = taps // 2 - 1
    per_channel = kernel.to(h.dtype).expand(channels, 1, taps, taps)
    if direction == "down":
        return F.conv2d(h, per_channel, stride=2, padding=margin, groups=channels)
    # Doubling puts zeros between the pixels, so four times the filter keeps the brightness.
    return F.conv_transpose2d(h, 4 * per_channel, stride=2, padding=margin, groups=channels)


class Resample(nn.Module):
    """Doubles or halves the size of the image with a low-pass filter. It has no weights."""

    resample_filter: Tensor

    def __init__(self, direction: Direction, taps: Sequence[float]) -> None:
        super().__init__()
        self.direction = direction
        self.register_buffer("resample_filter", fir_kernel(taps))

    def forward(self, h: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, 2H, 2W) or (B, C, H/2, W/2)."""
        return resample(h, self.resample_filter, self.direction)


class ResamplingConv(nn.Conv2d):
    """Doubles or halves the size of the image, and then convolves it."""

    resample_filter: Tensor

    def __init__(
        self, in_width: int, width: int, size: int, direction: Direction, taps: Sequence[float]
    ) -> None:
        super().__init__(in_width, width, size, padding=size // 2)
        self.direction = direction
        self.register_buffer("resample_filter", fir_kernel(taps))

    def forward(self, h: Tensor) -> Tensor:
        """Map (B, in_width, H, W) to (B, width, 2H, 2W) or (B, width, H/2, W/2)."""
        return super().forward(resample(h, self.resample_filter, self.direction))


class BlurredStridedConv(nn.Conv2d):
    """Filters the image by a low-pass, and then convolves it with stride 2. One padding serves both steps."""

    resample_filter: Tensor

    def __init__(self, in_width: int, width: int, size: int, taps: Sequence[float]) -> None:
        super().__init__(in_width, width, size, stride=2)
        # The padding of the convolution plus that of the filter.
        self.margin = size // 2 + len(taps) // 2 - 1
        self.register_buffer("resample_filter", fir_kernel(taps))

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, in_width, H, W) to (B, width, H/2, W/2)."""
        kernel = self.resample_filter.to(image.dtype).expand(image.shape[1], -1, -1, -1)
        return super().forward(F.conv2d(image, kernel, padding=self.margin, groups=image.shape[1]))


def group_norm(width: int, eps: float) -> nn.GroupNorm:
    """Make a group norm of at most 32 groups of at least 4 channels."""
    groups = max(min(32, width // 4), 1)
    return nn.GroupNorm(groups, width, eps=eps)


def zero_(layer: Layer) -> Layer:
    """Set the weights and the bias to zero, in place."""
    for weights in layer.parameters():
        nn.init.zeros_(weights)
    return layer


def attention(qkv: Tensor, heads: int) -> Tensor:
    """Softmax attention from every position to all positions: (B, 3·C, H, W) to (B, C, H, W).

    Args:
        qkv: channels ordered by head, then by feature, then query, key, value.
        heads: number of heads; divides C.
    """
    batch, triple, height, width = qkv.shape
    split = qkv.flatten(2).unflatten(1, (heads, triple // (3 * heads), 3))
    q, k, v = split.permute(3, 0, 1, 4, 2).contiguous()
    attended = F.scaled_dot_product_attention(q, k, v)
    return attended.transpose(2, 3).reshape(batch, triple // 3, height, width)


class ResidualBlock(nn.Module):
    """Residual block: norm, convolution, modulated norm, dropout, convolution, shortcut and optional self-attention.

    Subclasses define how the embedding modulates the second norm, and initialise the weights. `embedding` is the number
    of its features. With `direction`, the first convolution and the shortcut double or halve the image, by the low-pass
    filter `taps`. `heads` is 0 without attention.
    """

    norm_eps: ClassVar[float]
    residual_scale: ClassVar[float]  # factor after each addition
    modulations: ClassVar[int]  # numbers that the embedding gives per channel
    weighs_resampled_shortcut: ClassVar[bool]

    def __init__(
        self,
        in_width: int,
        width: int,
        embedding: int,
        *,
        direction: Direction | None = None,
        taps: Sequence[float] = (1, 1),
        heads: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm0 = group_norm(in_width, self.norm_eps)
        self.conv0 = _conv(in_width, width, 3, direction, taps)
        self.affine = nn.Linear(embedding, self.modulations * width)
        self.norm1 = group_norm(width, self.norm_eps)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.skip: nn.Module = nn.Identity()
        if in_width != width or (direction and self.weighs_resampled_shortcut):
            self.skip = _conv(in_width, width, 1, direction, taps)
        elif direction:
            self.skip = Resample(direction, taps)
        if heads:
            self.norm2 = group_norm(width, self.norm_eps)
            self.qkv = nn.Conv2d(width, 3 * width, 1)
            self.proj = nn.Conv2d(width, width, 1)

    def modulate(self, h: Tensor, modulation: Tensor) -> Tensor:
        """Normalise h (B, width, H, W) under modulation (B, modulations·width, 1, 1)."""
        raise NotImplementedError

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        """Map h (B, in_width, H, W) and the embedding (B, embedding) to (B, width, H', W')."""
        out = self.conv0(F.silu(self.norm0(h)))
        out = F.silu(self.modulate(out, self.affine(embedding)[:, :, None, None]))
        out = self.conv1(F.dropout(out, self.dropout, self.training))
        h = (self.skip(h) + out) * self.residual_scale
        if not self.heads:
            return h

        attended = attention(self.qkv(self.norm2(h)), self.heads)
        return (h + self.proj(attended)) * self.residual_scale


def _conv(
    in_width: int, width: int, size: int, direction: Direction | None, taps: Sequence[float]
) -> nn.Conv2d:
    """Make a convolution of `size` pixels, which keeps, doubles or halves the size of the image."""
    if direction is None:
        return nn.Conv2d(in_width, width, size, padding=size // 2)
    return ResamplingConv(in_width, width, size, direction, taps)


def linear(layer: nn.Linear, features: Tensor) -> Tensor:
    """Apply the layer in the precision of its weights, because embeddings are computed in float32."""
    return F.linear(features.to(layer.weight.dtype), layer.weight, layer.bias)
