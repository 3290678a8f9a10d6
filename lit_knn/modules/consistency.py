"""What the consistency models share: the loss between two noise levels, the optimiser and few-step sampling."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError, check_positive
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.modules.base import EstimatorTraining
from lit_knn.modules.conditioning import Conditioning, labels_on
from lit_knn.modules.model_checks import check_preconditioning
from lit_knn.modules.shared_dropout import SharedDropout
from lit_knn.nets.precond import ConsistencyFunction
from lit_knn.sampling import ConsistencyModel
from lit_knn.sampling.distances import Metric
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.samplers import check_sampling_sigmas
from lit_knn.sampling.schedules import consistency_weight
from lit_knn.sampling.solvers import PosteriorMean
from lit_knn.theory.noise import forward_noise

Solver = Callable[[Tensor, Tensor, Tensor, PosteriorMean], Tensor]
"""(z (B, *shape), t (B,), t_next (B,), posterior mean) -> z_next (B, *shape)."""


def check_not_augmented(net: nn.Module | None) -> None:
    """Raise InputError if the net has a layer for augmentation labels.

    Without augmentation this layer gets no gradient, and training on several ranks refuses such a parameter.
    """
    augment_dim = getattr(net, "augment_dim", 0)
    if augment_dim:
        raise InputError(
            f"the net has augment_dim={augment_dim}, but there is no augmentation: set it to 0"
        )


class ConsistencyTraining(EstimatorTraining):
    """Consistency matching, Eq. 7 (eq:CM), with the score of any estimator.

    The student is the network at (z, t). The teacher is the same network, with the same dropout mask and without
    gradient, at (ẑ, r), r < t. ẑ is one solver step from z down the probability flow ODE.

    Subclasses implement `draw_levels`, and explain the arguments. With `sigma_min` 0 the preconditioning is EDM's.
    """

    def __init__(
        self,
        net: nn.Module,
        estimator: Estimator,
        solver: Solver,
        metric: Metric,
        grid: NoiseGrid,
        conditioning: Conditioning,
        *,
        lr: float,
        ema_decay: float,
        P_mean: float,
        P_std: float,
        sigma_data: float,
        sigma_min: float,
        sampling_sigmas: Sequence[float],
        predict_steps: int,
        seed: int,
    ) -> None:
        super().__init__(estimator, grid, conditioning, seed)
        check_positive(lr=lr, P_std=P_std, sigma_data=sigma_data)
        if not 0 <= ema_decay < 1:
            raise InputError(f"ema_decay must be in [0, 1), got {ema_decay}")
        most = len(sampling_sigmas)
        if not 1 <= predict_steps <= most:
            raise InputError(
                f"predict_steps={predict_steps} must be between 1 and the {most} sampling_sigmas"
            )
        check_sampling_sigmas(sampling_sigmas, sigma_min)

        self.consistency_function = ConsistencyFunction(net, sigma_data, sigma_min)
        self.solver = solver
        self.metric = metric
        self.grid = grid
        self.lr = lr
        self.ema_decay = ema_decay
        self.P_mean = P_mean
        self.P_std = P_std
        self.sigma_data = sigma_data
        self.sampling_sigmas = list(sampling_sigmas)
        self.predict_steps = predict_steps

    @abstractmethod
    def draw_levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw the student's levels t and the teacher's r < t, (size,) float64 each, on the generator's device."""

    def losses(
        self, x: Tensor, class_label: Tensor | None, key: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Compute Eq. 7 (eq:CM), d(f(z, t), f⁻(ẑ, r)) / (t − r), for each item, (B,), and t, (B,) float64."""
        generator = keyed_generator(x.device, *key)
        t, r = self.draw_levels(len(x), generator)
        noise = torch.randn(x.shape, device=x.device, generator=generator)
        z = forward_noise(x, t, noise)
        z_hat = self.step_down(z, t, r, self.posterior_mean(x, class_label, generator))

        class_label = labels_on(x.device, class_label)
        dropout = SharedDropout(x.device, *key, Stream.DROPOUT)
        with dropout.masks():
            student = self.consistency_function(z, t, class_label)
        with dropout.masks(), torch.no_grad():
            teacher = self.consistency_function(z_hat, r, class_label)

        return consistency_weight(t, r).float() * self.distance(student, teacher), t

    def step_down(self, z: Tensor, t: Tensor, r: Tensor, posterior_mean: PosteriorMean) -> Tensor:
        """Return ẑ, (B, *shape): the solver's step from z (B, *shape) at level t to level r, (B,) each."""
        return self.solver(z, t, r, posterior_mean)

    def distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the metric's distance of each item, (B,), between two batches (B, *shape)."""
        distance = self.metric(student, teacher)
        if distance.shape != student.shape[:1]:
            batch = tuple(student.shape[:1])
            raise InputError(
                f"metric must return the distance of each item, {batch}, got {distance.shape}"
            )
        return distance

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use RAdam, as iCT and ECT do."""
        return torch.optim.RAdam(self.parameters(), lr=self.lr)

    def average_decay(self) -> float:
        """Return the option `ema_decay`, because iCT and ECT keep the decay constant."""
        return self.ema_decay

    @property
    def network(self) -> nn.Module:
        """The network inside the consistency function."""
        return self.consistency_function.net

    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        """Evaluate the consistency function."""
        return self.consistency_function(z, t)

    def generative_model(self) -> ConsistencyModel:
        return ConsistencyModel(
            self.consistency_function,
            self.known_image_shape(),
            sampling_sigmas=self.sampling_sigmas,
            num_steps=self.predict_steps,
            sampling_class=self.conditioning.chosen_class(),
        )

    def check_checkpoint(self, checkpoint: Content) -> None:
        """Check the architecture, and also that the checkpoint has the same preconditioning."""
        super().check_checkpoint(checkpoint)
        saved = checkpoint.get("hyper_parameters", {})
        # `LitECT` has no option sigma_min, because its consistency function is the identity at 0.
        saved = {"sigma_min": 0.0, **saved} if "sigma_data" in saved else {}
        function = self.consistency_function
        check_preconditioning(
            type(self).__name__, saved, sigma_min=function.sigma_min, sigma_data=function.sigma_data
        )
