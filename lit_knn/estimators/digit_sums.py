"""The exact posterior mean of pixels by products of small numbers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lit_knn.linalg.int8 import PIXEL_OFFSET, PIXEL_SCALE
from lit_knn.linalg.split import Products, products_for
from lit_knn.reference import ReferenceSet
from lit_knn.reference.gathered import Gathered
from lit_knn.reference.pixel_codes import half_sq_norms_of
from lit_knn.reference.streaming import work_bytes
from lit_knn.theory.posterior import unnormalised_log_likelihood

# Number of nearest images whose distances are recomputed. At small t only these images matter, and the products of
# digits are not precise enough for them.
RECOMPUTED = 32
# All other images are left out if they together have less than this share of the posterior.
NEGLIGIBLE_SHARE = 1e-12
# Bytes for the float32 scores of one group of latents on a CPU. Each pair of a latent and an image has one score.
SCORE_BYTES = 64 * 2**20
# A GPU takes this many times `work_bytes`, because every group reads and converts all images.
GPU_SCORE_ARRAYS = 4
# Latents of the batch for which plans count the scores.
PLANNED_LATENTS = 1024
# Minimum number of latents per group. It limits the groups, because every group reads all images once or twice.
MIN_LATENTS = 64
# Number of images per product on a CPU.
CHUNK = 8192
# Integer products on a GPU need multiples of this number.
ROW_MULTIPLE = 8
# Bounds of (PIXEL_SCALE / t)², the factor of a score in float32. Beyond them, where t is outside [1e-20, 1e16], only
# the best image is likely, or all images are equally likely.
LEAST_FACTOR, MOST_FACTOR = 1e-37, 1e37


def digit_sums(reference: ReferenceSet, z: Tensor, t: Tensor, products: Products) -> tuple[Tensor, Tensor]:
    """Compute E[x|z,t], Eq. 8 (eq:posterior_mean), over uint8 images. It is called like `float_sums`.

    The latents are split into groups and the images into chunks, so that the memory does not grow with B, apart from
    the result. It grows with N only where the scores of `MIN_LATENTS` latents, 256 bytes an image, need more than the
    usual bound. On a GPU it is at most `score_bytes` for the scores of a group, 2 GiB for up to 8 million images, and
    four work arrays of 512 MiB.
    """
    step = score_bytes(reference.N, z.device) // (4 * reference.N)
    if z.is_cuda:
        # The latents themselves take memory, too, if there are few images.
        step = min(step, max(work_bytes(z.device) // (16 * reference.d), MIN_LATENTS))
    if 0 < len(z) <= step:
        return _mean(reference, z, t, products)
    mu = torch.empty(z.shape, dtype=torch.float64, device=z.device)
    log_normaliser = torch.empty(len(z), dtype=torch.float64, device=z.device)
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        mu[rows], log_normaliser[rows] = _mean(reference, z[rows], t[rows], products)
    return mu, log_normaliser


def digit_log_likelihoods(reference: ReferenceSet, z: Tensor, t: Tensor, products: Products) -> Tensor:
    """Compute log p_t(z|x) up to a constant for each z, for all images: (B, N) float64."""
    z = z.double()
    scores, half_sq_norm = _scores(reference, z, products)
    per_score = (PIXEL_SCALE / t).square().unsqueeze(1)
    nearest = _nearest(scores)
    exact = _joined([log_p for _, log_p in _recomputed(reference, z, t, nearest)])
    # The row's constant is taken from the few exact ones. Passes over all scores in float64 would cost most.
    best = scores.gather(1, nearest[:, :1])
    exact -= (best - half_sq_norm) * per_score
    return (scores.sub_(best) * per_score).scatter_(1, nearest, exact)


def score_bytes(N: int, device: torch.device) -> int:
    """Return the most bytes of the scores of one group of latents and N images."""
    most = SCORE_BYTES if device.type == "cpu" else GPU_SCORE_ARRAYS * work_bytes(device)
    return max(most, 4 * N * MIN_LATENTS)


def digits_hold(N: int, device: torch.device) -> dict[str, int]:
    """Return what sums over N images hold on a device: bytes by array name. See `Holdings.arrays`."""
    # If this machine has no GPU, a planned one counts as a current one.
    planned = device.type == "cuda" and not torch.cuda.is_available()
    if not planned and products_for(device) is None:
        return {}
    held = {"norms of the images": 4 * N}
    if device.type == "cuda":
        held[f"scores of {PLANNED_LATENTS} latents"] = min(score_bytes(N, device), 4 * N * PLANNED_LATENTS)
    return held


def _mean(reference: ReferenceSet, z: Tensor, t: Tensor, products: Products) -> tuple[Tensor, Tensor]:
    z = z.double()
    scores, half_sq_norm = _scores(reference, z, products)
    per_score = (PIXEL_SCALE / t).square().unsqueeze(1)
    nearest = _nearest(scores)
    exact_parts, near_parts = [], []
    for images, log_p in _recomputed(reference, z, t, nearest):
        exact_parts.append(log_p)
        near_parts.append(images.mean(torch.softmax(log_p, dim=1)))
    exact = _joined(exact_parts)
    rest = scores.scatter_(1, nearest, -torch.inf)
    best = rest.amax(1, keepdim=True)
    log_best = (best - half_sq_norm) * per_score
    # Subtract `best` first, because only differences of large scores are precise. If no rest is left, `best` is −inf.
    rest.sub_(best if reference.N > RECOMPUTED else 0.0)
    rest.mul_(per_score.float().clamp(LEAST_FACTOR, MOST_FACTOR)).exp_()
    # An image may have more copies than are recomputed. At small t, rounding may then put the likelihoods of the other
    # copies far above the exact ones.
    maximum = torch.maximum(exact.amax(1, keepdim=True), log_best)
    total_near = (exact - maximum).exp().sum(1, keepdim=True)
    total_rest = _row_sums(rest).unsqueeze(1) * (log_best - maximum).exp()
    total = total_near + total_rest
    mu = _joined(near_parts).flatten(1) * total_near / total
    if reference.N > RECOMPUTED:
        _add_rest(mu, reference, rest, total_rest / total, products)
    return mu.reshape(z.shape), (maximum + total.log()).squeeze(1)


def _add_rest(mu: Tensor, reference: ReferenceSet, rest: Tensor, share: Tensor, products: Products) -> None:
    """Add the images that are not recomputed, with weights `rest` (B, N) and posterior share (B, 1), to mu (B, d)."""
    if mu.is_cuda:
        # To choose rows would wait for the device.
        mu.addcmul_(_weighted_sum(reference, rest, products), share)
        return
    needed = (share > NEGLIGIBLE_SHARE).flatten().nonzero()[:, 0]
    if len(needed) > 0:
        mu[needed] += _weighted_sum(reference, rest[needed], products) * share[needed]


def _nearest(scores: Tensor) -> Tensor:
    """Return the ids of the images to recompute, (B, m)."""
    return scores.topk(min(RECOMPUTED, scores.shape[1]), dim=1).indices


def _recomputed(reference: ReferenceSet, z: Tensor, t: Tensor, ids: Tensor) -> Iterator[tuple[Gathered, Tensor]]:
    """Yield the images of some rows and their log-likelihoods (b, m), from the differences z − x.

    z has float64, because at small t the weights depend on the last digits of a float32 distance.
    """
    step = max(2**20 // (ids.shape[1] * reference.d), 1)
    for start in range(0, max(len(ids), 1), step):
        rows = slice(start, start + step)
        images = Gathered(reference.take(ids[rows]).double())
        yield images, unnormalised_log_likelihood(images.sq_dist(z[rows]), t[rows])


def _scores(reference: ReferenceSet, z: Tensor, products: Products) -> tuple[Tensor, Tensor]:
    """Return u·c − ‖c‖²/2, (B, N) float32, and ‖u‖²/2, (B, 1) float64, for codes u of z and codes c of the N images.

    The first minus the second is −‖u − c‖²/2: the log-likelihood in units of (PIXEL_SCALE / t)², up to a constant.
    """
    out = torch.empty(len(z), reference.N, dtype=torch.float32, device=z.device)
    half_sq_norms = half_sq_norms_of(reference)
    for mirror in range(reference.N // len(reference.images)):
        # ‖z − mirror(x)‖ = ‖mirror(z) − x‖.
        u = ((z.flip(-1) if mirror else z) / PIXEL_SCALE - PIXEL_OFFSET).flatten(1)
        digits = products.split(u.float(), products.digits)
        for rows, columns in _chunks(reference, mirror, len(z), products):
            score = products.multiply(digits.values, products.operand(reference.rows(rows).flatten(1)).T)
            if digits.unit is not None:
                score.mul_(digits.unit)
            torch.sub(score, half_sq_norms[rows], out=out[:, columns])
    return out, u.square().sum(1, keepdim=True) / 2


def _weighted_sum(reference: ReferenceSet, weights: Tensor, products: Products) -> Tensor:
    """Return Σ w x / Σ w over all N images, (B, d) float64, with weights rounded to some digits."""
    mu, total = None, None
    for mirror in range(reference.N // len(reference.images)):
        sums = None
        for rows, columns in _chunks(reference, mirror, len(weights), products):
            # The best image of a row has weight 1.
            digits = products.split(weights[:, columns], products.weight_digits, largest=1.0).values
            sums = _plus(sums, products.multiply(digits, products.operand(reference.rows(rows).flatten(1))))
            total = _plus(total, _row_sums(digits))
        assert sums is not None
        sums = sums.reshape(len(sums), *reference.shape)
        mu = _plus(mu, (sums.flip(-1) if mirror else sums).flatten(1))
    assert mu is not None
    assert total is not None
    return (mu / products.total(total) + PIXEL_OFFSET) * PIXEL_SCALE


def _row_sums(values: Tensor) -> Tensor:
    """Sum over the last axis, in float64 if a CPU does it."""
    # To sum in float64, CUDA would write a float64 copy of all values. It sums float32 in many small parts, so that few
    # roundings add up.
    return values.sum(-1, dtype=torch.float32).double() if values.is_cuda else values.sum(-1, dtype=torch.float64)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    """Add a part to a total, which is None before the first part. Sums of several parts are float64."""
    return part if total is None else total.double().add_(part)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join the rows of several parts. One part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _chunks(reference: ReferenceSet, mirror: int, latents: int, products: Products) -> Iterator[tuple[slice, slice]]:
    """Yield stored rows and their ids, for products of some latents in bounded memory."""
    stored, step, device = len(reference.images), CHUNK, reference.device
    if device.type != "cpu":
        # Long kernels are fastest. The images of a chunk have 16 bits a code at most.
        bytes_per_image = max(2 * reference.d, products.part_bytes(reference.d) * latents // 2)
        step = max(work_bytes(device) // bytes_per_image // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    for start in range(0, stored, step):
        rows = slice(start, min(start + step, stored))
        yield rows, slice(mirror * stored + rows.start, mirror * stored + rows.stop)
