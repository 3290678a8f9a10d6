"""One-step generators that can be trained: a network, and the map from noise to images that it defines."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from os import PathLike, fspath

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, check_positive
from lit_knn.modules.consistency_module import check_not_augmented
from lit_knn.nets.average_velocity import AverageVelocity
from lit_knn.nets.precond import ConsistencyFunction
from lit_knn.sampling import ConsistencyModel, DiffusionModel, GenerativeModel, MeanFlowModel
from lit_knn.sampling.loading import load_model_to_tune
from lit_knn.sampling.samplers import check_sampling_sigmas
from lit_knn.theory.noise import LINEAR_PROCESS


class OneStepGenerator(nn.Module, ABC):
    """G: maps standard normal noise (B, *shape) and labels (B,) or None to images (B, *shape), float32."""

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The raw network."""

    @abstractmethod
    def forward(self, noise: Tensor, class_label: Tensor | None = None) -> Tensor:
        """Map noise to images."""

    @abstractmethod
    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        """Evaluate the network under its preconditioning at z (B, *shape) and noise level t (B,)."""

    @abstractmethod
    def preconditioning(self) -> dict[str, float]:
        """Return the options of the model that change what the weights mean, by name."""

    @abstractmethod
    def model(self, image_shape: Sequence[int], sampling_class: int | None) -> GenerativeModel:
        """Return the model that samples in one step and shares the network.

        Args:
            image_shape: shape of one image.
            sampling_class: see `GenerativeModel`.
        """


class ConsistencyGenerator(OneStepGenerator):
    """G(ε) = f(σ_max·ε, σ_max): one step of a consistency model.

    With EDM's preconditioning (σ_min = 0) this is c_skip·σ_max·ε + c_out·F. At σ_max = σ_data it starts with half of
    the noise, scaled to the data; far above σ_data it starts with one image for all noise, because c_skip·σ_max is then
    small.

    Args:
        function: the consistency function.
        sigma_max: the noise level of the noise.
    """

    def __init__(self, function: ConsistencyFunction, sigma_max: float) -> None:
        super().__init__()
        check_sampling_sigmas([sigma_max], function.sigma_min)
        self.function = function
        self.sigma_max = float(sigma_max)

    @property
    def network(self) -> nn.Module:
        return self.function.net

    def forward(self, noise: Tensor, class_label: Tensor | None = None) -> Tensor:
        t = torch.full((len(noise),), self.sigma_max, dtype=torch.float64, device=noise.device)
        return self.function(self.sigma_max * noise, t, class_label)

    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        return self.function(z, t)

    def preconditioning(self) -> dict[str, float]:
        function = self.function
        return {
            "sigma_data": function.sigma_data,
            "sigma_min": function.sigma_min,
            "sigma_max": self.sigma_max,
        }

    def model(self, image_shape: Sequence[int], sampling_class: int | None) -> ConsistencyModel:
        return ConsistencyModel(
            self.function,
            image_shape,
            sampling_sigmas=[self.sigma_max],
            sampling_class=sampling_class,
        )


class MeanFlowGenerator(OneStepGenerator):
    """G(ε) = ε − u(ε, 0, 1): one step of a mean flow.

    Args:
        flow: the average velocity u(z, r, t).
    """

    def __init__(self, flow: AverageVelocity) -> None:
        super().__init__()
        self.flow = flow

    @property
    def network(self) -> nn.Module:
        return self.flow.model

    def forward(self, noise: Tensor, class_label: Tensor | None = None) -> Tensor:
        one, zero = noise.new_ones(()), noise.new_zeros(())
        return (noise - self.flow(noise, one.double(), class_label, zero.double())).float()

    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        return self.flow(z, LINEAR_PROCESS.t_of_sigma(t))

    def preconditioning(self) -> dict[str, float]:
        return {}

    def model(self, image_shape: Sequence[int], sampling_class: int | None) -> MeanFlowModel:
        return MeanFlowModel(self.flow, image_shape, sampling_class=sampling_class)


def started_generator(
    net: nn.Module | None,
    start: str | PathLike[str] | None,
    sigma_data: float | None,
    sigma_max: float | None,
) -> OneStepGenerator:
    """Return a new generator, or one that starts as one step of a trained model.

    Args:
        net: the raw network; None builds that of the file `start`.
        start: a file or folder that `lit_knn.load` reads, or None.
        sigma_data: standard deviation of the data in the preconditioning; None for that of the file, or else 0.5.
        sigma_max: noise level of the noise; None for the highest of the file, or else `sigma_data`.

    Raises:
        InputError: neither net nor start is given, or the options do not fit the file.
    """
    if start is None:
        if net is None:
            raise InputError("start=null needs net, the network to train")
        check_not_augmented(net)
        sigma_data = 0.5 if sigma_data is None else sigma_data
        sigma_max = sigma_data if sigma_max is None else sigma_max
        check_positive(sigma_data=sigma_data)
        return ConsistencyGenerator(ConsistencyFunction(net, sigma_data, 0.0), sigma_max)

    try:
        generator = _generator_of(load_model_to_tune(start, net), sigma_max)
    except InputError as error:
        raise InputError(f"start={error}") from error

    known = generator.preconditioning().get("sigma_data")
    if sigma_data not in (None, known):
        problem = f"start={fspath(start)} was trained with sigma_data={known}"
        raise InputError(f"{problem}, not {sigma_data}: give null")
    return generator


def _generator_of(model: GenerativeModel, sigma_max: float | None) -> OneStepGenerator:
    """Return the generator that starts as one step of a trained model, and shares its network.

    Args:
        model: a consistency model, a mean flow, or a diffusion model, whose denoiser is a consistency function with
            σ_min = 0.
        sigma_max: see `started_generator`.
    """
    if isinstance(model, MeanFlowModel):
        if sigma_max is not None:
            raise InputError(f"sigma_max={sigma_max}, but a mean flow has none: give null")
        return MeanFlowGenerator(model.network)

    check_not_augmented(model.net)
    if isinstance(model, ConsistencyModel):
        highest = model.sampling_sigmas[0] if sigma_max is None else sigma_max
        return ConsistencyGenerator(model.network, highest)

    if isinstance(model, DiffusionModel):
        denoiser = model.network
        function = ConsistencyFunction(denoiser.model, denoiser.sigma_data, sigma_min=0.0)
        highest = model.grid.sigma_max if sigma_max is None else sigma_max
        return ConsistencyGenerator(function, highest)

    kinds = "a consistency model, a mean flow or a diffusion model"
    raise InputError(f"a {model.kind} model is no start: give {kinds}")
