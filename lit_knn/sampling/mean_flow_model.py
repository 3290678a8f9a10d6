"""Mean flows: the average velocity maps noise to an image in one step."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.nets.average_velocity import AverageVelocity
from lit_knn.sampling.model import GenerativeModel
from lit_knn.sampling.samplers import seeded_noise


class MeanFlowModel(GenerativeModel):
    """A mean flow (Geng et al. 2025, arXiv 2505.13447, Algorithm 2): m steps take m evaluations of the network.

    Args:
        network: the network of the average velocity.
        image_shape: shape of one image.
        num_steps: see `GenerativeModel`.
        sampling_class: see `GenerativeModel`.
    """

    kind = "mean_flow"
    network: AverageVelocity

    def __init__(
        self,
        network: AverageVelocity,
        image_shape: Sequence[int],
        num_steps: int = 1,
        sampling_class: int | None = None,
    ) -> None:
        super().__init__(network, image_shape, num_steps, sampling_class)
        self.check_steps(num_steps)

    @classmethod
    def around(cls, net: nn.Module, image_shape: Sequence[int], **options: Any) -> "MeanFlowModel":
        return cls(AverageVelocity(net), image_shape, **options)

    def options(self) -> dict[str, object]:
        return {"num_steps": self.num_steps, "sampling_class": self.sampling_class}

    def times_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def average_velocity(
        self, z: Tensor, r: Tensor | float, t: Tensor | float, class_label: Tensor | None = None
    ) -> Tensor:
        """Return the average velocity u(z, r, t), (B, *shape) float32.

        Args:
            z: (B, *shape), float.
            r: the lower time of each item, (B,), or one for all, from 0 to t.
            t: the upper time of each item, (B,), or one for all, at most 1.
            class_label: see `forward`.

        Raises:
            InputError: r > t, r < 0, or an argument that `forward` refuses.
        """
        low, high = self.times_range()
        t, labels = self.checked(z, t, class_label, low=low, high=high)
        r = torch.as_tensor(r, dtype=t.dtype, device=z.device).expand(len(z))
        # With "not", NaN is bad, too.
        bad = ~((r >= 0) & (r <= t))
        if bad.any():
            highest = t[bad][0].item()
            raise InputError(f"r must be from 0 to t={highest:g}, got {r[bad][0].item():g}")
        return self.network(z, t, labels, r)

    def draw(
        self, seeds: Sequence[int] | Tensor, num_steps: int, labels: Tensor | None, guidance: float
    ) -> Tensor:
        """Draw images by `num_steps` steps of the average velocity; see `GenerativeModel.draw`."""
        if guidance != 1:
            reason = "a mean flow has its guidance from training"
            raise InputError(f"sample: guidance={guidance}, but {reason}")
        self.check_steps(num_steps)

        times = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64, device=self.device)
        z = seeded_noise(seeds, self.image_shape, device=self.device)
        for t, r in pairwise(times):
            z = z - (t - r).float() * self.network(z, t, labels, r)
        return z
