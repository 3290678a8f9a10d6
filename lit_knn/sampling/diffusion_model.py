"""Diffusion models: a denoiser, whose probability flow maps noise to an image."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.nets.precond import EDMPrecond
from lit_knn.sampling.denoising_model import DenoisingModel
from lit_knn.sampling.described_parts import named_process, process_of
from lit_knn.sampling.noise_grid import EDM_GRID, NoiseGrid
from lit_knn.sampling.samplers import heun_sampler, seeded_noise
from lit_knn.theory.noise import EDM, EDM_PROCESS, Process


class DiffusionModel(DenoisingModel):
    """A diffusion model: a denoiser, and EDM's Heun sampler, which integrates its probability flow.

    See Karras et al. 2022.
    `num_steps`, `sampling_class`, `guidance` and `drops_labels` are those of `GenerativeModel`.

    Args:
        network: the denoiser.
        image_shape: shape of one image.
        grid: noise levels of the sampler.
        process: the noise process whose probability flow the sampler integrates.
    """

    kind = "diffusion"
    network: EDMPrecond

    def __init__(
        self,
        network: EDMPrecond,
        image_shape: Sequence[int],
        grid: NoiseGrid = EDM_GRID,
        num_steps: int = 18,
        sampling_class: int | None = None,
        process: Process = EDM_PROCESS,
        guidance: float = 1.0,
        drops_labels: bool = True,
    ) -> None:
        super().__init__(
            network,
            image_shape,
            num_steps=num_steps,
            sampling_class=sampling_class,
            guidance=guidance,
            drops_labels=drops_labels,
        )
        self.grid = grid
        self.process = process
        self.check_steps(num_steps)
        check_process(process, grid)

    @classmethod
    def around(
        cls,
        net: nn.Module,
        image_shape: Sequence[int],
        sigma_data: float = 0.5,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = 7.0,
        process: object = None,
        **options: Any,
    ) -> "DiffusionModel":
        """Make the model of a raw network and of the options that a file has.

        Args:
            net: the raw network.
            image_shape: shape of one image.
            sigma_data: standard deviation of the data.
            sigma_min: smallest noise level of the sampler.
            sigma_max: largest noise level of the sampler.
            rho: exponent of the sampler's grid.
            process: see `process_of`; None for EDM's.
            options: those of the constructor.
        """
        grid = NoiseGrid(sigma_min, sigma_max, rho)
        noise_process: Process = EDM_PROCESS
        if process is not None:
            noise_process = process_of(process)

        network = EDMPrecond(net, sigma_data)
        return cls(network, image_shape, grid, process=noise_process, **options)

    def options(self) -> dict[str, object]:
        """Return the settings of the denoiser and of the sampler; EDM's process needs no name."""
        options: dict[str, object] = {
            "sigma_data": self.network.sigma_data,
            "sigma_min": self.grid.sigma_min,
            "sigma_max": self.grid.sigma_max,
            "rho": self.grid.rho,
            "num_steps": self.num_steps,
            "sampling_class": self.sampling_class,
        }
        if type(self.process) is not EDM:
            options["process"] = named_process(self.process)
        return options | self.guidance_options()

    @property
    def denoiser(self) -> EDMPrecond:
        return self.network

    def draw(
        self, seeds: Sequence[int] | Tensor, num_steps: int, labels: Tensor | None, guidance: float
    ) -> Tensor:
        noise = seeded_noise(seeds, self.image_shape, device=self.device)
        return heun_sampler(
            self.guided_network(labels, guidance), noise, num_steps, self.grid, process=self.process
        )


def check_process(process: Process, grid: NoiseGrid) -> None:
    """Raise InputError if the process does not reach the noise levels of the grid."""
    # Called for the error that it raises.
    process.t_of_sigma(torch.tensor(grid.noise_range(), dtype=torch.float64))
