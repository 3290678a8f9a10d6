"""Consistency models: one network evaluation maps noise to an image."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.nets.precond import ConsistencyFunction
from lit_knn.sampling.model import GenerativeModel
from lit_knn.sampling.samplers import check_sampling_sigmas, consistency_sampler, seeded_noise


class ConsistencyModel(GenerativeModel):
    """A consistency model: it maps noise to an image in one step, or in a few (Song et al. 2023, Algorithm 1).

    Args:
        network: the consistency function.
        image_shape: shape of one image.
        sampling_sigmas: noise levels of multi-step sampling; an m-step sample uses the first m.
        num_steps: see `GenerativeModel`; at most the number of `sampling_sigmas`.
        sampling_class: see `GenerativeModel`.
    """

    kind = "consistency"
    network: ConsistencyFunction

    def __init__(
        self,
        network: ConsistencyFunction,
        image_shape: Sequence[int],
        sampling_sigmas: Sequence[float] = (80.0, 0.821),
        num_steps: int = 1,
        sampling_class: int | None = None,
    ) -> None:
        super().__init__(network, image_shape, num_steps, sampling_class)
        check_sampling_sigmas(sampling_sigmas, network.sigma_min)
        self.sampling_sigmas = [float(sigma) for sigma in sampling_sigmas]
        self.check_steps(num_steps)

    @classmethod
    def around(
        cls,
        net: nn.Module,
        image_shape: Sequence[int],
        sigma_data: float = 0.5,
        sigma_min: float = 0.002,
        **options: Any,
    ) -> "ConsistencyModel":
        """Make the model of a raw network and of the options that a file has.

        Args:
            net: the raw network.
            image_shape: shape of one image.
            sigma_data: standard deviation of the data.
            sigma_min: noise level at which the consistency function is the identity.
            options: those of the constructor.
        """
        return cls(ConsistencyFunction(net, sigma_data, sigma_min), image_shape, **options)

    def options(self) -> dict[str, object]:
        """Return the settings of the consistency function and of the sampler."""
        return {
            "sigma_data": self.network.sigma_data,
            "sigma_min": self.network.sigma_min,
            "sampling_sigmas": self.sampling_sigmas,
            "num_steps": self.num_steps,
            "sampling_class": self.sampling_class,
        }

    def times_range(self) -> tuple[float, float]:
        return self.network.sigma_min, math.inf

    @property
    def net(self) -> nn.Module:
        return self.network.net

    def check_steps(self, num_steps: int) -> None:
        super().check_steps(num_steps)
        most = len(self.sampling_sigmas)
        if num_steps > most:
            rule = f"at most the number of sampling_sigmas, {most}"
            raise InputError(f"num_steps={num_steps} must be {rule}")

    def draw(
        self, seeds: Sequence[int] | Tensor, num_steps: int, labels: Tensor | None, guidance: float
    ) -> Tensor:
        """Draw images by one evaluation for each step; see `GenerativeModel.draw`."""
        if guidance != 1:
            raise InputError(f"sample: guidance={guidance}, but a consistency model has none")
        self.check_steps(num_steps)

        noise = []
        for draw in range(num_steps):
            noise.append(seeded_noise(seeds, self.image_shape, draw, self.device))

        function = partial(self.network, class_label=labels)
        sigmas = self.sampling_sigmas[:num_steps]
        return consistency_sampler(function, torch.stack(noise), sigmas, self.network.sigma_min)
