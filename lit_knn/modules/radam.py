"""The optimiser and the average that all trainings of one-step models have, but for mean flows."""

import torch

from lit_knn.common.errors import InputError, check_positive
from lit_knn.estimators import Estimator
from lit_knn.modules.base import EstimatorTraining
from lit_knn.modules.conditioning import Conditioning
from lit_knn.sampling.noise_grid import LevelRange


class RAdamTraining(EstimatorTraining):
    """Trains with RAdam, and averages the weights with a constant decay. Subclasses define the loss and the model."""

    betas: tuple[float, float] = (0.9, 0.999)
    """RAdam's β₁ and β₂."""

    def __init__(
        self,
        estimator: Estimator,
        level_range: LevelRange,
        conditioning: Conditioning,
        *,
        lr: float,
        ema_decay: float,
        seed: int,
    ) -> None:
        super().__init__(estimator, level_range, conditioning, seed)
        check_positive(lr=lr)
        if not 0 <= ema_decay < 1:
            raise InputError(f"ema_decay must be in [0, 1), got {ema_decay}")
        self.lr = lr
        self.ema_decay = ema_decay

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use RAdam, as iCT, ECT and sCT do."""
        return torch.optim.RAdam(self.parameters(), lr=self.lr, betas=self.betas)

    def average_decay(self) -> float:
        """Return the option `ema_decay`, because the decay is constant."""
        return self.ema_decay
