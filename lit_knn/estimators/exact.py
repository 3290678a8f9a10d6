"""The exact posterior mean over all images of the reference set."""

import math
from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from lit_knn.common.memory import work_bytes
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.checks import Query
from lit_knn.index.precision import is_native, matmul_float32, whole_tiles
from lit_knn.reference import ReferenceSet
from lit_knn.reference.streaming import batches_of, stream_sq_dist
from lit_knn.theory.posterior import unnormalised_log_likelihood
from lit_knn.theory.warp import Warp

# Nearest images of each z that may be computed again in float64. At small t only these matter.
NEAREST = 32
# float32 rounds a score by about this share of the sum of its absolute terms.
ROUNDING = 2.0**-21
# An image is computed again in float64 if its share of the posterior, times the rounding of its log-likelihood, exceeds
# this number. The number bounds the squared error by 1e-5 · rounding · variance of the posterior.
TOLERANCE = 1e-5
# All images that are left out of a mean have less than this share of the posterior together.
LEFT_OUT = 1e-8
# float32 adds up this many terms, and float64 adds up the sums.
TERMS = 1024
# If more than this share of the images is left, multiply all images, because choosing takes time, too.
MANY = 0.9
# Bytes of images per product, which fit a CPU's cache, and maximum number of images per product, because float32 sums
# them.
CHUNK_BYTES, CHUNK = 3 * 2**20, {"cpu": 512, "cuda": 8192}
# Bytes for the float32 scores of one group of latents on a CPU, and the minimum number of latents per group, because
# every group reads all images twice. On a GPU the scores take several work arrays.
SCORE_BYTES, MIN_LATENTS, GPU_SCORE_ARRAYS = 64 * 2**20, 64, 4
# Bounds of 1/t² in float32: above the first only the best image is likely, below its inverse all images are. Weights
# below e^LEAST_LOG would be denormal numbers, which are slow.
MOST_FACTOR, LEAST_LOG = 1e37, -80.0


class Exact(Estimator):
    """E[x|z,t] over all N images, Eq. 8 (eq:posterior_mean): no bias and no variance, cost O(N·d) per z.

    It multiplies in float32. In float64 it repeats the distances that float32 cannot hold at small t: to the nearest
    images, or to all images if more than 32 share the posterior. Its squared error per dimension is far below 1e-9 of
    the set's variance. On a GPU the CPU would have to wait for the choice, so `Exact` always repeats the nearest 32
    images of each z, and computes a set of floats entirely in float64. Memory stays bounded for any B and N, apart from
    the norms of the images and their scores for 64 latents.
    """

    deterministic = True
    shardable = True

    def memory(self, N: int, d: int) -> dict[str, int]:
        return {"norms of the images": 4 * N}

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        return _join(*self.reference.over_shards(exact_sums, z, t.flatten()))

    def log_density_of(self, query: Query) -> Tensor:
        t = query.t.flatten()
        _, log_normalisers = self.reference.over_shards(exact_sums, query.z, t)
        log_sum = torch.logsumexp(log_normalisers, dim=0)
        log_gaussian = -self.reference.d * (t.log() + 0.5 * math.log(2 * math.pi))

        return log_sum - math.log(self.reference.N) + log_gaussian

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: Generator | None
    ) -> Tensor:
        """Compute in float64, and resample every image for each z. This costs N times as much as warping a batch."""

        def mean(
            part: ReferenceSet, z: Tensor, t: Tensor, flips: Tensor, theta: Tensor
        ) -> tuple[Tensor, Tensor]:
            return float_sums(part, z, t, Warp(flips.bool(), theta))

        # Some backends of torch.distributed cannot send bool.
        joined = _join(
            *self.reference.over_shards(mean, z, t.flatten(), warp.flips.byte(), warp.theta)
        )
        return warp.apply(joined.to(x_source.dtype))


def float_sums(
    reference: ReferenceSet, z: Tensor, t: Tensor, warp: Warp | None = None
) -> tuple[Tensor, Tensor]:
    """Compute E[x|z,t], Eq. 8 (eq:posterior_mean), for z (B, *shape) at t (B,). The memory does not grow with B or N.

    With B maps A, `warp`, the likelihoods use A x, but the mean is still over x. Returns the mean (B, *shape), and the
    logarithm of the normaliser Σ exp(−‖z − x‖²/2t²), (B,); float64.
    """
    parts = [
        _stream(reference, z[rows], t[rows], None if warp is None else warp.rows(rows))
        for rows in batches_of(z, reference.d)
    ]
    if not parts:
        return z.double(), t
    mu, log_normaliser = (torch.cat(part) for part in zip(*parts, strict=True))
    return mu.reshape(z.shape), log_normaliser


def _stream(
    reference: ReferenceSet, z: Tensor, t: Tensor, warp: Warp | None
) -> tuple[Tensor, Tensor]:
    """Compute `float_sums` for one batch. The mean is (B, d)."""
    maximum = torch.full((len(z), 1), -math.inf, dtype=torch.float64, device=z.device)
    normaliser = torch.zeros_like(maximum)
    weighted_sum = torch.zeros(len(z), reference.d, dtype=torch.float64, device=z.device)
    for _, x, sq_dist in stream_sq_dist(reference, z, warp):
        log_p = unnormalised_log_likelihood(sq_dist, t)
        new_maximum = torch.maximum(maximum, log_p.amax(1, keepdim=True))
        rescale = (maximum - new_maximum).exp()
        weights = (log_p - new_maximum).exp()
        normaliser = normaliser * rescale + weights.sum(1, keepdim=True)
        weighted_sum = weighted_sum.mul_(rescale).add_(weights @ x.double())
        maximum = new_maximum
    return weighted_sum / normaliser, (maximum + normaliser.log()).squeeze(1)


def exact_sums(part: ReferenceSet, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `float_sums` by products in float32, and repeat in float64 where their rounding matters."""
    if z.dtype == torch.float64 or (z.is_cuda and part.images.dtype != torch.uint8):
        return float_sums(part, z, t)
    group = score_bytes(part.N, z.device) // (4 * part.N)
    if z.is_cuda:
        # The latents themselves take memory, too, if there are few images.
        group = min(group, max(work_bytes(z.device) // (16 * part.d), MIN_LATENTS))
    images = _Centred(part, min(group, len(z)))
    groups = zip(z.split(group), t.double().split(group), strict=True)
    parts = (
        [_group_sums(images, *rows) for rows in groups] if len(z) else [(z.double(), t.double())]
    )
    means, log_normalisers = (torch.cat(each) for each in zip(*parts, strict=True))
    return means, log_normalisers


class _Centred:
    """The stored images of a set as c = (x − offset) / unit, so that float32 keeps the digits of values far from 0.

    Pixels p become p − 127.5, which even bfloat16 holds exactly. Floats far from 0 become differences from their mean.
    """

    def __init__(self, part: ReferenceSet, latents: int) -> None:
        self.part, self.dtype, device = part, torch.float32, part.device
        self.unit = 1.0
        self.offset: Tensor | float = 0.0
        self.centre: Tensor | float | None = None
        if part.images.dtype == torch.uint8:
            self.unit, self.centre = 1 / 127.5, 127.5
            if device.type == "cuda" and is_native(torch.bfloat16, device):
                self.dtype = torch.bfloat16
        elif part.cached("far from 0", self._is_far_from_0):
            mean = part.mean().reshape(part.shape)
            # Mirrored images need a centre that is its own mirror image.
            mean = (mean + mean.flip(-1)) / 2 if part.hflip else mean
            self.offset, self.centre = mean, mean.flatten()
        size = (
            CHUNK_BYTES // part.d
            if device.type == "cpu"
            else work_bytes(device) // max(part.d, latents)
        )
        self.step = min(whole_tiles(size // 4), CHUNK[device.type])
        self.half_sq_norms = part.cached("half squared norms", self._half_sq_norms)

    def chunks(self, ids: Tensor | None = None) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Yield rows and their c, (n, d), of all stored images or of ascending `ids`. The next step may overwrite c."""
        every = (slice(i, i + self.step) for i in range(0, len(self.part.images), self.step))
        # New memory for each piece would cost more time than the conversion.
        buffer = torch.empty(self.step, self.part.d, dtype=self.dtype, device=self.part.device)
        for rows in every if ids is None else ids.split(self.step):
            stored = self.part.images[rows].flatten(1)
            yield (
                rows,
                stored
                if self.centre is None
                else buffer[: len(stored)].copy_(stored).sub_(self.centre),
            )

    def _is_far_from_0(self) -> bool:
        """Return whether the mean has more than half of the images' squared norms. Otherwise centring gains little."""
        some = self.part.images[:1024].flatten(1)
        return bool(some.square().sum(1).mean() < 2 * self.part.mean().square().sum())

    def _half_sq_norms(self) -> Tensor:
        # Norms that are kept piece by piece would split the memory that each piece frees, and none could use it again.
        norms = torch.empty(len(self.part.images), dtype=torch.float32, device=self.part.device)
        for rows, c in self.chunks():
            norms[rows] = c.double().square().sum(1) / 2
        return norms


def _group_sums(images: _Centred, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `exact_sums` of some latents."""
    N, noise = images.part.N, (t / images.unit).square().unsqueeze(1)
    centred = z.double() - images.offset
    half_sq_norm = (
        torch.linalg.vector_norm(centred.flatten(1), dim=1, keepdim=True)
        .div_(images.unit)
        .square_()
        / 2
    )
    scores = _scores(images, centred.float().div_(images.unit))
    best, near = scores.topk(min(NEAREST, N), dim=1)
    rounding = (
        ROUNDING * (best.abs().amax(1, keepdim=True) + 2 * images.half_sq_norms.amax()) / noise
    )
    # The true log-likelihood of an image may be higher by twice the rounding.
    needed = torch.log_softmax(best / noise, dim=1) > (TOLERANCE / rounding).log() - 2 * rounding
    if z.is_cuda:
        needed.fill_(True)
    scores.scatter_(1, near, best.masked_fill_(needed, -torch.inf))
    # Without a rest, `top` would be −inf.
    top = scores.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    log_top = (top.double() - half_sq_norm) / noise
    maximum, total, sums = _nearest(images.part, z, t, near, needed, log_top)
    # At low noise levels the nearest images have all the weight. A GPU would wait for the count of the other latents,
    # and a copy of most of the scores would take too much memory.
    share = log_top - maximum
    count = len(z) if z.is_cuda else int((share > math.log(LEFT_OUT / N)).sum())
    wide = slice(None) if 2 * count > len(z) else share[:, 0].topk(max(count, 1)).indices
    # Subtract `top` first, because only differences of large scores are precise.
    factor = (1 / noise[wide]).float().clamp(1 / MOST_FACTOR, MOST_FACTOR)
    scores = scores[wide].sub_(top[wide]).mul_(factor).add_(share[wide].float())
    total_rest, sum_rest = _weighted_sum(images, scores)
    total[wide] += total_rest
    sums[wide] += sum_rest.mul_(images.unit)
    mean, column = sums.reshape(z.shape), (-1, *[1] * (z.ndim - 1))
    mean[wide] += images.offset * total_rest.reshape(column)
    mean.div_(total.reshape(column))
    log_normaliser = (maximum + total.log()).squeeze(1)
    if not z.is_cuda and N > NEAREST and needed[:, -1].any():
        # More images than the `NEAREST` may need float64.
        rows = needed[:, -1].nonzero().squeeze(1)
        mean[rows], log_normaliser[rows] = float_sums(images.part, z[rows], t[rows])
    return mean, log_normaliser


def _scores(images: _Centred, u: Tensor) -> Tensor:
    """Return u·c − ‖c‖²/2 for all images, mirrored ones too, (b, N) float32: log-likelihoods times (t / unit)²."""
    stored = len(images.half_sq_norms)
    scores = (-images.half_sq_norms).repeat(len(u), images.part.N // stored)
    # ‖u − mirror(c)‖ = ‖mirror(u) − c‖.
    queries = [query.flatten(1) for query in ((u, u.flip(-1)) if images.part.hflip else (u,))]
    for rows, c in images.chunks():
        for half, query in zip(scores.unflatten(1, (-1, stored)).unbind(1), queries, strict=True):
            add_product(half[:, rows], query, c.T)
    return scores


def _nearest(
    part: ReferenceSet, z: Tensor, t: Tensor, ids: Tensor, needed: Tensor, log_top: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the weights w of the `needed` images, (b, k), which come first in a row. z − x is in float64.

    Returns the logarithm of the likelihood of weight 1, (b, 1), at least `log_top`; Σ w, (b, 1); and Σ w x, (b, d).
    """
    maximum, total, sums = (
        log_top.clone(),
        torch.zeros_like(log_top),
        log_top.new_zeros(len(z), part.d),
    )
    step = max(work_bytes(z.device) // (16 * ids.shape[1] * part.d), 1)
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        k = ids.shape[1] if z.is_cuda else int(needed[rows].sum(1).amax())
        if k > 0:
            x = part.take(ids[rows, :k]).flatten(2).double()
            sq_dist = (x - z[rows].flatten(1).unsqueeze(1)).square_().sum(2)
            log_p = unnormalised_log_likelihood(sq_dist, t[rows]).masked_fill_(
                ~needed[rows, :k], -torch.inf
            )
            maximum[rows] = torch.maximum(maximum[rows], log_p.amax(1, keepdim=True))
            weights = (log_p - maximum[rows]).exp_()
            total[rows] = weights.sum(1, keepdim=True)
            sums[rows] = torch.bmm(weights.unsqueeze(1), x).squeeze(1)
    return maximum, total, sums


def _weighted_sum(images: _Centred, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ w, (b, 1), and Σ w c, (b, d), float64, over all images that matter. `log_weights` is (b, N)."""
    stored, b, device, ids = len(images.half_sq_norms), len(log_weights), log_weights.device, None
    halves = log_weights.unflatten(1, (-1, stored)).unbind(1)
    if device.type != "cuda":  # A GPU would wait for the count.
        weighs = log_weights.amax(0) > math.log(LEFT_OUT / images.part.N)
        ids = weighs.unflatten(0, (-1, stored)).any(0).nonzero().squeeze(1)
        ids = None if len(ids) > MANY * stored else ids
    total, terms = torch.zeros(b, 1, dtype=torch.float64, device=device), 0
    sums = torch.zeros(len(halves), b, images.part.d, dtype=torch.float64, device=device)
    recent = torch.zeros_like(sums, dtype=torch.float32)
    for rows, c in images.chunks(ids):
        for half, recent_sum in zip(halves, recent, strict=True):
            weights = half[:, rows].clamp(min=LEAST_LOG).exp_()
            total += weights.sum(1, keepdim=True)
            add_product(recent_sum, weights, c)
        terms += len(c)
        if terms >= TERMS:
            sums, terms = sums.add_(recent), 0
            recent.zero_()
    first, *mirrored = sums.add_(recent)
    for part in mirrored:
        first += part.reshape(b, *images.part.shape).flip(-1).flatten(1)
    return total, first


def add_product(total: Tensor, rows: Tensor, matrix: Tensor) -> None:
    """Add rows @ matrix to `total`. All three are float32, but the matrix may also be bfloat16."""
    if matrix.dtype == torch.float32:
        total.addmm_(rows, matrix)
        return
    for _ in range(3):  # A float32 has 24 significand bits, a bfloat16 has 8.
        digit = rows.bfloat16()
        total += matmul_float32(digit, matrix)
        rows = rows - digit


def score_bytes(N: int, device: torch.device) -> int:
    """Return the maximum bytes of the scores of one group of latents and N images."""
    most = SCORE_BYTES if device.type == "cpu" else GPU_SCORE_ARRAYS * work_bytes(device)
    return max(most, 4 * N * MIN_LATENTS)


def _join(means: Tensor, log_normalisers: Tensor) -> Tensor:
    """Average the shards' means (shards, B, *shape), weighted by their normalisers (shards, B): (B, *shape)."""
    if len(means) == 1:
        return means[0]
    shares = torch.softmax(log_normalisers, dim=0)
    return (shares.unsqueeze(-1) * means.flatten(2)).sum(0).reshape(means.shape[1:])
