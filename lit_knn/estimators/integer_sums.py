"""The exact posterior mean of pixels by products of 8-bit integers."""

import torch
from torch import Tensor

from lit_knn.estimators.sampled import gather
from lit_knn.linalg.int8 import BASE, PIXEL_OFFSET, PIXEL_SCALE, digits_of, product
from lit_knn.reference import ReferenceSet
from lit_knn.reference.pixel_codes import codes_of, half_sq_norms_of
from lit_knn.theory.posterior import direct_sq_dist, unnormalised_log_likelihood
from lit_knn.theory.snis import weighted_mean

# Number of nearest images whose distances are recomputed. At small t only these images matter, and the integer products
# are not precise enough for them.
RECOMPUTED = 32
# All other images are left out if they together have less than this share of the posterior.
NEGLIGIBLE_SHARE = 1e-12
# Number of digits of the weights. Weights below the last digit of the largest weight are lost, and larger sets have
# more such weights. On CIFAR-10, two digits of the weights would lose 30 times more than two digits of z.
WEIGHT_DIGITS = 3
# Bytes for the float32 scores of one group of latents. Each pair of a latent and an image has one score.
SCORE_BYTES = 64 * 2**20
# Minimum number of latents per group. It limits the groups, because every group reads all images once or twice.
MIN_LATENTS = 64
# Number of images per product.
CHUNK = 8192
# Noise levels at which the factor (PIXEL_SCALE / t)² of a score, and its logarithms, fit float32.
LEAST_T, MOST_T = 1e-15, 1e15


def integer_sums(reference: ReferenceSet, z: Tensor, t: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute E[x|z,t], Eq. 8 (eq:posterior_mean), over uint8 images on a CPU. It is called like `float_sums`.

    z is split into `count` 8-bit digits; three are about as precise as float32. `suits_levels(t)` must hold.
    """
    mu, log_normaliser = torch.empty(z.shape, dtype=torch.float64), torch.empty(len(z), dtype=torch.float64)
    step = max(SCORE_BYTES // (4 * reference.N), MIN_LATENTS)
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        mu[rows], log_normaliser[rows] = _mean(reference, z[rows], t[rows], count)
    return mu, log_normaliser


def suits_levels(t: Tensor) -> bool:
    """Tells whether integer sums hold the logarithms of all noise levels (B,)."""
    return bool(((t >= LEAST_T) & (t <= MOST_T)).all())


def _mean(reference: ReferenceSet, z: Tensor, t: Tensor, count: int) -> tuple[Tensor, Tensor]:
    scores, half_sq_norm = _scores(reference, z, count)
    per_score = (PIXEL_SCALE / t).square().unsqueeze(1)
    nearest = scores.topk(min(RECOMPUTED, reference.N), dim=1).indices
    exact_parts, near_parts = [], []
    for rows, x in gather(reference, nearest):
        # Use float64, because at small t the weights depend on the last digits of a float32 distance.
        exact_parts.append(unnormalised_log_likelihood(direct_sq_dist(z[rows].double(), x), t[rows]))
        near_parts.append(weighted_mean(torch.softmax(exact_parts[-1], dim=1), x.double()))
    exact = torch.cat(exact_parts)
    rest = scores.scatter_(1, nearest, -torch.inf)
    best = rest.amax(1, keepdim=True)
    log_best = (best.double() - half_sq_norm) * per_score
    # Subtract `best` first, because only differences of large scores are precise. If no rest is left, `best` is −inf.
    rest.sub_(best.clamp(min=torch.finfo(best.dtype).min)).mul_(per_score.float()).exp_()
    # An image may have more copies than are recomputed. At small t, rounding may then put the likelihoods of the other
    # copies far above the exact ones.
    maximum = torch.maximum(exact.amax(1, keepdim=True), log_best)
    total_near = (exact - maximum).exp().sum(1, keepdim=True)
    total_rest = rest.sum(1, keepdim=True, dtype=torch.float64) * (log_best - maximum).exp()
    total = total_near + total_rest
    mu = torch.cat(near_parts).flatten(1) * total_near / total
    needed = (total_rest > NEGLIGIBLE_SHARE * total).flatten().nonzero()[:, 0]
    if len(needed) > 0:
        mu[needed] += _weighted_sum(reference, rest[needed]) * (total_rest / total)[needed]
    return mu.reshape(z.shape), (maximum + total.log()).squeeze(1)


def _scores(reference: ReferenceSet, z: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return u·c − ‖c‖²/2, (B, N) float32, and ‖u‖²/2, (B, 1) float64, for codes u of z and codes c of the N images.

    The first minus the second is −‖u − c‖²/2: the log-likelihood in units of (PIXEL_SCALE / t)², up to a constant.
    """
    out = torch.empty(len(z), reference.N, dtype=torch.float32)
    stored, half_sq_norms = len(reference.images), half_sq_norms_of(reference)
    for mirror in range(reference.N // stored):
        # ‖z − mirror(x)‖ = ‖mirror(z) − x‖.
        u = ((z.flip(-1) if mirror else z).double() / PIXEL_SCALE - PIXEL_OFFSET).flatten(1)
        digits, unit = digits_of(u.float(), count)
        for start in range(0, stored, CHUNK):
            rows = slice(start, min(start + CHUNK, stored))
            columns = slice(mirror * stored + rows.start, mirror * stored + rows.stop)
            out[:, columns] = product(digits, codes_of(reference, rows).T).mul_(unit).sub_(half_sq_norms[rows])
    return out, u.square().sum(1, keepdim=True) / 2


def _weighted_sum(reference: ReferenceSet, weights: Tensor) -> Tensor:
    """Return Σ w x / Σ w over all N images, (B, d) float64, with weights rounded to `WEIGHT_DIGITS` digits."""
    stored = len(reference.images)
    mu = torch.zeros(len(weights), reference.d, dtype=torch.float64)
    digits, _ = digits_of(weights, WEIGHT_DIGITS)
    for mirror in range(reference.N // stored):
        sums = torch.zeros_like(mu)
        for start in range(0, stored, CHUNK):
            rows = slice(start, min(start + CHUNK, stored))
            columns = slice(mirror * stored + rows.start, mirror * stored + rows.stop)
            sums += product(digits[:, :, columns].contiguous(), codes_of(reference, rows))
        sums = sums.reshape(-1, *reference.shape)
        mu += (sums.flip(-1) if mirror else sums).flatten(1)
    total = sum(digits[j].sum(1, keepdim=True, dtype=torch.float64) / BASE**j for j in range(WEIGHT_DIGITS))
    return (mu / total + PIXEL_OFFSET) * PIXEL_SCALE
