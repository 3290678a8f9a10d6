"""The exact posterior mean of pixels by products of 8-bit integers."""

import torch
from torch import Tensor

from lit_knn.estimators.sampled import gather
from lit_knn.posterior import direct_sq_dist, unnormalised_log_likelihood
from lit_knn.quantised import BASE, PIXEL_OFFSET, PIXEL_SCALE, digits_of, product
from lit_knn.reference import ReferenceSet
from lit_knn.snis import weighted_mean

# At small t the weights of the nearest images hang on digits that the product does not have, and only they matter.
RECOMPUTED = 32
# Images outside the recomputed ones are left out where they have less than this share of the posterior.
NEGLIGIBLE_SHARE = 1e-12
# Latents at a time times images, in float32, and images at a time.
SCORE_BYTES = 64 * 2**20
# But so many latents at least: each group of them reads all images once, or twice.
MIN_LATENTS = 64
CHUNK = 8192


def integer_sums(reference: ReferenceSet, z: Tensor, t: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """E[x|z,t], Eq. 8 (eq:posterior_mean), over a set of uint8 images, on a CPU.

    Args:
        reference: the set.
        z: (B, *shape).
        t: (B,).
        count: digits of 8 bits into which z and the weights are split; three are about float32.

    Returns:
        The mean (B, *shape), and the logarithm of the normaliser Σ exp(−‖z − x‖²/2t²), (B,); float64.
    """
    mu, log_normaliser = torch.empty(z.shape, dtype=torch.float64), torch.empty(len(z), dtype=torch.float64)
    step = max(SCORE_BYTES // (4 * reference.N), MIN_LATENTS)
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        mu[rows], log_normaliser[rows] = _mean(reference, z[rows], t[rows], count)
    return mu, log_normaliser


def _mean(reference: ReferenceSet, z: Tensor, t: Tensor, count: int) -> tuple[Tensor, Tensor]:
    log_p = _log_likelihood(reference, z, t, count)
    nearest = log_p.topk(min(RECOMPUTED, reference.N), dim=1).indices
    exact_parts, near_parts = [], []
    for rows, x in gather(reference, nearest):
        exact_parts.append(unnormalised_log_likelihood(direct_sq_dist(z[rows], x), t[rows]))
        near_parts.append(weighted_mean(torch.softmax(exact_parts[-1], dim=1), x.double()))
    exact = torch.cat(exact_parts)
    rest = log_p.scatter_(1, nearest, -torch.inf)
    # Copies of one image, more than are recomputed, share a rounding that at small t may put them far above the exact.
    maximum = torch.maximum(exact.amax(1, keepdim=True), rest.amax(1, keepdim=True).double())
    rest.sub_(maximum.float()).exp_()
    total_near = (exact - maximum).exp().sum(1, keepdim=True)
    total_rest = rest.sum(1, keepdim=True, dtype=torch.float64)
    total = total_near + total_rest
    mu = torch.cat(near_parts).flatten(1) * total_near / total
    needed = (total_rest > NEGLIGIBLE_SHARE * total).flatten().nonzero()[:, 0]
    if len(needed) > 0:
        mu[needed] += _weighted_sum(reference, rest[needed], count) * (total_rest / total)[needed]
    return mu.reshape(z.shape), (maximum + total.log()).squeeze(1)


def _log_likelihood(reference: ReferenceSet, z: Tensor, t: Tensor, count: int) -> Tensor:
    """log p_t(z|x) of all N images up to the Gaussian's constant: (B, N), float32."""
    out = torch.empty(len(z), reference.N)
    stored, half_sq_norms = len(reference.images), reference.half_sq_norms_of_codes()
    factor = (PIXEL_SCALE / t).square().unsqueeze(1)
    for mirror in range(reference.N // stored):
        # ‖z − mirror(x)‖ = ‖mirror(z) − x‖.
        u = ((z.flip(-1) if mirror else z).double() / PIXEL_SCALE - PIXEL_OFFSET).flatten(1)
        half_sq_norm = u.square().sum(1, keepdim=True) / 2
        digits, unit = digits_of(u.float(), count)
        for start in range(0, stored, CHUNK):
            rows = slice(start, min(start + CHUNK, stored))
            scores = product(digits, reference.codes(rows).T).mul_(unit).sub_(half_sq_norms[rows])
            columns = slice(mirror * stored + rows.start, mirror * stored + rows.stop)
            # Where both are large only their difference is small.
            out[:, columns] = scores.double().sub_(half_sq_norm).mul_(factor)
    return out


def _weighted_sum(reference: ReferenceSet, weights: Tensor, count: int) -> Tensor:
    """Σ w x / Σ w over all N images, (B, d) float64, weights rounded to `count` digits."""
    stored = len(reference.images)
    mu = torch.zeros(len(weights), reference.d, dtype=torch.float64)
    digits, _ = digits_of(weights, count)
    for mirror in range(reference.N // stored):
        sums = torch.zeros_like(mu)
        for start in range(0, stored, CHUNK):
            rows = slice(start, min(start + CHUNK, stored))
            columns = slice(mirror * stored + rows.start, mirror * stored + rows.stop)
            sums += product(digits[:, :, columns].contiguous(), reference.codes(rows))
        sums = sums.reshape(-1, *reference.shape)
        mu += (sums.flip(-1) if mirror else sums).flatten(1)
    total = sum(digits[j].sum(1, keepdim=True, dtype=torch.float64) / BASE**j for j in range(count))
    return (mu / total + PIXEL_OFFSET) * PIXEL_SCALE
