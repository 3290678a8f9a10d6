"""The pairs of times r <= t at which an average velocity is trained."""

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.modules.time_distributions import TimeDistribution


class TimePairs:
    """Draws t and r <= t. A share of the items has r < t, and the others have r = t.

    With one distribution, t is the larger and r the smaller of two draws (MeanFlow's paper, arXiv 2505.13447, and "v0"
    in its authors' code). With two, t and r are one draw from each, and an r above its t becomes t ("v1" there).

    Args:
        times: distribution of t.
        lower_times: distribution of r; None for that of t.
        different: share of the items with r < t, before the r above their t become t.
    """

    def __init__(
        self,
        times: TimeDistribution,
        lower_times: TimeDistribution | None = None,
        different: float = 0.75,
    ) -> None:
        if not 0 <= different <= 1:
            raise InputError(f"different must be from 0 to 1, got {different}")
        if lower_times is not None and lower_times.low >= times.high:
            problem = f"lower_times begin at {lower_times.low}, and times end at {times.high}"
            raise InputError(f"{problem}: no r would be below its t")
        self.times = times
        self.lower_times = lower_times
        self.different = different

    def draw_upper(self, size: int, generator: torch.Generator) -> Tensor:
        """Draw t, (size,) float64, on the generator's device."""
        t = self.times.draw(size, generator)
        if self.lower_times is None:
            t = torch.maximum(t, self.times.draw(size, generator))
        return t

    def draw_lower(self, t: Tensor, generator: torch.Generator) -> Tensor:
        """Draw r for each t (B,), (B,) float64."""
        if self.lower_times is None:
            r = self.times.draw_below(t, generator)
        else:
            r = torch.minimum(self.lower_times.draw(len(t), generator), t)

        differs = torch.rand(len(t), generator=generator, device=t.device) < self.different
        return torch.where(differs, r, t)
