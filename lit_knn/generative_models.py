"""Trained networks that draw images, in plain PyTorch: a class for each kind of model, with its sampler.

The Lightning modules sample through these classes, and `lit_knn.load` returns them.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_knn.errors import InputError
from lit_knn.nets.architecture import architecture_of
from lit_knn.nets.precond import ConsistencyFunction, EDMPrecond
from lit_knn.sampling import consistency_sampler, heun_sampler, seeded_classes, seeded_noise
from lit_knn.schedules import NoiseGrid


class GenerativeModel(nn.Module):
    """A network under its preconditioning, and all that its sampler needs. Subclasses define the sampler.

    An image depends on its seed, its class and the number of steps, not on the other images of its batch, except for
    rounding.

    Args:
        network: the preconditioned network (z (B, *shape), t (B,), class_label (B,) or None) -> (B, *shape).
        image_shape: shape of one image.
        num_steps: sampling steps, if a call of `sample` gives none.
        sampling_class: class of all images of a class-conditional network, if a call gives none; None draws the class
            of each image from its seed.

    Raises:
        InputError: a value of the wrong type or out of its range.
    """

    kind: ClassVar[str]
    """Name of the kind of model in files."""

    def __init__(
        self, network: nn.Module, image_shape: Sequence[int], num_steps: int, sampling_class: int | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self.image_shape = _checked_shape(image_shape)
        self.num_steps = _checked_steps(num_steps)
        if sampling_class is not None:
            _check_class("sampling_class", sampling_class, self.num_classes)
        self.sampling_class = sampling_class

    @classmethod
    @abstractmethod
    def around(cls, net: nn.Module, image_shape: Sequence[int], **options: Any) -> "GenerativeModel":
        """Make the model of a raw network and the values that `options` returned."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return what the model needs beside the network and the shape of its images, as plain values."""

    @property
    @abstractmethod
    def net(self) -> nn.Module:
        """The raw network under the preconditioning."""

    @abstractmethod
    def draw(self, seeds: Sequence[int] | Tensor, num_steps: int, class_label: Tensor | None) -> Tensor:
        """Draw one image per seed, see `sample`; the arguments are checked."""

    @property
    def num_classes(self) -> int:
        """Number of classes, 0 if the network is unconditional."""
        return int(getattr(self.net, "num_classes", 0))

    @property
    def device(self) -> torch.device:
        """The device of the weights, on which the images are made."""
        return next(self.parameters()).device

    def forward(self, z: Tensor, t: Tensor, class_label: Tensor | None = None) -> Tensor:
        """Evaluate the preconditioned network at z (B, *shape) and t (B,); returns (B, *shape)."""
        return self.network(z, t, class_label)

    @torch.no_grad()
    def sample(
        self,
        seeds: Sequence[int] | Tensor,
        num_steps: int | None = None,
        class_label: int | Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Draw one image per seed: (B, *shape), float32, model space, on the device of the weights.

        Args:
            seeds: (B,), non-negative integers. `python main.py predict` uses 0, 1, 2, …
            num_steps: sampling steps; None for the model's own number.
            class_label: one class for all images, or (B,) classes; None for `sampling_class`, or classes drawn from the
                seeds.

        Raises:
            InputError: a class that the network does not know, another number of classes than seeds, an impossible
                number of steps.
        """
        steps = self.num_steps if num_steps is None else num_steps
        return self.draw(seeds, steps, self._labels(seeds, class_label))

    def description(self) -> dict[str, Any]:
        """Describe the model without its weights, as plain values; `architecture` is None if the net is a user's."""
        return {
            "kind": self.kind,
            "image_shape": list(self.image_shape),
            "options": self.options(),
            "architecture": architecture_of(self.net),
        }

    def _labels(self, seeds: Sequence[int] | Tensor, class_label: int | Sequence[int] | Tensor | None) -> Tensor | None:
        chosen = self.sampling_class if class_label is None else class_label
        if chosen is None:
            return seeded_classes(seeds, self.num_classes, self.device) if self.num_classes else None
        if isinstance(chosen, int):
            _check_class("class_label", chosen, self.num_classes)
            return torch.full((len(seeds),), chosen, device=self.device)
        labels = torch.as_tensor(chosen, device=self.device)
        if labels.shape != (len(seeds),) or labels.is_floating_point():
            raise InputError(f"sample: class_label must be an integer, or one for each of {len(seeds)} seeds")
        for label in labels.aminmax() if len(labels) else ():
            _check_class("class_label", int(label), self.num_classes)
        return labels

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.image_shape))
        classes = f"{self.num_classes} classes" if self.num_classes else "unconditional"
        count = sum(parameter.numel() for parameter in self.net.parameters())
        net, steps = type(self.net).__name__, f"{self.num_steps} step{'s' if self.num_steps > 1 else ''}"
        return f"{type(self).__name__}({net}, {shape} images, {classes}, {count:,} parameters, {steps})"


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
        check_numbers(sigma_data=network.sigma_data)
        if network.sigma_min != 0:  # With 0, the function has EDM's preconditioning.
            check_numbers(sigma_min=network.sigma_min)
        if not isinstance(sampling_sigmas, list | tuple) or not sampling_sigmas:
            raise InputError(f"sampling_sigmas must be a list of noise levels, got {sampling_sigmas!r:.80}")
        for sigma in sampling_sigmas:
            check_numbers(sampling_sigmas=sigma)
        if any(high <= low for high, low in pairwise([*sampling_sigmas, network.sigma_min])):
            raise InputError(
                f"sampling_sigmas={list(sampling_sigmas)!r:.80} must descend and stay above "
                f"sigma_min={network.sigma_min}"
            )
        self.sampling_sigmas = [float(sigma) for sigma in sampling_sigmas]
        self._check_steps(num_steps)

    @classmethod
    def around(
        cls,
        net: nn.Module,
        image_shape: Sequence[int],
        sigma_data: float = 0.5,
        sigma_min: float = 0.002,
        **options: Any,
    ) -> "ConsistencyModel":
        """See `GenerativeModel.around`."""
        return cls(ConsistencyFunction(net, sigma_data, sigma_min), image_shape, **options)

    def options(self) -> dict[str, Any]:
        """See `GenerativeModel.options`."""
        return {
            "sigma_data": self.network.sigma_data,
            "sigma_min": self.network.sigma_min,
            "sampling_sigmas": self.sampling_sigmas,
            "num_steps": self.num_steps,
            "sampling_class": self.sampling_class,
        }

    @property
    def net(self) -> nn.Module:
        """The raw network under the preconditioning."""
        return self.network.net

    def draw(self, seeds: Sequence[int] | Tensor, num_steps: int, class_label: Tensor | None) -> Tensor:
        """See `GenerativeModel.draw`."""
        self._check_steps(num_steps)
        noise = [seeded_noise(seeds, self.image_shape, draw, self.device) for draw in range(num_steps)]
        function = partial(self.network, class_label=class_label)
        sigmas = self.sampling_sigmas[:num_steps]
        return consistency_sampler(function, torch.stack(noise), sigmas, self.network.sigma_min)

    def _check_steps(self, num_steps: int) -> None:
        most = len(self.sampling_sigmas)
        if not 1 <= num_steps <= most:
            raise InputError(f"sample: num_steps={num_steps} must be from 1 to the number of sampling_sigmas, {most}")


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
        return self.network(z, sigma.expand(len(z)), class_label)

    def draw(self, seeds: Sequence[int] | Tensor, num_steps: int, class_label: Tensor | None) -> Tensor:
        """See `GenerativeModel.draw`."""
        noise = seeded_noise(seeds, self.image_shape, device=self.device)
        return heun_sampler(partial(self.network, class_label=class_label), noise, num_steps, self.grid)


KINDS: dict[str, type[GenerativeModel]] = {model.kind: model for model in (ConsistencyModel, DiffusionModel)}


def check_numbers(**options: object) -> None:
    """Raise InputError for the first option that is not a positive finite number."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InputError(f"{name} must be a positive number, got {value!r:.80}")


def _checked_shape(shape: object) -> tuple[int, ...]:
    sides = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sides or not all(type(side) is int and side > 0 for side in sides):
        raise InputError(f"image_shape must be a list of positive integers, got {shape!r:.80}")
    return sides


def _checked_steps(num_steps: object) -> int:
    if type(num_steps) is not int or num_steps < 1:
        raise InputError(f"num_steps must be an integer of at least 1, got {num_steps!r:.80}")
    return num_steps


def _check_class(name: str, label: object, num_classes: int) -> None:
    if type(label) is not int or not 0 <= label < num_classes:
        raise InputError(f"{name}={label!r:.80}, but the network has num_classes={num_classes}")
