"""Error of an estimator at one noise level: squared bias, variance and MSE, Eq. 15 (eq:mse), averaged over latents."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric


class ErrorTerms(NamedTuple):
    """Error of the posterior mean at each latent z, per dimension. All are (B,), float64. For the score, divide by t⁴.

    m is the mean over the R repeats.
    """

    mse: Tensor  # mean of ‖μ̂ − μ‖² / d over the repeats
    bias_sq: Tensor  # ‖m − μ‖² / d; its expectation is too large by variance / R
    bias_sq_corrected: Tensor  # bias_sq − variance / R; unbiased, so it can be negative
    variance: Tensor  # Σ ‖μ̂ − m‖² / ((R − 1) d), unbiased


def error_terms(error_sum: Tensor, sq_error_sum: Tensor, repeats: int) -> ErrorTerms:
    """Split Eq. 15 (eq:mse) into squared bias and variance: mse = bias_sq_corrected + variance, at each z.

    Args:
        error_sum: (B, *shape), float64, Σ_r (μ̂_r − μ) over the repeats.
        sq_error_sum: (B,), float64, Σ_r ‖μ̂_r − μ‖².
        repeats: R; 1 means a deterministic estimator, with variance 0.
    """
    d = error_sum[0].numel()
    mse = sq_error_sum / (repeats * d)
    bias_sq = (error_sum / repeats).flatten(1).square().sum(1) / d
    if repeats == 1:
        return ErrorTerms(mse, bias_sq, bias_sq, torch.zeros_like(mse))
    variance = (mse - bias_sq) * repeats / (repeats - 1)
    variance = variance.where(variance > 1e-12 * mse, 0.0)  # The rest is rounding.
    return ErrorTerms(mse, bias_sq, bias_sq - variance / repeats, variance)


class MeanAndError(NamedTuple):
    """A mean over latents and its standard error (NaN for a single latent)."""

    mean: float
    standard_error: float


def mean_and_error(values: Tensor) -> MeanAndError:
    """Return the mean of values (B,), one per latent, and its standard error."""
    return MeanAndError(values.mean().item(), (values.std() / len(values) ** 0.5).item())


def share_and_error(values: Tensor, of: Tensor) -> MeanAndError:
    """Return the ratio mean(values) / mean(of) and its standard error; both are (B,), for the same latents.

    To first order the error of the ratio is the mean of values − share·of; NaN if the mean of `of` is 0.
    """
    whole = of.mean().item()
    if whole == 0:
        return MeanAndError(math.nan, math.nan)
    share = values.mean().item() / whole
    return MeanAndError(share, mean_and_error(values - share * of).standard_error / whole)


def bias_share(
    mse: MeanAndError, bias_sq_corrected: MeanAndError, variance: MeanAndError
) -> MeanAndError:
    """Compute the share of the MSE that is squared bias: a ratio of means, with its standard error.

    As mse = bias_sq_corrected + variance at each latent, the three standard errors determine the covariance of the
    squared bias and the MSE, on which the error of the ratio depends.

    Args:
        mse: above 0.
        bias_sq_corrected: the squared bias; the plain one includes variance / R.
        variance: the variance of the estimator.
    """
    share = bias_sq_corrected.mean / mse.mean
    of_mse = mse.standard_error**2
    of_bias = bias_sq_corrected.standard_error**2
    of_variance = variance.standard_error**2
    covariance = (of_mse + of_bias - of_variance) / 2
    sq_error = of_bias + share**2 * of_mse - 2 * share * covariance
    return MeanAndError(share, max(sq_error, 0.0) ** 0.5 / mse.mean)


class LatentMeans(Metric):
    """Computes means of named quantities over latents, with standard errors, from sums over batches and ranks."""

    count: Tensor
    total: Tensor
    sq_total: Tensor

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for state, shape in (("count", ()), ("total", (len(names),)), ("sq_total", (len(names),))):
            self.add_state(state, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, **values: Tensor) -> None:
        """Add a batch of latents: one (B,) tensor for each name."""
        stacked = torch.stack([values[name].double() for name in self.names])
        self.count += stacked.shape[1]
        self.total += stacked.sum(1)
        self.sq_total += stacked.square().sum(1)

    def compute(self) -> dict[str, MeanAndError]:
        mean = self.total / self.count
        variance = (self.sq_total - self.total * mean).clamp(min=0) / (self.count - 1)
        error = (variance / self.count).sqrt()
        pairs = map(MeanAndError, mean.tolist(), error.tolist())
        return dict(zip(self.names, pairs, strict=True))
