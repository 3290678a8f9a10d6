"""Hypothesis strategies: reference sets of any shape, type and size, noise levels, and latents of the process."""

import math

import torch
from hypothesis import strategies as st

from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet

# Exponents of noise levels: from where z is x to where all images are alike, and the ends of float32.
EXPONENTS = st.one_of(st.floats(-4, 4), st.sampled_from([-37.5, -20.0, -10.0, 8.0, 12.0]))
STYLES = (
    "random",
    "random",
    "duplicates",
    "near duplicates",
    "constant",
    "extremes",
    "one far away",
    "heavy tails",
)


@st.composite
def images(draw, min_N=1, max_N=24):
    """Pixels (N, C, H, W) or floats (N, d) of any kind, at random or with duplicates, constants or extremes."""
    N, style = draw(st.integers(min_N, max_N)), draw(st.sampled_from(STYLES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, 3])), draw(st.integers(1, 4)), draw(st.integers(1, 4)))
        x = torch.randint(0, 256, (N, *shape), generator=generator)
        low, high = 0, 255
    else:
        shape = draw(st.sampled_from([(1,), (2,), (5,), (2, 3), (1, 2, 2)]))
        scale = 10 ** draw(st.floats(-3, 3))
        x = torch.randn(N, *shape, generator=generator) * scale
        low, high = -scale, scale
    if style == "duplicates":
        x = x[torch.randint(0, max(N // 3, 1), (N,), generator=generator)]
    elif style == "near duplicates":  # frames of a video, or copies with flipped bits
        x = x[torch.randint(0, max(N // 3, 1), (N,), generator=generator)]
        flipped = (torch.rand(x.shape, generator=generator) < 0.1).long()
        x = (
            x + 1e-3 * scale * torch.randn(x.shape, generator=generator)
            if x.is_floating_point()
            else x ^ flipped
        )
    elif style == "heavy tails" and x.is_floating_point():
        x = x / torch.rand(N, *[1] * (x.ndim - 1), generator=generator)
    elif style == "constant":
        x = x[:1].expand(N, *shape).clone()
    elif style == "extremes":
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, low, high).to(x.dtype)
    elif style == "one far away" and x.is_floating_point():
        x[-1] *= 100
    if not x.is_floating_point():
        return x.to(torch.uint8)
    # float16 has no number above 65,504.
    kind = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    return x.clamp(-6e4, 6e4).to(kind) if kind == torch.float16 else x.to(kind)


@st.composite
def problems(draw, min_N=1):
    """A reference set, latents of the process at their noise levels, and their sources."""
    x = draw(images(min_N))
    reference = ReferenceSet(x, TorchIndex(), hflip=x.ndim == 4 and draw(st.booleans()))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    B = draw(st.integers(1, 3))
    t = 10 ** torch.tensor([draw(EXPONENTS) for _ in range(B)], dtype=torch.float64)
    source = reference.gather(torch.randint(0, reference.N, (B,), generator=generator))
    noise = torch.randn(source.shape, generator=generator, dtype=torch.float64)
    z = source + t.reshape(-1, *[1] * (source.ndim - 1)) * noise
    return reference, z.float(), t, source


def all_images(reference):
    return reference.gather(torch.arange(reference.N))


def log_posterior(reference, z, t):
    """Eq. 2 by enumeration in float64, (B, N), from ratios to the nearest image, so that nothing underflows."""
    x = all_images(reference).flatten(1).double()
    sq_dist = (z.flatten(1).double().unsqueeze(1) - x).square().sum(2)
    exponent = (sq_dist - sq_dist.amin(1, keepdim=True)) / t.unsqueeze(1) / t.unsqueeze(1)
    return torch.log_softmax(-exponent / 2, 1)


def enumerated_mean(reference, z, t):
    """Eq. 8 by enumeration in float64."""
    x = all_images(reference).flatten(1).double()
    return (log_posterior(reference, z, t).exp() @ x).reshape(z.shape)


def tolerance(reference):
    """Allowed error: that of integer sums (1e-9 squared), relative to the size of the images."""
    return 2e-4 * max(reference.largest, math.ulp(1))
