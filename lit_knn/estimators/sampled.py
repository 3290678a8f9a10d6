"""What the sampling estimators share: gathering the drawn images and averaging them, in bounded memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.streaming import GPU_FACTOR
from lit_knn.posterior import direct_sq_dist, unnormalised_log_likelihood
from lit_knn.reference import ReferenceSet
from lit_knn.snis import snis_weights, weighted_mean

# Images gathered at a time on a CPU, as float32: near the size of its cache, where passes over them are cheapest.
GATHER_BYTES = 8 * 2**20


def check_count(owner: str, option: str, value: int) -> int:
    """Return `value` if it is an integer of at least 1.

    Raises:
        InputError: another type, or value < 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{owner}: {option} must be an integer, got {value!r}")
    if value < 1:
        raise InputError(f"{owner}: {option} must be at least 1, got {value}")
    return value


def gathered_mean(
    reference: ReferenceSet,
    ids: Tensor,
    z: Tensor,
    weights: Callable[[Tensor, slice], Tensor],
    x_source: Tensor | None = None,
) -> Tensor:
    """Weighted mean of the images drawn for each z.

    Args:
        reference: where the images are.
        ids: (B, n), the draws.
        z: (B, *shape).
        weights: (`sq_dist` (b, n), rows) -> (b, n), weights that sum to 1 from the exact distances of the
            draws of z[rows].
        x_source: (B, *shape), one more image for each z, put in front of the drawn ones, or None.

    Returns:
        (B, *shape), float32 or the wider dtype of `z`.
    """
    n = ids.shape[1] + (x_source is not None)
    mu = torch.empty(z.shape, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
    budget = GATHER_BYTES if z.device.type == "cpu" else GATHER_BYTES * GPU_FACTOR
    step = max(budget // (4 * n * reference.d), 1)
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        x = reference.gather(ids[rows])
        if x_source is not None:
            x = torch.cat([x_source[rows].unsqueeze(1).to(x.dtype), x], dim=1)
        mu[rows] = weighted_mean(weights(direct_sq_dist(z[rows], x), rows), x).to(mu.dtype)
    return mu


def snis_mean(
    reference: ReferenceSet,
    ids: Tensor,
    z: Tensor,
    t: Tensor,
    log_q: Tensor | None = None,
    x_source: Tensor | None = None,
) -> Tensor:
    """The SNIS estimate, Eq. 11 (eq:SNIS_estimator), from draws `ids` of a proposal.

    Args:
        reference: where the images are.
        ids: (B, n), the draws.
        z: (B, *shape).
        t: (B,).
        log_q: (B, n), their log-probabilities; None for a uniform proposal.
        x_source: as in `gathered_mean`; weighted as if it were a uniform draw. Not together with `log_q`.

    Returns:
        (B, *shape).
    """

    def weights(sq_dist: Tensor, rows: slice) -> Tensor:
        log_p = unnormalised_log_likelihood(sq_dist, t[rows])
        return snis_weights(log_p, 0.0 if log_q is None else log_q[rows])

    return gathered_mean(reference, ids, z, weights, x_source)


def uniform_ids(reference: ReferenceSet, batch: int, n: int, generator: torch.Generator | None) -> Tensor:
    """(batch, n) independent uniform draws of image ids, with replacement, where the images are."""
    return torch.randint(reference.N, (batch, n), device=reference.device, generator=generator)
