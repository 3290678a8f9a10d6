"""The exact posterior mean over all images of the reference set."""

import math

import torch
from torch import Generator, Tensor

from lit_knn.common.memory import work_bytes
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.centred import CentredImages
from lit_knn.estimators.float64_mean import float_sums, join_shards
from lit_knn.estimators.one_pass import sums_in_one_pass
from lit_knn.estimators.query import Query
from lit_knn.estimators.two_passes import sums_in_two_passes
from lit_knn.reference import ReferenceSet
from lit_knn.theory.warp import Warp

# If the largest ‖c‖²/t² is at most this number, nearly all images matter, and hardly any needs
# float64. At twice this number, one latent in a batch often repeats both passes.
HIGH_NOISE = 20.0
# Bytes for the float32 scores of one group of latents on a CPU, and the minimum number of latents
# per group, because every group reads all images twice. On a GPU the scores take several work arrays.
SCORE_BYTES, MIN_LATENTS, GPU_SCORE_ARRAYS = 64 * 2**20, 64, 4


class Exact(Estimator):
    """E[x|z,t] over all N images, Eq. 8 (eq:posterior_mean): no bias and no variance, cost O(N·d) per z.

    It multiplies in float32. In float64 it repeats the distances that float32 cannot hold at
    small t: to the nearest images, or to all images if more than 32 share the posterior. Its
    squared error per dimension is far below 1e-9 of the set's variance. On a GPU the CPU would have
    to wait for the choice, so `Exact` always repeats the nearest 32 images of each z, and computes
    a set of floats entirely in float64. Memory stays bounded for any B and N, apart from the norms
    of the images and their scores for 64 latents.
    """

    deterministic = True
    shardable = True

    def memory(self, N: int, d: int) -> dict[str, int]:
        return {"norms of the images": 4 * N}

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        return join_shards(*self.reference.over_shards(exact_sums, z, t.flatten()))

    def log_density_of(self, query: Query) -> Tensor:
        t = query.t.flatten()
        _, log_normalisers = self.reference.over_shards(exact_sums, query.z, t)
        log_sum = torch.logsumexp(log_normalisers, dim=0)
        log_gaussian = -self.reference.d * (t.log() + 0.5 * math.log(2 * math.pi))

        return log_sum - math.log(self.reference.N) + log_gaussian

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: Generator | None
    ) -> Tensor:
        """Compute in float64, and resample every image for each z.

        This costs N times as much as warping a batch.
        """

        def mean(
            part: ReferenceSet, z: Tensor, t: Tensor, flips: Tensor, theta: Tensor
        ) -> tuple[Tensor, Tensor]:
            return float_sums(part, z, t, Warp(flips.bool(), theta))

        # Some backends of torch.distributed cannot send bool.
        joined = join_shards(
            *self.reference.over_shards(mean, z, t.flatten(), warp.flips.byte(), warp.theta)
        )
        return warp.apply(joined.to(x_source.dtype))


def exact_sums(part: ReferenceSet, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `float_sums` by float32 products, and repeat in float64 where their rounding matters.

    Args:
        part: the images, of a whole set or of one shard.
        z: (B, *shape), noisy latents.
        t: (B,), noise levels.
    """
    if z.dtype == torch.float64 or (z.is_cuda and part.images.dtype != torch.uint8):
        return float_sums(part, z, t)
    if len(z) == 0:
        return z.double(), t.double()

    group = _score_bytes(part.N, z.device) // (4 * part.N)
    if z.is_cuda:
        # The latents themselves take memory, too, if there are few images.
        group = min(group, max(work_bytes(z.device) // (16 * part.d), MIN_LATENTS))
    images = CentredImages(part, min(group, len(z)))

    means = []
    log_normalisers = []
    for some_z, some_t in zip(z.split(group), t.double().split(group), strict=True):
        mean, log_normaliser = _group_sums(images, some_z, some_t)
        means.append(mean)
        log_normalisers.append(log_normaliser)
    return torch.cat(means).reshape(z.shape), torch.cat(log_normalisers)


def _group_sums(images: CentredImages, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `exact_sums` of some latents. The mean is (b, d)."""
    latents = images.latents(z, t)
    # A GPU would have to tell the CPU its norms and noise levels first.
    if z.is_cuda or 2 * images.half_sq_norms.amax() > HIGH_NOISE * latents.noise.amin():
        return sums_in_two_passes(images, latents, z, t)

    mean, log_normaliser, precise = sums_in_one_pass(images, latents)
    if not precise.all():
        rows = (~precise).nonzero().squeeze(1)
        others = images.latents(z[rows], t[rows])
        mean[rows], log_normaliser[rows] = sums_in_two_passes(images, others, z[rows], t[rows])
    return mean, log_normaliser


def _score_bytes(N: int, device: torch.device) -> int:
    """Return the maximum bytes of the scores of one group of latents and N images."""
    most = SCORE_BYTES if device.type == "cpu" else GPU_SCORE_ARRAYS * work_bytes(device)
    return max(most, 4 * N * MIN_LATENTS)
