"""The subspace estimator: propose from all images in their leading principal components, and correct with them."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.sampled import check_count, gathered_mean
from lit_knn.estimators.streaming import work_bytes
from lit_knn.posterior import unnormalised_log_likelihood
from lit_knn.projection import Projection
from lit_knn.reference import ReferenceSet

# Images are left out whose share of the proposal is below this, all of them together: so much of the posterior is
# expected outside, and the squared error is at most that times a squared distance in the data.
NEGLIGIBLE_MASS = 1e-8


class Draws(NamedTuple):
    """The images gathered for each z, `n` places of which the last may be unused.

    Attributes:
        ids: (B, n).
        log_correction: (B, n), float64, log of base weight over proposal: an image's weight is its exact likelihood
            times this, up to a constant per row; −inf at unused places.
        sampled: (B, n), bool, whether a place is drawn from the rest rather than kept.
        rest_mean: (B, r), float32, the proposal's mean of y over the images that are not kept.
        used: (B,), number of used places.
    """

    ids: Tensor
    log_correction: Tensor
    sampled: Tensor
    rest_mean: Tensor
    used: Tensor


class SubspaceKNN(Estimator):
    """SNIS (Eq. 11) from the posterior given P'z, corrected by its exact mean."""

    def __init__(self, r: int = 512, m: int | None = None, n: int = 256, compute: str = "auto") -> None:
        self.r = check_count("SubspaceKNN", "r", r)
        self.n = check_count("SubspaceKNN", "n", n)
        self.m = None if m is None else check_count("SubspaceKNN", "m", m)
        if m is not None and m > n:
            raise InputError(f"SubspaceKNN: m={m} is more than n={n}")
        self.dtype = torch.bfloat16 if compute == "bfloat16" else torch.float32

    def bind(self, reference: ReferenceSet) -> Self:
        """See `Estimator.bind`; projects the set."""
        if self.n > reference.N:
            raise InputError(f"SubspaceKNN: n={self.n} is more than the {reference.N} images of the reference set")
        reference.projection(self.r, self.dtype)
        return super().bind(reference)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        projection = self.reference.projection(self.r, self.dtype)
        y = projection.components.project(z)
        step = max(work_bytes(z.device) // (12 * self.reference.N), 1)
        pieces = [self._draw(projection, y[i : i + step], t[i : i + step], generator) for i in range(0, len(z), step)]
        draws = Draws(*(torch.cat(part) for part in zip(*pieces, strict=True)))
        mu = torch.empty(z.shape, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
        # Rows that need few images are gathered together, so that they do not pay for those that need many.
        classes = draws.used.double().log2().ceil().long()
        for size in classes.unique().tolist():
            rows = (classes == size).nonzero()[:, 0]
            places = min(2**size, self.n)
            mu[rows] = self._corrected_mean(
                projection, Draws(*(part[rows] for part in draws)), places, z[rows], t[rows]
            )
        return mu

    def _draw(self, projection: Projection, y: Tensor, t: Tensor, generator: torch.Generator | None) -> Draws:
        """Keep the most probable images and draw the others, from the posterior given y = P'(z − mean)."""
        variance = t.unsqueeze(1).float().square()
        q = (y.to(self.dtype) @ projection.coordinates.T).float().sub_(projection.half_sq_norms).div_(variance)
        log_top, ids = q.topk(self.n, dim=1)
        log_top, maximum = (log_top - log_top[:, :1]).double(), log_top[:, :1]
        q = q.sub_(maximum).exp_()
        total = q.sum(1, keepdim=True, dtype=torch.float64)
        used = self._used(projection, y, t, log_top)
        kept = self._kept(log_top.exp() / total, used)
        place = torch.arange(self.n, device=y.device)
        is_kept = place < kept.unsqueeze(1)
        # The rest: what is kept is taken out of the proposal.
        q.scatter_(1, ids, torch.where(is_kept, 0.0, log_top.exp().float()))
        cdf = q.cumsum(1, dtype=torch.float64)
        rest = cdf[:, -1:].clone()
        cdf /= rest
        draws = (used - kept).unsqueeze(1)
        u = torch.rand(len(y), 1, dtype=torch.float64, device=y.device, generator=generator)
        drawn = torch.searchsorted(cdf, (u + place - kept.unsqueeze(1)) / draws, right=True).clamp(max=cdf.shape[1] - 1)
        rest_mean = (q.to(self.dtype) @ projection.coordinates).float() / q.to(self.dtype).sum(
            1, keepdim=True, dtype=torch.float32
        )
        sampled = ~is_kept & (place < used.unsqueeze(1))
        log_q = q.gather(1, drawn).double().log()
        log_correction = torch.where(is_kept, 0.0, (rest / draws).log() - log_q)
        log_correction = log_correction.masked_fill(place >= used.unsqueeze(1), -math.inf)
        return Draws(torch.where(is_kept, ids, drawn), log_correction, sampled, rest_mean, used)

    def _used(self, projection: Projection, y: Tensor, t: Tensor, log_top: Tensor) -> Tensor:
        """How many of the most probable images hold all but a negligible part of the proposal; n if they do not."""
        bound = torch.full_like(log_top[:, :1], math.log(self.reference.N))
        # Mass behind each place: of the later places, and at most N times the last for all others.
        later = torch.cat([log_top[:, 1:], log_top[:, -1:] + bound], dim=1).flip(1).logcumsumexp(1).flip(1)
        rounding = torch.finfo(self.dtype).eps * y.norm(dim=1) * (2 * projection.half_sq_norms.max()).sqrt()
        limit = math.log(NEGLIGIBLE_MASS) - 2 * rounding.double() / t.square()
        negligible = later < limit.unsqueeze(1)
        return torch.where(negligible.any(1), negligible.int().argmax(1) + 1, self.n)

    def _kept(self, q_top: Tensor, used: Tensor) -> Tensor:
        """How many of the most probable images to keep: those that a draw of n from q without repetition is sure of."""
        if self.m is not None:
            return torch.full_like(used, self.m).minimum(used)
        place = torch.arange(self.n, device=q_top.device)
        rest = 1 - q_top.cumsum(1) + q_top
        sure = q_top * (self.n - place) >= rest
        kept = sure.long().cumprod(1).sum(1).clamp(max=self.n - 1)
        return torch.where(used < self.n, used, kept)

    def _corrected_mean(self, projection: Projection, draws: Draws, places: int, z: Tensor, t: Tensor) -> Tensor:
        ids, log_correction = draws.ids[:, :places], draws.log_correction[:, :places]
        weights = torch.empty(ids.shape, dtype=torch.float64, device=z.device)

        def exact_weights(sq_dist: Tensor, rows: slice) -> Tensor:
            log_p = unnormalised_log_likelihood(sq_dist, t[rows])
            weights[rows] = torch.softmax(log_p + log_correction[rows], dim=1)
            return weights[rows]

        mu = gathered_mean(self.reference, ids, z, exact_weights)
        sampled = draws.sampled[:, :places]
        if not sampled.any():
            return mu
        share = (weights * sampled).sum(1, keepdim=True)
        drawn = projection.coordinates[ids].float()
        mean = (drawn * sampled.unsqueeze(2)).sum(1) / sampled.sum(1, keepdim=True).clamp(min=1)
        excess = torch.where(sampled.any(1, keepdim=True), share.float() * (mean - draws.rest_mean), 0.0)
        return mu - projection.components.expand(excess).reshape(mu.shape).to(mu.dtype)
