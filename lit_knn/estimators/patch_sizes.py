"""Computes the size of patches at each noise level: how far the images' Wiener filter looks around a pixel."""

import math
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.rng import subset_ids
from lit_knn.estimators.counts import check_count
from lit_knn.reference import ReferenceSet

# The spectrum of images is smooth, so 2,000 images are enough to find the sizes.
SPECTRUM_IMAGES = 2000
# The computed table has so many noise levels per factor of 10, over so many factors of 10 above and below the data's
# standard deviation.
LEVELS_PER_DECADE, DECADES = 6, 3
# A window must keep this share of the filter's gain over a filter of single pixels.
KEPT_GAIN = 0.9


def checked_sizes(size: int | Mapping[float, int] | None) -> dict[float, int] | None:
    """Return the option `size` as a table {noise level: size}, or None. Raises InputError for wrong values."""
    if size is None:
        return None
    table = size if isinstance(size, Mapping) else {1.0: size}
    if not table:
        raise InputError(
            f"PatchPosterior: size must be a number, a table of noise levels or null, got {size}"
        )
    for level, edge in table.items():
        if not 0 < level < math.inf:
            raise InputError(
                f"PatchPosterior: the noise levels of size must be finite and above 0, got {level!r}"
            )
        check_count("PatchPosterior", "size", edge)
    return {float(level): edge for level, edge in table.items()}


def sizes_of(reference: ReferenceSet) -> dict[float, int]:
    """Return the table {noise level: size}, computed from a seeded subset of the images."""
    ids = subset_ids(reference.N, SPECTRUM_IMAGES)
    x = reference.take(ids.to(reference.device)).double()
    x -= reference.mean().double().reshape(reference.shape)
    spectrum = power_spectrum(x)
    largest = max(reference.shape[1:])

    # The mean of the spectrum over the frequencies is the variance of a pixel; its root is the unit of the levels.
    deviation = spectrum.mean((1, 2)).mean().sqrt().item()
    if deviation == 0:
        # The images do not vary, so every size gives the same mean. The whole image is the cheapest patch.
        return {1.0: largest}

    steps = range(-DECADES * LEVELS_PER_DECADE, DECADES * LEVELS_PER_DECADE + 1)
    levels = [deviation * 10 ** (step / LEVELS_PER_DECADE) for step in steps]
    # A window wider than the image gains little, and the whole image is cheaper.
    extents = [min(extent(spectrum, level), largest) for level in levels]

    # Less noise never needs a larger patch. But at low noise all filters are nearly equal, and `extent` may then choose
    # one that is too wide. So each size is the smallest extent at this level or above.
    from_highest = accumulate(reversed(extents), min)
    sizes = reversed(list(from_highest))
    return dict(zip(levels, sizes, strict=True))


def power_spectrum(x: Tensor) -> Tensor:
    """Estimate the power spectrum of centred images (N, C, H, W) in the principal axes of their colours, (C, 2H, 2W).

    The spectrum is the Fourier transform of the autocovariance, averaged over positions. Its mean over frequencies is
    the variance of a pixel in each axis. Zero padding to twice the size keeps opposite borders apart. The
    autocovariance of every shift is divided by H·W, not by its number of pixel pairs, so that the spectrum is never
    negative. All is float64.
    """
    n, channels, height, width = x.shape
    colours = torch.einsum("nchw,ndhw->cd", x, x) / (n * height * width)
    axes = torch.linalg.eigh(colours)[1]
    total = x.new_zeros(channels, 2 * height, 2 * width)
    for part in x.split(256):
        rotated = torch.einsum("cd,nchw->ndhw", axes, part)
        total += torch.fft.fft2(rotated, s=(2 * height, 2 * width)).abs().square().sum(0)
    return total / (n * height * width)


def extent(spectrum: Tensor, t: float) -> int:
    """Find the odd edge, in pixels, of the Wiener filter's window at noise level t for a `power_spectrum`.

    For a stationary field of spectrum S, the filter G = S/(S + t²) has the least squared error of all linear filters:
    the mean over frequencies of S·t²/(S + t²). G_p is this filter, cut to a window of p×p pixels, with an error larger
    by mean((S + t²)·|G − G_p|²). The best filter of one pixel has the error v·t²/(v + t²), with the variance v. The
    gain of G is the error of this filter minus the error of G. The extent is the smallest odd p for which G_p keeps
    `KEPT_GAIN` of the gain, at most 2·max(H, W) − 1.
    """
    noise = t * t
    total = spectrum + noise
    transfer = spectrum / total  # G
    response = torch.fft.ifft2(transfer).real
    variance = spectrum.mean((1, 2))
    error_of_pixel = (variance * noise / (variance + noise)).sum()
    error_of_filter = (noise * transfer).mean((1, 2)).sum()
    possible_gain = error_of_pixel - error_of_filter
    offsets = [
        torch.fft.fftfreq(length, 1 / length, device=spectrum.device).abs()
        for length in spectrum.shape[1:]
    ]
    # The distance of each pixel from the window's centre: the larger of those along the two axes.
    distance = torch.maximum(offsets[0][:, None], offsets[1])
    last = max(spectrum.shape[1:]) // 2
    for radius in range(last - 1):
        lost = torch.fft.fft2(response * (distance > radius)).abs().square()
        if (total * lost).mean((1, 2)).sum() <= (1 - KEPT_GAIN) * possible_gain:
            return 2 * radius + 1
    return 2 * last - 1
