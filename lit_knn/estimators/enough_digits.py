"""Measures how many digits integer sums need for given images, by comparison with float64."""

import torch

from lit_knn.estimators.float_sums import float_sums
from lit_knn.estimators.integer_sums import integer_sums
from lit_knn.reference import ReferenceSet
from lit_knn.rng import keyed_generator
from lit_knn.theory.noise import forward_noise

# A mean counts as exact if its squared error per dimension is at most this number.
LARGEST_SQ_ERROR = 1e-9
# The measured error must be smaller by this factor, because few latents and few images are measured.
MARGIN = 5
# Noise levels for pixels in [−1, 1]. At the lowest level, one image has the whole posterior. At the highest level, all
# images are likely.
LEVELS = torch.logspace(-1, 1.9, 16, dtype=torch.float64)
LATENTS_PER_LEVEL = 4
# Number of pixel values in the subset of images.
SUBSET_VALUES = 2**24


def enough_digits(reference: ReferenceSet, candidates: tuple[int, ...] = (2, 3)) -> int | None:
    """Find the fewest digits of z with which `integer_sums` is exact enough. Returns None if no candidate is enough.

    The error is measured at latents made from the images. The noise levels range from one likely image to all images
    likely. A random subset replaces a large set, so the measurement takes a second at most.

    The subset is enough: digits round z by some δ, and this moves the mean by J·δ, where J = Cov[x|z]/t². J is largest
    where the posterior has just spread to many images. A subset has the same distances between images; only the noise
    level of the largest J differs. On CIFAR-10 the error with two digits is 2.0e-11 over 2,000 images and 2.7e-11 over
    50,000. Only the rounding of the weights grows with the set, and weights always have three digits.

    Args:
        reference: uint8 images on a CPU that multiplies int8.
        candidates: numbers of digits, ascending.
    """
    generator = keyed_generator("cpu", 0)
    stored = len(reference.images)
    rows = torch.randperm(stored, generator=generator)[: max(SUBSET_VALUES // reference.d, 1)]
    part = reference if len(rows) == stored else ReferenceSet(reference.images[rows], hflip=reference.hflip)
    t = LEVELS.repeat_interleave(LATENTS_PER_LEVEL)
    x = part.take(torch.randint(part.N, t.shape, generator=generator))
    z = forward_noise(x, t, torch.randn(x.shape, generator=generator))
    expected, _ = float_sums(part, z, t)
    for digits in candidates:
        mean, _ = integer_sums(part, z, t, digits)
        sq_error = (mean - expected).square().flatten(1).mean(1)
        if MARGIN * sq_error.max() < LARGEST_SQ_ERROR:
            return digits
    return None
