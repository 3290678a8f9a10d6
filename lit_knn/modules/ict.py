"""Improved consistency training (iCT) with a plug-in score estimator: its noise levels and its options.

The loss, Eq. 7 (eq:CM), is `ConsistencyTraining.losses`, which consistency tuning shares.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.memory import to_device
from lit_knn.estimators import Estimator
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.consistency import ConsistencyTraining
from lit_knn.modules.consistency_module import check_not_augmented, check_start_is_trained
from lit_knn.sampling.distances import PseudoHuber
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.schedules import ict_num_steps, lognormal_step_probs
from lit_knn.sampling.solvers import heun_step


class LitICT(ConsistencyTraining):
    """Consistency matching with the score of any estimator. Defaults are the paper's (tab:hyperparams).

    The pseudo-Huber metric is not quadratic, so the optimum depends on the noise of the estimate. So two estimators
    without bias have different optima, not only gradients of different variance.

    Args:
        net: any module `net(z_scaled, noise_label, class_label=None)`.
        estimator: score estimator; `setup` binds it to the data module's reference set.
        solver: `lit_knn.sampling.solvers.euler_step` or `lit_knn.sampling.solvers.heun_step`.
        class_conditional: give the net and the estimator class labels, so that an item follows the probability flow of
            its class; the net's `num_classes` must fit the data.
        lr: learning rate of RAdam.
        ema_decay: decay of the averaged weights; validation, sampling and checkpoints use these weights.
        total_steps: K of the discretisation schedule N(k); the paper's number of training iterations.
        s0: number of discretisation intervals at the start.
        s1: number of discretisation intervals at the end.
        P_mean: mean of ln t in the discretised log-normal p(i).
        P_std: standard deviation of ln t in p(i).
        sigma_data: standard deviation of the data.
        sigma_min: smallest noise level t_min.
        sigma_max: largest noise level T.
        rho: exponent of the noise-level grid.
        huber_c: c of the pseudo-Huber metric; None for 0.00054·sqrt(d).
        sampling_sigmas: noise levels of multi-step sampling; an m-step sample uses the first m.
        predict_steps: sampling steps of `predict`.
        sampling_class: class to sample from a class-conditional net, by name or else by number;
            null draws one for each seed.
        seed: first part of the key of every random draw.
    """

    def __init__(
        self,
        net: nn.Module,
        estimator: Estimator,
        solver: Callable = heun_step,
        class_conditional: bool = False,
        lr: float = 1e-4,
        ema_decay: float = 0.99993,
        total_steps: int = 400_000,
        s0: int = 10,
        s1: int = 1280,
        P_mean: float = -1.1,
        P_std: float = 2.0,
        sigma_data: float = 0.5,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = 7.0,
        huber_c: float | None = None,
        sampling_sigmas: Sequence[float] = (80.0, 0.821),
        predict_steps: int = 1,
        sampling_class: str | None = None,
        seed: int = 0,
    ) -> None:
        with prefixed("LitICT"):
            check_not_augmented(net)
            super().__init__(
                net,
                estimator,
                NoiseGrid(sigma_min, sigma_max, rho),
                Conditioning(net, class_conditional, sampling_class),
                lr=lr,
                ema_decay=ema_decay,
                P_mean=P_mean,
                P_std=P_std,
                sigma_data=sigma_data,
                sigma_min=sigma_min,
                sampling_sigmas=sampling_sigmas,
                predict_steps=predict_steps,
                seed=seed,
            )

            self.save_hyperparameters(ignore=["net", "estimator", "solver"])
            self.solver = solver
            self.metric = PseudoHuber(huber_c)
            self.total_steps = total_steps
            self.s0 = s0
            self.s1 = s1
            self._check_schedule()

        # The last result of `_grid_and_probs`, and the number of grid points and device that it is for.
        self._levels: tuple[Tensor, Tensor] | None = None
        self._levels_of: tuple[int, torch.device] | None = None

    def _check_schedule(self) -> None:
        """Raise InputError if no noise level can be drawn, or if sampling starts above the highest trained level."""
        check_start_is_trained(self.sampling_sigmas, self.grid)

        # These two calls are made for the errors that they raise.
        ict_num_steps(0, self.total_steps, self.s0, self.s1)
        self.grid.ascending(self.s1 + 1)
        sigmas = self.grid.ascending(self.s0 + 1)
        if not lognormal_step_probs(sigmas, self.P_mean, self.P_std).isfinite().all():
            raise InputError(
                f"P_mean={self.P_mean}, P_std={self.P_std} leave no noise level any probability"
            )

    @property
    def num_steps(self) -> int:
        """Number of grid points N(k) at the current iteration."""
        return ict_num_steps(self.step, self.total_steps, self.s0, self.s1)

    def draw_levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw t_i and t_{i−1} for `size` items from p(i); each is (size,) float64."""
        sigmas, probs = self._grid_and_probs(self.num_steps)
        lower = torch.multinomial(probs, size, replacement=True, generator=generator)
        return sigmas[lower + 1], sigmas[lower]

    def _grid_and_probs(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """Return the grid and p(i) on the module's device. They are computed only when N(k) grows."""
        if self._levels is None or self._levels_of != (num_steps, self.device):
            sigmas = self.grid.ascending(num_steps)
            probs = lognormal_step_probs(sigmas, self.P_mean, self.P_std)
            self._levels = to_device(sigmas, self.device), to_device(probs, self.device)
            self._levels_of = num_steps, self.device
        return self._levels

    def interval_metrics(self) -> dict[str, float]:
        """Return the number of grid points N(k), for the log."""
        return {"train/num_steps": float(self.num_steps)}
