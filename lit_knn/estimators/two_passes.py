"""The exact mean at any noise: likelihoods in float32, the large ones again in float64, then the sums."""

import math

import torch
from torch import Tensor

from lit_knn.common.memory import work_bytes
from lit_knn.estimators.centred import TOLERANCE, CentredImages, Latents, inverse, rounding_of
from lit_knn.estimators.float64_mean import float_sums
from lit_knn.estimators.weighted_sum import WeightedSum
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import unnormalised_log_likelihood

# Nearest images of each z that may be computed again in float64. At small t only these matter.
NEAREST = 32
# The images that are left out of a mean have together less than this share of the posterior.
LEFT_OUT = 1e-8
# If more than this share of the images matters, all are multiplied, because choosing takes time, too.
MANY = 0.9
# Smallest logarithm of a weight. Much smaller weights would be denormal numbers, with which processors are slow.
LEAST_LOG = -80.0


def sums_in_two_passes(
    images: CentredImages, latents: Latents, z: Tensor, t: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the exact mean at any noise: likelihoods in float32, the large ones again in float64, and then the sums.

    Returns the mean (b, d) and the log normaliser (b,).
    """
    scores = images.scores(latents)
    near, needed = _move_to_float64(images, latents, scores)

    # The best score of the images that stay in float32. If there are none, it would be −inf.
    top = scores.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    log_top = (top.double() - latents.half_sq_norm) / latents.noise
    maximum, total, sums = _nearest(images.part, z, t, near, needed, log_top)

    log_share = log_top - maximum
    rows = _latents_with_other_images(log_share, images.part.N)
    if rows is not None:
        # Subtract `top` first, because only differences of large scores are precise.
        log_weights = scores[rows].sub_(top[rows]).mul_(inverse(latents.noise[rows]))
        log_weights.add_(log_share[rows].float())
        other_total, other_sums = _sums_of_weights(images, log_weights)
        total[rows] += other_total
        sums[rows] += other_sums

    mean = sums / total
    log_normaliser = (maximum + total.log()).squeeze(1)

    # If even the last of the `NEAREST` images needs float64, others may need it, too. On a GPU, finding these rows
    # would make the CPU wait.
    if not z.is_cuda and images.part.N > NEAREST and needed[:, -1].any():
        rows = needed[:, -1].nonzero().squeeze(1)
        again, log_normaliser[rows] = float_sums(images.part, z[rows], t[rows])
        mean[rows] = again.flatten(1)
    return mean, log_normaliser


def _move_to_float64(
    images: CentredImages, latents: Latents, scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose the images whose likelihoods need float64, and set their scores (b, N) to −inf.

    Returns the ids of the nearest images, (b, k), best first, and which of them need float64, (b, k) bool.
    """
    best, near = scores.topk(min(NEAREST, images.part.N), dim=1)
    rounding = rounding_of(images, latents, best.abs().amax(1, keepdim=True))

    # The true log-likelihood of an image may be higher by twice the rounding.
    log_share = torch.log_softmax(best / latents.noise, dim=1)
    needed = log_share > (TOLERANCE / rounding).log() - 2 * rounding
    if latents.u.is_cuda:
        # On a GPU, counting those that are needed would make the CPU wait, so all are computed.
        needed.fill_(True)

    scores.scatter_(1, near, best.masked_fill_(needed, -torch.inf))
    return near, needed


def _nearest(
    part: ReferenceSet, z: Tensor, t: Tensor, ids: Tensor, needed: Tensor, log_top: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the weights w of the `needed` images, from differences z − x in float64.

    Args:
        part: the images.
        z: (b, *shape), noisy latents.
        t: (b,), noise levels.
        ids: (b, k), numbers of the nearest images.
        needed: (b, k), bool, which of them to sum. They come first in each row, as the best ones.
        log_top: (b, 1), the largest log-likelihood of all other images.

    Returns:
        `maximum` (b, 1), the largest log-likelihood, also of the other images; Σ w, (b, 1); and Σ w x, (b, d), where
        w = likelihood / exp(maximum).
    """
    maximum = log_top.clone()
    total = torch.zeros_like(log_top)
    sums = log_top.new_zeros(len(z), part.d)

    step = max(work_bytes(z.device) // (16 * ids.shape[1] * part.d), 1)
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        k = ids.shape[1] if z.is_cuda else int(needed[rows].sum(1).amax())
        # No image needs float64, as at high noise.
        if k == 0:
            continue

        x = part.take(ids[rows, :k]).flatten(2).double()
        sq_dist = (x - z[rows].flatten(1).unsqueeze(1)).square_().sum(2)
        log_p = unnormalised_log_likelihood(sq_dist, t[rows])
        log_p.masked_fill_(~needed[rows, :k], -torch.inf)

        maximum[rows] = torch.maximum(maximum[rows], log_p.amax(1, keepdim=True))
        weights = (log_p - maximum[rows]).exp_()
        total[rows] = weights.sum(1, keepdim=True)
        sums[rows] = torch.bmm(weights.unsqueeze(1), x).squeeze(1)
    return maximum, total, sums


def _latents_with_other_images(log_share: Tensor, N: int) -> Tensor | slice | None:
    """Return the rows of the latents for which the images that stay in float32 matter; None if there are no such rows.

    At low noise levels these are few. `log_share` (b, 1) is the logarithm of the largest weight of such an image.
    """
    if log_share.is_cuda:
        # Counting these rows would make the CPU wait for the GPU.
        return slice(None)

    count = int((log_share > math.log(LEFT_OUT / N)).sum())
    if count == 0:
        return None
    # A copy of most of the scores would take too much memory.
    if 2 * count > len(log_share):
        return slice(None)
    return log_share[:, 0].topk(count).indices


def _sums_of_weights(images: CentredImages, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ w, (b, 1), and Σ w x, (b, d), over all images whose weight matters. `log_weights` is (b, N)."""
    b, N = log_weights.shape
    stored = N // images.halves
    ids = None
    if not log_weights.is_cuda:
        # On a GPU, counting those that matter would make the CPU wait. A stored image matters if it or its mirror image
        # matters for any latent.
        matters = log_weights.amax(0).view(-1, stored).amax(0) > math.log(LEFT_OUT / N)
        if matters.sum() <= MANY * stored:
            ids = matters.nonzero().squeeze(1)

    weighted = WeightedSum(images, b)
    log_weights = log_weights.view(-1, stored)
    for rows, y in images.pieces(ids, centred=False):
        weighted.add(log_weights[:, rows].clamp(min=LEAST_LOG).exp_(), y)
    return weighted.result()
