"""What the consistency models share: the loss between two noise levels, the optimiser and few-step sampling."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, check_positive
from lit_knn.common.memory import to_device
from lit_knn.common.rng import Stream, keyed_default_rng, keyed_generator, rng_state
from lit_knn.estimators import Estimator
from lit_knn.modules.base import EstimatorTraining
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.model_checks import check_preconditioning
from lit_knn.nets.precond import ConsistencyFunction
from lit_knn.sampling import ConsistencyModel
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.samplers import check_sampling_sigmas
from lit_knn.sampling.schedules import Metric, consistency_weight
from lit_knn.sampling.solvers import PosteriorMean
from lit_knn.theory.noise import forward_noise


def check_not_augmented(net: nn.Module | None) -> None:
    """Raise InputError if the net has a layer for augmentation labels: it gets no gradient, which many ranks refuse."""
    if augment_dim := getattr(net, "augment_dim", 0):
        raise InputError(
            f"the net has augment_dim={augment_dim}, but there is no augmentation: set it to 0"
        )


class ConsistencyTraining(EstimatorTraining):
    """Consistency matching, Eq. 7 (eq:CM), with the score of any estimator.

    The student is evaluated at (z, t). The stop-gradient teacher has the same weights and dropout mask and is evaluated
    at (ẑ, r), r < t; ẑ is one solver step down the PF-ODE from z.

    Subclasses call `save_hyperparameters` with at least lr, ema_decay, sigma_data, sampling_sigmas, predict_steps,
    sampling_class and seed, and then `check_shared_options`. They implement `draw_levels`, and explain the arguments.
    With `sigma_min` 0 the preconditioning is EDM's.
    """

    grid: NoiseGrid

    def __init__(
        self,
        net: nn.Module,
        estimator: Estimator,
        solver: Callable,
        metric: Metric,
        grid: NoiseGrid,
        conditioning: Conditioning,
        sigma_data: float,
        sigma_min: float,
    ) -> None:
        super().__init__(estimator, grid, conditioning)
        self.consistency_function = ConsistencyFunction(net, sigma_data, sigma_min)
        self.solver = solver
        self.metric = metric

    @abstractmethod
    def draw_levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw the student's levels t and the teacher's r < t, (size,) float64 each, on the generator's device."""

    def check_shared_options(self) -> None:
        """Raise InputError for the first option that is out of its range."""
        h = self.hparams
        check_positive(lr=h.lr, P_std=h.P_std, sigma_data=h.sigma_data)
        if not 0 <= h.ema_decay < 1:
            raise InputError(f"ema_decay must be in [0, 1), got {h.ema_decay}")
        if not 1 <= h.predict_steps <= (most := len(h.sampling_sigmas)):
            raise InputError(
                f"predict_steps={h.predict_steps} must be between 1 and the {most} sampling_sigmas"
            )
        check_sampling_sigmas(h.sampling_sigmas, self.consistency_function.sigma_min)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use RAdam, as iCT and ECT do."""
        return torch.optim.RAdam(self.parameters(), lr=self.hparams.lr)

    def average_decay(self) -> float:
        """The option `ema_decay`; iCT and ECT keep it constant."""
        return self.hparams.ema_decay

    @property
    def network(self) -> nn.Module:
        """The network inside the consistency function."""
        return self.consistency_function.net

    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        """Evaluate the consistency function."""
        return self.consistency_function(z, t)

    def step_down(self, z: Tensor, t: Tensor, r: Tensor, posterior_mean: PosteriorMean) -> Tensor:
        """Take the solver's step from z (B, *shape) at t to r, (B,) each."""
        return self.solver(z, t, r, posterior_mean)

    def losses(
        self, x: Tensor, class_label: Tensor | None, key: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Compute Eq. 7 (eq:CM), d(f(z, t), f⁻(ẑ, r)) / (t − r), for each item, (B,), and t, (B,) float64."""
        generator = keyed_generator(x.device, *key)
        t, r = self.draw_levels(len(x), generator)
        noise = torch.randn(x.shape, device=x.device, generator=generator)
        z = forward_noise(x, t, noise)
        z_hat = self.step_down(z, t, r, self.posterior_mean(x, class_label, generator))

        student, teacher = self._student_and_teacher((z, t), (z_hat, r), class_label, key)
        distance = self.metric(student, teacher)
        if distance.shape != t.shape:
            raise InputError(
                f"metric must return the distance of each item, {tuple(t.shape)}, got {distance.shape}"
            )
        return consistency_weight(t, r).float() * distance, t

    def _student_and_teacher(
        self,
        at_student: tuple[Tensor, Tensor],
        at_teacher: tuple[Tensor, Tensor],
        class_label: Tensor | None,
        key: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Evaluate the consistency function at (z, t), and without gradient at (ẑ, r), with equal dropout masks."""
        device = at_student[0].device
        if class_label is not None:
            class_label = to_device(class_label, device)

        with keyed_default_rng(device, *key, Stream.DROPOUT):
            student = self.consistency_function(*at_student, class_label)
            rng_of_student = rng_state(device)

        with torch.no_grad(), keyed_default_rng(device, *key, Stream.DROPOUT):
            teacher = self.consistency_function(*at_teacher, class_label)
            rng_of_teacher = rng_state(device)

        if rng_of_teacher != rng_of_student:
            problem = "the net draws other random numbers with gradients than without"
            problem += ", so student and teacher cannot share dropout masks"
            advice = "if it is compiled, torch.compile has given up on one of the two"
            raise InputError(f"{type(self).__name__}: {problem}; {advice}")
        return student, teacher

    def generative_model(self) -> ConsistencyModel:
        h, shape, chosen = self.hparams, self.known_image_shape(), self.conditioning.chosen_class()
        return ConsistencyModel(
            self.consistency_function, shape, list(h.sampling_sigmas), h.predict_steps, chosen
        )

    def check_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Also refuses another preconditioning."""
        super().check_checkpoint(checkpoint)
        saved = checkpoint.get("hyper_parameters", {})
        # Modules whose function is the identity at 0 have no option sigma_min.
        saved = {"sigma_min": 0.0, **saved} if "sigma_data" in saved else {}
        function = self.consistency_function
        check_preconditioning(
            type(self).__name__, saved, sigma_min=function.sigma_min, sigma_data=function.sigma_data
        )
