"""Measures how many digits the products need for given images, by comparison with float64."""

import torch

from lit_knn.estimators.digit_sums import digit_sums
from lit_knn.estimators.float_sums import float_sums
from lit_knn.linalg.split import Products, products_for
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


def exact_products(reference: ReferenceSet) -> Products | None:
    """Choose the fastest products that are exact enough for the images on their device. None stands for float64."""
    kind = products_for(reference.device) if reference.images.dtype == torch.uint8 else None
    return None if kind is None else enough_digits(reference, kind)


def enough_digits(
    reference: ReferenceSet, kind: type[Products], candidates: tuple[int, ...] = (2, 3)
) -> Products | None:
    """Find the fewest digits of z with which `digit_sums` is exact enough. Returns None if no candidate is enough.

    The measurement runs on the device of the images, so that it sees how this device rounds.

    The error is measured at latents made from the images. The noise levels range from one likely image to all images
    likely. A random subset replaces a large set, so the measurement takes a second at most.

    The subset is enough: digits round z by some δ, and this moves the mean by J·δ, where J = Cov[x|z]/t². J is largest
    where the posterior has just spread to many images. A subset has the same distances between images; only the noise
    level of the largest J differs. On CIFAR-10 the error with two digits is 2.0e-11 over 2,000 images and 2.7e-11 over
    50,000. Only the rounding of integer weights grows with the set, and these always have three digits.

    Args:
        reference: uint8 images.
        kind: the products, which the device of the images multiplies natively.
        candidates: numbers of digits, ascending.
    """
    generator = keyed_generator("cpu", 0)
    stored = len(reference.images)
    rows = torch.randperm(stored, generator=generator)[: max(SUBSET_VALUES // reference.d, 1)]
    device = reference.device
    part = reference
    if len(rows) < stored:
        part = ReferenceSet(reference.images[rows.to(device)], hflip=reference.hflip)
    t = LEVELS.repeat_interleave(LATENTS_PER_LEVEL).to(device)
    x = part.take(torch.randint(part.N, t.shape, generator=generator).to(device))
    z = forward_noise(x, t, torch.randn(x.shape, generator=generator).to(device))
    expected, _ = float_sums(part, z, t)
    for products in map(kind, candidates):
        mean, _ = digit_sums(part, z, t, products)
        sq_error = (mean - expected).square().flatten(1).mean(1)
        if MARGIN * sq_error.max() < LARGEST_SQ_ERROR:
            return products
    return None
