"""The base of the modules that train consistency models: the function, sampling and checkpoints."""

from collections.abc import Sequence

from torch import Tensor, nn

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError, check_positive
from lit_knn.estimators import Estimator
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.data_scale import warn_of_sigma_data
from lit_knn.modules.model_checks import check_preconditioning
from lit_knn.modules.radam import RAdamTraining
from lit_knn.nets.precond import ConsistencyFunction
from lit_knn.reference import ReferenceSet
from lit_knn.sampling import ConsistencyModel
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.samplers import check_sampling_sigmas


def check_not_augmented(net: nn.Module | None) -> None:
    """Raise InputError if the net has a layer for augmentation labels.

    Without augmentation this layer gets no gradient, and training on several ranks refuses such a parameter.
    """
    augment_dim = getattr(net, "augment_dim", 0)
    if augment_dim:
        raise InputError(
            f"the net has augment_dim={augment_dim}, but there is no augmentation: set it to 0"
        )


def check_start_is_trained(sampling_sigmas: Sequence[float], grid: NoiseGrid) -> None:
    """Raise InputError if sampling starts above the highest level of the training."""
    highest, sigma_max = sampling_sigmas[0], grid.sigma_max
    if highest > sigma_max:
        raise InputError(
            f"sampling_sigmas begin at {highest}, but no level above sigma_max={sigma_max} is trained"
        )


class ConsistencyModule(RAdamTraining):
    """What the trainings of a consistency model share; subclasses implement the loss and explain the arguments.

    With `sigma_min` 0 the preconditioning is EDM's.
    """

    tunes = False
    """Tells whether the training starts from a trained network, whose sigma_data it keeps."""

    def __init__(
        self,
        net: nn.Module,
        estimator: Estimator,
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
        super().__init__(estimator, grid, conditioning, lr=lr, ema_decay=ema_decay, seed=seed)
        check_positive(P_std=P_std, sigma_data=sigma_data)
        most = len(sampling_sigmas)
        if not 1 <= predict_steps <= most:
            raise InputError(
                f"predict_steps={predict_steps} must be between 1 and the {most} sampling_sigmas"
            )
        check_sampling_sigmas(sampling_sigmas, sigma_min)

        self.consistency_function = ConsistencyFunction(net, sigma_data, sigma_min)
        self.grid = grid
        self.P_mean = P_mean
        self.P_std = P_std
        self.sigma_data = sigma_data
        self.sampling_sigmas = list(sampling_sigmas)
        self.predict_steps = predict_steps

    def check_scale(self, reference: ReferenceSet) -> None:
        """Warn if the data's standard deviation is far from `sigma_data`."""
        warn_of_sigma_data(reference, self.sigma_data)

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
