"""Small data sets and latents that several tests share."""

import torch

from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.theory.warp import Warp


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def low_rank_vectors(N=60, d=12, seed=0):
    """Vectors (N, d) with most of their variance in a few directions, as images have."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator))[0]
    return (torch.randn(N, d, generator=generator) * 3 * 0.6 ** torch.arange(d)) @ rotation + 0.3


def pixels(N=300, shape=(3, 6, 6), seed=0):
    """Smooth pictures, (N, *shape) uint8, so that near pictures are really similar."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(N, shape[0], 2, 2, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=shape[1:], mode="bilinear")
    return (smooth * 235 + 20 * torch.rand(N, *shape, generator=generator)).to(torch.uint8)


def speckles(N, shape, seed=0):
    """Pictures of independent random pixels, (N, *shape) uint8."""
    return torch.randint(0, 256, (N, *shape), dtype=torch.uint8, generator=rng(seed))


def noisy(x, t, seed=1):
    """Make z = x + t·ε; t is a scalar or (N,)."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return x + torch.as_tensor(t, dtype=torch.float32).reshape(-1, *[1] * (x.ndim - 1)) * noise


def unwarped(flips):
    """The warps of an augmentation that only mirrors; flips is (B, 2)."""
    return Warp(flips, torch.eye(2, 3).expand(len(flips), 2, 3))


def all_warped(x, seed=2):
    """Augment x (B, C, H, W) with every transformation for every item."""
    return GeometricAugmentation(1.0)(x, torch.Generator().manual_seed(seed))


def enumerate_class_mean(reference, z, t, labels):
    """Eq. 8 in float64; each row averages over the images with its label."""
    x = reference.gather(torch.arange(reference.N)).flatten(1).double()
    log_p = -torch.cdist(z.flatten(1).double(), x).square() / (
        2 * torch.as_tensor(t).double().reshape(-1, 1) ** 2
    )
    log_p = log_p.masked_fill(reference.labels != labels[:, None], -torch.inf)
    return (torch.softmax(log_p, 1) @ x).reshape(z.shape)


def two_groups(N=200, side=8, levels=4):
    """Almost black and almost white images: at noise levels between them, a small change of z moves the mean far."""
    images = torch.randint(
        levels, (N, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images[::2] = 255 - images[::2]
    return images
