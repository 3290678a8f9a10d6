"""How many digits integer sums need for the images at hand, by comparison with float64."""

import torch

from lit_knn.estimators.float_sums import float_sums
from lit_knn.estimators.integer_sums import integer_sums
from lit_knn.reference import ReferenceSet
from lit_knn.rng import keyed_generator
from lit_knn.theory.noise import forward_noise

# What an exact mean may be off, squared and per dimension.
LARGEST_SQ_ERROR = 1e-9
# The largest error of so few latents, of so few images, must stay this much below it.
MARGIN = 5
# Pixels are in [−1, 1], so between these noise levels one image is all of the posterior at the one end, and all of them
# are likely at the other.
LEVELS = torch.logspace(-1, 1.9, 16, dtype=torch.float64)
LATENTS_PER_LEVEL = 4
# Values of the images that are compared.
SUBSET_VALUES = 2**24


def enough_digits(reference: ReferenceSet, candidates: tuple[int, ...] = (2, 3)) -> int | None:
    """The fewest digits of the latents with which `integer_sums` is exact enough; None if it is with none of them.

    It is measured at latents made from the images, over the noise levels between one likely image and all of them. Of a
    large set a random subset is taken, which costs a second at most. Splitting z into digits is rounding it, by δ: the
    mean moves by J·δ, where J = Cov[x|z]/t² is its derivative. J is largest where the posterior has just spread to many
    images, and those of a subset are as far apart as those of the set: what differs is the noise level where that
    happens. On CIFAR-10 the error with two digits is 2.0e-11 over 2,000 images and 2.7e-11 over 50,000. What would grow
    with the set is the rounding of the weights, and these always have three digits.

    Args:
        reference: uint8 images on a CPU that multiplies int8.
        candidates: numbers of digits, ascending.
    """
    generator = keyed_generator("cpu", 0)
    stored = len(reference.images)
    rows = torch.randperm(stored, generator=generator)[: max(SUBSET_VALUES // reference.d, 1)]
    part = reference if len(rows) == stored else ReferenceSet(reference.images[rows], hflip=reference.hflip)
    t = LEVELS.repeat_interleave(LATENTS_PER_LEVEL)
    x = part.gather(torch.randint(part.N, t.shape, generator=generator))
    z = forward_noise(x, t, torch.randn(x.shape, generator=generator))
    expected, _ = float_sums(part, z, t)
    for digits in candidates:
        mean, _ = integer_sums(part, z, t, digits)
        sq_error = (mean - expected).square().flatten(1).mean(1)
        if MARGIN * sq_error.max() < LARGEST_SQ_ERROR:
            return digits
    return None
