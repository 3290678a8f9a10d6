"""Small data sets and latents that several tests share."""

import torch


def low_rank_vectors(N=60, d=12, seed=0):
    """(N, d) vectors whose variance lies mostly in a few directions, as that of images does."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator))[0]
    return (torch.randn(N, d, generator=generator) * 3 * 0.6 ** torch.arange(d)) @ rotation + 0.3


def noisy(x, t, seed=1):
    """z = x + t·ε; t a scalar or (N,)."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return x + torch.as_tensor(t, dtype=torch.float32).reshape(-1, *[1] * (x.ndim - 1)) * noise
