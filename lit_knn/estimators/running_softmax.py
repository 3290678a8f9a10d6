"""A posterior mean over streamed patches: an online softmax in bounded memory."""

import math

import torch
from torch import Tensor

from lit_knn.reference import ReferenceSet

# Most rounding error of a log weight in float32. Where more is possible, the products are in float64.
MOST_ROUNDING = 1e-4
# Smallest log weight relative to the largest. Where exp or a product underflows, a CPU is 10 to 30 times slower.
LEAST_LOG_WEIGHT = -80.0


class RunningSoftmax:
    """The mean of values, weighted by the softmax of log weights that arrive in parts.

    It keeps a running maximum, normaliser and weighted sum. Weights relative to the largest one are multiplied in
    float32, and summed over the parts in float64.

    Args:
        shape: (G, Q): Q means in each of G groups.
        values: number of values that are averaged, V. 0 leaves the normaliser alone.
        dtype: type of the log weights.
        device: where they are.
    """

    def __init__(self, shape: tuple[int, int], values: int, dtype: torch.dtype, device: torch.device) -> None:
        self.maximum = torch.full((*shape, 1), -torch.inf, dtype=dtype, device=device)
        self.sums = torch.zeros(*shape, values + 1, dtype=torch.float64, device=device)

    def add_log_weights(
        self, log_p: Tensor, values: Tensor, groups: slice = slice(None), rows: slice = slice(None)
    ) -> None:
        """Add values to some means of some groups.

        Args:
            log_p: (g, q, n), of type `dtype`; they are overwritten.
            values: (g, V + 1, n) float32; the last row is 1.
            groups: the g groups.
            rows: their q means.
        """
        maximum, sums = self.maximum[groups, rows], self.sums[groups, rows]
        new_maximum = torch.maximum(maximum, log_p.amax(2, keepdim=True))
        weights = weights_of(log_p, new_maximum)
        sums.mul_((maximum - new_maximum).exp_()).add_(torch.bmm(weights, values.mT))
        maximum.copy_(new_maximum)

    def mean(self) -> Tensor:
        """Return the weighted mean of the values, (G, Q, V) float64."""
        return self.sums[..., :-1] / self.sums[..., -1:]


def weights_of(log_p: Tensor, maximum: Tensor) -> Tensor:
    """Return exp(log_p − maximum) in float32. `log_p` is overwritten."""
    return log_p.sub_(maximum).float().clamp_(min=LEAST_LOG_WEIGHT).exp_()


class Rounding:
    """Tells where float32 holds the log weights well enough.

    Args:
        reference: the set.
        z: latents, of any shape (B, *).
        t: the lowest noise level, a scalar.
    """

    def __init__(self, reference: ReferenceSet, z: Tensor, t: Tensor | float) -> None:
        own = z.flatten(1).double()
        largest, norm = own.abs().max() / t / t, torch.linalg.vector_norm(own, dim=1).max() / t / t
        # The only values that are read from a GPU.
        self.largest, self.norm, self.images = torch.stack([largest, norm, torch.ones_like(norm) / t / t]).tolist()
        self.scale = reference.largest

    def dtype(self, terms: int, sums: int = 1) -> torch.dtype:
        """Return float32 or float64, for products of z and images.

        Σ|z_q·x_q| over the terms is at most max|x|·Σ|z_q|, and Σ|z_q| is at most terms·max|z|, and √terms·‖z‖ (Cauchy).
        An addition rounds by eps/2 of its partial sum at most, and errors of both signs cancel. On CIFAR-10 the
        largest error of a log weight was 0.2 to 0.9 of eps/2·`size` where rows of pixels are added pairwise
        (`sliding_sums`), and up to 2 in one product. Errors of different products are independent: they add like √sums.

        Args:
            terms: pixels that a product is a sum over.
            sums: products that are added in float64 for a log weight.
        """
        latents = min(terms * self.largest, math.sqrt(terms) * self.norm)
        size = self.scale * (latents + terms * self.scale * self.images)
        rounding = torch.finfo(torch.float32).eps / 2 * size * math.sqrt(sums)
        return torch.float32 if rounding <= MOST_ROUNDING else torch.float64
