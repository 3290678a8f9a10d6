"""An estimator averaged over a Gaussian neighbourhood of z."""

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from lit_knn.common.errors import check_not_negative
from lit_knn.common.memory import work_bytes
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.composite import Wrapper
from lit_knn.estimators.counts import check_count
from lit_knn.estimators.query import Query


class Smoothed(Wrapper):
    """The mean of another estimator over a Gaussian neighbourhood of z: E_η[μ(z + width·η, t)] with η ~ N(0, I).

    This is the smoothed score of closed-form diffusion models (Scarvelis et al., arXiv:2310.12395). At small t the
    exact mean jumps from image to image. The smoothed mean averages the images near z, so its samples are averages of
    near images, not copies. `docs/analytic.md` relates the paper's σ to `width`.

    n draws of η estimate the expectation without bias. They come in pairs η, −η (antithetic), so that the odd part of μ
    about z cancels: one pair is exact for a linear μ. If n is odd, the last draw has no partner. The cost is n times
    the cost of the estimator.

    Args:
        estimator: the estimator to average; it is copied.
        width: standard deviation of the neighbourhood in units of z; 0 gives the estimator itself.
        n: draws per z.
    """

    def __init__(self, estimator: Estimator, width: float, n: int = 16) -> None:
        super().__init__(estimator)
        check_not_negative(**{"Smoothed: width": width})
        self.width = width
        self.n = check_count("Smoothed", "n", n)
        self.needs_reference = estimator.needs_reference

    @property
    def deterministic(self) -> bool:  # type: ignore[override]
        return self.estimator.deterministic and self.width == 0

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        """Average the means at n points near each z: (B, *shape), float64."""
        if self.width == 0:
            return self.part.mean_of(Query(z, t, x_source, generator))
        total = torch.zeros(z.shape, dtype=torch.float64, device=z.device)
        for near in self._neighbourhood(z, generator):
            # All points near all z are one batch, in which each point has the source and time of its z.
            source = None if x_source is None else x_source.expand(near.shape).flatten(0, 1)
            times = t.repeat(len(near), *[1] * (t.ndim - 1))
            mean = self.part.mean_of(Query(near.flatten(0, 1), times, source, generator))
            total += mean.double().view(near.shape).sum(0)
        return total / self.n

    def _neighbourhood(self, z: Tensor, generator: Generator | None) -> Iterator[Tensor]:
        """Draw n points near each z: yields (draws, B, *shape), float32 or wider, as many draws as fit the memory."""
        # Half precision would round a small width away.
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        # At most 8 bytes a number, and two draws in a pair.
        pairs = max(work_bytes(z.device) // (2 * 8 * z.numel()), 1)
        for start in range(0, self.n, 2 * pairs):
            draws = min(2 * pairs, self.n - start)
            noise = torch.randn(
                (draws + 1) // 2, *z.shape, dtype=z.dtype, device=z.device, generator=generator
            )
            yield z + self.width * torch.cat([noise, -noise])[:draws]
