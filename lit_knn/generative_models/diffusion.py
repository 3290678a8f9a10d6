"""Diffusion models: a denoiser, whose probability flow maps noise to an image."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.generative_models.base import GenerativeModel, check_numbers
from lit_knn.nets.precond import EDMPrecond
from lit_knn.sampling import heun_sampler, seeded_noise
from lit_knn.schedules import NoiseGrid


class DiffusionModel(GenerativeModel):
    """A diffusion model: a denoiser whose probability flow EDM's Heun sampler integrates (Karras et al. 2022).

    Args:
        network: the denoiser.
        image_shape: shape of one image.
        grid: noise levels of the sampler.
        num_steps: see `GenerativeModel`.
        sampling_class: see `GenerativeModel`.
    """

    kind = "diffusion"
    network: EDMPrecond

    def __init__(
        self,
        network: EDMPrecond,
        image_shape: Sequence[int],
        grid: NoiseGrid | None = None,
        num_steps: int = 18,
        sampling_class: int | None = None,
    ) -> None:
        super().__init__(network, image_shape, num_steps, sampling_class)
        check_numbers(sigma_data=network.sigma_data)
        self.grid = NoiseGrid() if grid is None else grid
        self.grid.descending(num_steps)

    @classmethod
    def around(
        cls,
        net: nn.Module,
        image_shape: Sequence[int],
        sigma_data: float = 0.5,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = 7.0,
        **options: Any,
    ) -> "DiffusionModel":
        """See `GenerativeModel.around`."""
        check_numbers(sigma_min=sigma_min, sigma_max=sigma_max, rho=rho)
        grid = NoiseGrid(sigma_min, sigma_max, rho)
        return cls(EDMPrecond(net, sigma_data), image_shape, grid, **options)

    def options(self) -> dict[str, Any]:
        """See `GenerativeModel.options`."""
        return {
            "sigma_data": self.network.sigma_data,
            "sigma_min": self.grid.sigma_min,
            "sigma_max": self.grid.sigma_max,
            "rho": self.grid.rho,
            "num_steps": self.num_steps,
            "sampling_class": self.sampling_class,
        }

    @property
    def net(self) -> nn.Module:
        """The raw network under the preconditioning."""
        return self.network.model

    def posterior_mean(self, z: Tensor, sigma: Tensor | float, class_label: Tensor | None = None) -> Tensor:
        """Return the denoised E[x|z,σ] for z (B, *shape) at sigma, (B,) or a number: (B, *shape), float32."""
        sigma = torch.as_tensor(sigma, dtype=torch.float64, device=z.device)
        return self.network(z, sigma, class_label)

    def draw(self, seeds: Sequence[int] | Tensor, num_steps: int | None, class_label: Tensor | None) -> Tensor:
        """See `GenerativeModel.draw`."""
        noise = seeded_noise(seeds, self.image_shape, device=self.device)
        assert num_steps is not None
        return heun_sampler(partial(self.network, class_label=class_label), noise, num_steps, self.grid)
