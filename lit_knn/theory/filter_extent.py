"""How far the Wiener filter of images looks around a pixel at each noise level."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Share of the filter's gain over a filter of single pixels that its window keeps.
KEPT_GAIN = 0.9


def power_spectrum(x: Tensor) -> Tensor:
    """Estimate the power spectrum of images in the principal axes of their colours.

    It is the Fourier transform of the autocovariance, averaged over positions. Zero padding to twice the size keeps
    opposite borders apart, and dividing by H·W for all shifts keeps the spectrum positive.

    Args:
        x: (N, C, H, W) float64, centred.

    Returns:
        (C, 2H, 2W) float64; the mean over frequencies is the variance of a pixel in that axis.
    """
    n, channels, height, width = x.shape
    colours = torch.einsum("nchw,ndhw->cd", x, x) / (n * height * width)
    axes = torch.linalg.eigh(colours)[1]
    total = x.new_zeros(channels, 2 * height, 2 * width)
    for part in x.split(256):
        rotated = torch.einsum("cd,nchw->ndhw", axes, part)
        total += torch.fft.fft2(rotated, s=(2 * height, 2 * width)).abs().square().sum(0)
    return total / (n * height * width)


def extents(spectrum: Tensor, levels: Sequence[float]) -> list[int]:
    """Find the window of the Wiener filter at each noise level.

    For a stationary field of spectrum S, the filter G = S/(S + t²) has the least squared error of all linear filters,
    mean over frequencies of S·t²/(S + t²). The filter that is cut to a window of p×p pixels, G_p, has the error
    mean((S + t²)·|G − G_p|²) more. The best filter of one pixel has the error v·t²/(v + t²), v the variance. The
    extent is the least odd p whose cut filter keeps `KEPT_GAIN` of the difference between the two.

    Args:
        spectrum: (C, 2H, 2W), see `power_spectrum`.
        levels: noise levels t > 0.

    Returns:
        The odd edge p in pixels for each level, at most 2·max(H, W) − 1.
    """
    return [_extent(spectrum, level) for level in levels]


def _extent(spectrum: Tensor, t: float) -> int:
    noise = t * t
    total = spectrum + noise
    gain = spectrum / total
    response = torch.fft.ifft2(gain).real
    variance = spectrum.mean((1, 2))
    possible = (variance * noise / (variance + noise)).sum() - (noise * gain).mean((1, 2)).sum()
    offsets = [torch.fft.fftfreq(length, 1 / length, device=spectrum.device).abs() for length in spectrum.shape[1:]]
    distance = torch.maximum(offsets[0][:, None], offsets[1])
    last = max(spectrum.shape[1:]) // 2
    for radius in range(last - 1):
        lost = torch.fft.fft2(response * (distance > radius)).abs().square()
        if (total * lost).mean((1, 2)).sum() <= (1 - KEPT_GAIN) * possible:
            return 2 * radius + 1
    return 2 * last - 1
