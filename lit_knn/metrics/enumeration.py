"""Posteriors of noisy latents, enumerated over all images in float64."""

import torch
from torch import Generator, Tensor

from lit_knn.reference import ReferenceSet
from lit_knn.reference.images import chunk_rows
from lit_knn.reference.streaming import all_sq_dist
from lit_knn.theory.posterior import log_posterior

# A posterior is collapsed if one image has more than this share of it.
COLLAPSED = 0.99
# Number of images drawn from each posterior. More draws would gain little, because errors differ more between latents
# than between estimates at one latent.
SOURCES = 2

Columns = dict[str, Tensor]  # by the names in docs/probe.md


def posterior(
    images: ReferenceSet,
    z: Tensor,
    t: float,
    generator: Generator,
) -> tuple[Tensor, Tensor, Columns]:
    """Enumerate the posterior p_t(x|z), Eq. 2 (eq:posterior), at each z.

    Args:
        images: the images that the posterior is over.
        z: (B, *shape), noisy latents.
        t: their noise level.
        generator: draws the sources.

    Returns:
        The posterior's mean, (B, *shape) float64; images drawn from it, (SOURCES, B, *shape); and
        four columns, (B,) each.
    """
    p = log_posterior(all_sq_dist(images, z), t).exp()
    mean, variance = mean_and_variance(images, p)
    columns = {
        "irreducible": variance,
        "images": torch.special.entr(p).sum(1).exp(),
        "collapsed": (p.amax(1) > COLLAPSED).double(),
    }
    ids = torch.multinomial(p, SOURCES, replacement=True, generator=generator)

    # A tenth of the images are those with numbers divisible by 10, and the source of z, for which the first draw from
    # the posterior stands. An image and its mirror image have one number.
    number = torch.arange(images.N, device=z.device) % len(images.images)
    is_source = number == ids[:, :1] % len(images.images)
    p *= (number % 10 == 0) | is_source
    columns["collapsed_tenth"] = (p.amax(1) > COLLAPSED * p.sum(1)).double()
    return mean.reshape(z.shape), images.gather(ids.T), columns


def mean_and_variance(images: ReferenceSet, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean, (B, d) float64, and variance per dimension, (B,), of images with probabilities p (B, N) float64."""
    mean = p.new_zeros(len(p), images.d)
    sq_norm = p.new_zeros(len(p))
    for start, chunk in images.chunks(chunk_rows(images.d)):
        x = chunk.flatten(1).double()
        share = p[:, start : start + len(chunk)]
        mean += share @ x
        sq_norm += share @ x.square().sum(1)

    variance = sq_norm - mean.square().sum(1)
    variance = variance.where(variance > 1e-12 * sq_norm, 0.0)  # The rest is rounding.
    return mean, variance / images.d
