"""Self-normalised importance sampling, Eq. 11 (eq:SNIS_estimator), and its variance, Eq. 12 (eq:SNIS_Var)."""

import torch
from torch import Tensor

# Number of draws per float32 product. A product may add its terms one by one, so its error grows with this number.
DRAWS_PER_SUM = 256


def snis_weights(log_p: Tensor, log_q: Tensor | float) -> Tensor:
    """Importance weights w_i / Σ w_j with w = p_t(z|x) / q(x), (B, n) float64, Eq. 11 (eq:SNIS_estimator).

    Args:
        log_p: (B, n), log-likelihood of each draw, up to a constant per row.
        log_q: (B, n) or scalar, log proposal probability of each draw, up to a constant per row.
    """
    return torch.softmax(log_p.double() - log_q, dim=1)


def weighted_mean(weights: Tensor, x: Tensor) -> Tensor:
    """Σ_i w_i x_i (Eq. 11), (B, *shape) float64, for weights that sum to 1, computed as x_c + Σ_i w_i (x_i − x_c).

    x_c is the image with the largest weight. Rounding errors then scale with the spread of the images, not with their
    size: the mean of copies of one image is that image, to the last bit. Only the last sum is in float64, because
    float32 would lose small deviations from x_c.

    Args:
        weights: (B, n), rows sum to 1.
        x: (B, n, *shape), finite.
    """
    centre = x[torch.arange(len(x), device=x.device), weights.argmax(1)]
    return centre.double() + weighted_deviation(weights, x, centre)


def weighted_deviation(weights: Tensor, x: Tensor, centre: Tensor) -> Tensor:
    """Σ_i w_i (x_i − c), (B, *shape) in the dtype of `x`; the weights (B, n) need not sum to 1.

    `x` is (B, n, *shape), and the centre c, (B, *shape), is near the images.
    """
    weights = weights.to(x.dtype).unsqueeze(1)
    deviation = (x - centre.to(x.dtype).unsqueeze(1)).flatten(2)
    blocks = zip(weights.split(DRAWS_PER_SUM, dim=2), deviation.split(DRAWS_PER_SUM, dim=1), strict=True)
    total = torch.stack([torch.bmm(*block) for block in blocks]).sum(0)
    return total.reshape(centre.shape)


def snis_variance(posterior: Tensor, q: Tensor, x: Tensor, n: int) -> Tensor:
    """Asymptotic variance of the SNIS posterior mean, Eq. 12 (eq:SNIS_Var) times t⁴, by enumeration: (B, *shape).

    This is the diagonal of the covariance, (1/n) Σ_i p_i²/q_i (x_i − μ)².

    Args:
        posterior: (B, N), p_t(x_i|z) of Eq. 2.
        q: (B, N), proposal probabilities, positive wherever `posterior` is positive.
        x: (N, *shape), the data set.
        n: number of draws.
    """
    flat = x.flatten(1).to(posterior.dtype)
    mu = posterior @ flat
    ratio = torch.where(posterior > 0, posterior.square() / q, 0.0)
    # The expanded square, Σ r x² − 2μ Σ r x + μ² Σ r, would lose digits. N is small, so compute x − μ itself.
    variance = torch.einsum("bn,bnd->bd", ratio, (flat - mu.unsqueeze(1)).square()) / n
    return variance.reshape(posterior.shape[0], *x.shape[1:])
