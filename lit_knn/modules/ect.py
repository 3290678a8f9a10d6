"""Consistency tuning (ECT, arXiv 2406.14548): turns a trained EDM network into a consistency model."""

from collections.abc import Callable, Sequence
from os import PathLike

import torch
from torch import Tensor, nn

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError, prefixed
from lit_knn.estimators import Estimator
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.consistency import ConsistencyTraining
from lit_knn.modules.data_scale import warn_of_scale
from lit_knn.modules.start import started_network
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.distances import euclidean
from lit_knn.sampling.samplers import EDM_GRID
from lit_knn.sampling.schedules import TuningSchedule, log_normal_sigmas
from lit_knn.sampling.solvers import PosteriorMean, heun_step
from lit_knn.theory.noise import per_item

# Smallest r/t at which the step is the solver's. On the digits, Euler's step was as good as Heun's at r = 0.4·t, and
# better below.
LEAST_RATIO = 0.4


class LitECT(ConsistencyTraining):
    """Consistency tuning of a trained EDM network, with the score of any estimator. Defaults are ECT's for CIFAR-10.

    The student is the network at (z, t), where ln t ~ N(P_mean, P_std²). The teacher is the network without gradient at
    (ẑ, r), where ẑ is one solver step from z down the probability flow ODE. In the first stages r is 0 at small t. The
    target there is the estimated posterior mean itself, as in the training of the EDM network. From stage to stage r
    approaches t (`lit_knn.sampling.schedules.TuningSchedule`).

    With `OneSample` this is ECT: then ẑ = x + rε. A better estimate of the score has less variance, but also another
    optimum, because neither metric is quadratic: where r = 0, `euclidean` leads to the geometric median of the
    posterior with `OneSample`, and to its mean with `Exact`. SCT (arXiv 2410.18958) uses the estimator `STF`.

    The preconditioning is EDM's, so that the first step starts with f = D. It is the consistency function with
    sigma_min = 0, where f(z, 0) = z.

    Args:
        estimator: score estimator; `setup` binds it to the data module's reference set.
        start: the trained network: a published `.pkl` (none of its code is run), a `.safetensors` that `lit-knn
            convert` or `export` wrote, a `.ckpt` of `LitEDM` (its averaged weights), or the folder of such a run. Null
            only with `--ckpt_path`, which then gives the weights: a tuned model needs only its checkpoint, and `net`.
        net: the architecture, for instance with another dropout; it gets the weights of `start`. Its `augment_dim` must
            be 0: there is no augmentation here, and the file's layer for augmentation labels is left out. Null builds
            the architecture that the file stores.
        solver: `lit_knn.sampling.solvers.euler_step` or `lit_knn.sampling.solvers.heun_step`. Where r < 0.4·t the step
            is Euler's in any case.
        metric: distance of student and teacher: `lit_knn.sampling.distances.euclidean`, ECT's adaptive weighting with
            c = 0, or `lit_knn.sampling.distances.PseudoHuber`, that with another c.
        class_conditional: give the net and the estimator class labels, so that an item follows the probability flow of
            its class; the net's `num_classes` must fit the data.
        lr: learning rate of RAdam.
        ema_decay: decay of the averaged weights; validation, sampling and checkpoints use these weights.
        q: factor by which the relative gap 1 − r/t shrinks from one stage to the next.
        k: at small t the relative gap is 1 + k/2 times as large as at large t.
        b: how fast this widening falls with t.
        stage_steps: training steps of a stage.
        stages: number of stages; the last one has no end.
        P_mean: mean of ln t.
        P_std: standard deviation of ln t.
        sigma_data: standard deviation of the data; that of `start`.
        sampling_sigmas: noise levels of multi-step sampling; an m-step sample uses the first m.
        predict_steps: sampling steps of `predict`.
        sampling_class: class to sample from a class-conditional net, by name or else by number;
            null draws one for each seed.
        seed: first part of the key of every random draw.
    """

    tunes = True

    def __init__(
        self,
        estimator: Estimator,
        start: str | PathLike[str] | None = None,
        net: nn.Module | None = None,
        solver: Callable = heun_step,
        metric: Callable = euclidean,
        class_conditional: bool = False,
        lr: float = 1e-4,
        ema_decay: float = 0.9999,
        q: float = 2.0,
        k: float = 8.0,
        b: float = 1.0,
        stage_steps: int = 25_000,
        stages: int = 8,
        P_mean: float = -1.1,
        P_std: float = 2.0,
        sigma_data: float = 0.5,
        sampling_sigmas: Sequence[float] = (80.0, 0.821),
        predict_steps: int = 1,
        sampling_class: str | None = None,
        seed: int = 0,
    ) -> None:
        with prefixed("LitECT"):
            schedule = TuningSchedule(q, k, b, stage_steps, stages)
            schedule.check_reaches(EDM_GRID.sigma_max)

            if start is None and net is None:
                raise InputError("start=null needs net, the architecture of the checkpoint")
            net = started_network(start, net, sigma_data)
            conditioning = Conditioning(net, class_conditional, sampling_class)
            super().__init__(
                net,
                estimator,
                EDM_GRID,
                conditioning,
                lr=lr,
                ema_decay=ema_decay,
                P_mean=P_mean,
                P_std=P_std,
                sigma_data=sigma_data,
                sigma_min=0.0,
                sampling_sigmas=sampling_sigmas,
                predict_steps=predict_steps,
                seed=seed,
            )

            # A path object among the options would make a checkpoint that no safe reader opens.
            self.save_hyperparameters(ignore=["net", "estimator", "start", "solver", "metric"])
            self.solver = solver
            self.metric = metric
            self.schedule = schedule
            self._has_weights = start is not None

    def on_load_checkpoint(self, checkpoint: Content) -> None:
        super().on_load_checkpoint(checkpoint)
        self._has_weights = True

    def on_fit_start(self) -> None:
        """Refuse to train from random weights."""
        if not self._has_weights:
            raise InputError(
                "LitECT: start=null has no trained network: give a start, or --ckpt_path to go on"
            )

    def check_scale(self, reference: ReferenceSet) -> None:
        """Warn if the data's standard deviation is far from `sigma_data`, that of the data of `start`."""
        advice = "scale the data as those of start"
        warn_of_scale(reference, self.sigma_data, "sigma_data is", advice)

    def draw_levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw t from the log-normal distribution, and map it to r; each is (size,) float64."""
        t = log_normal_sigmas(size, self.P_mean, self.P_std, generator)
        return t, self.schedule.teacher_level(t, self.schedule.stage(self.step))

    def step_down(self, z: Tensor, t: Tensor, r: Tensor, posterior_mean: PosteriorMean) -> Tensor:
        """Return ẑ, (B, *shape): the solver's step where r >= 0.4·t, and Euler's elsewhere.

        Heun's second slope (ẑ − μ)/r is multiplied by t − r. For r far below t it throws ẑ off the trajectory, by more
        than the spread of the pixels.
        """
        far = per_item(r < LEAST_RATIO * t, z)
        # One call of the solver serves both. Its step to 0 ends on the posterior mean μ, and Euler's step to r ends on
        # the line from z to μ.
        stepped = self.solver(z, t, torch.where(far.flatten(), 0.0, r), posterior_mean)
        euler = torch.lerp(stepped.double(), z.double(), per_item(r / t, z))
        return torch.where(far, euler, stepped).to(z.dtype)

    def interval_metrics(self) -> dict[str, float]:
        """Return the stage of the schedule, for the log."""
        return {"train/stage": float(self.schedule.stage(self.step))}
