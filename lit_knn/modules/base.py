"""The base of all training modules: it binds the estimator, computes losses and logs them."""

from abc import abstractmethod

import pytorch_lightning as pl
import torch
from torch import Tensor

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.deferred_checks import DeferredChecks
from lit_knn.common.distributed import in_every_process
from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.rng import Stream
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.data.batches import split_batch
from lit_knn.estimators import Estimator
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.finite_loss import check_finite
from lit_knn.modules.model_checks import check_device
from lit_knn.modules.refused_callbacks import check_callbacks
from lit_knn.modules.sampling_module import SamplingModule
from lit_knn.modules.training_callbacks import training_callbacks
from lit_knn.modules.training_log import StepOutput
from lit_knn.reference import ReferenceSet
from lit_knn.runs.run import find_reference
from lit_knn.sampling.noise_grid import LevelRange
from lit_knn.sampling.solvers import PosteriorMean


class EstimatorTraining(SamplingModule):
    """Trains a network on targets from an estimator; subclasses define the loss and the sampler.

    Every random draw is a function of (seed, rank, batch number), so a resumed run repeats the uninterrupted one.
    Subclasses implement `losses` and `average_decay`, and what `SamplingModule` asks for.

    Args:
        estimator: score estimator; `setup` binds it to the data module's reference set.
        level_range: the noise levels; losses are logged by the bands into which it divides them.
        conditioning: says whether network and estimator get class labels; if so, the estimator averages by class.
        seed: first part of the key of every random draw.
    """

    # Options that change samples or measurements but no training step. A resumed run may have other
    # values of them.
    untrained_options: tuple[str, ...] = (
        "sampling_steps",
        "sampling_sigmas",
        "sampling_class",
        "predict_steps",
        "measure_target",
    )

    def __init__(
        self, estimator: Estimator, level_range: LevelRange, conditioning: Conditioning, seed: int
    ) -> None:
        super().__init__(conditioning)
        self.level_range = level_range
        self.seed = seed
        self.estimator = conditioning.estimator_for(estimator, level_range)
        # The callbacks of a training set the two counts, and read the watch and the checks.
        self.batches_done = 0
        self.images_of_step = 0
        self.estimator_watch = Stopwatch(torch.device("cpu"))
        self.checks = DeferredChecks()

    @property
    def estimators(self) -> dict[str, Estimator]:
        """The estimators of training, by the names of their options."""
        return {"estimator": self.estimator}

    @property
    def data_estimators(self) -> dict[str, Estimator]:
        """Those of `estimators` that average over the data; the default is all."""
        return self.estimators

    @abstractmethod
    def losses(
        self, x: Tensor, class_label: Tensor | None, key: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of each item, (B,), and its noise level, (B,) float64.

        Args:
            x: (B, *shape), clean images.
            class_label: (B,) int64; None unless class-conditional.
            key: the key of all random draws.
        """

    def objective(self, loss: Tensor, x: Tensor) -> Tensor:
        """Return the scalar to minimise, from losses (B,) and items x (B, *shape). The default is the mean loss."""
        return loss.mean()

    @abstractmethod
    def average_decay(self) -> float:
        """Return the decay of the averaged weights at the current step."""

    def interval_metrics(self) -> dict[str, float]:
        """Return more values to log, every `log_every_n_steps` steps. The default is none."""
        return {}

    def check_scale(self, reference: ReferenceSet) -> None:
        """Warn if the data's standard deviation is far from the one that the module expects, if it expects any."""

    # Setting up

    def configure_callbacks(self) -> list[pl.Callback]:
        """Return the `training_callbacks` of a fit."""
        trains = self.trainer.state.fn == "fit"
        check_callbacks(self.trainer.callbacks, trains)  # type: ignore[attr-defined]
        if not trains:
            return []
        self.estimator_watch = Stopwatch(self.trainer.strategy.root_device)
        self.checks = DeferredChecks()
        return training_callbacks(self, self.trainer)

    def setup(self, stage: str) -> None:
        """Bind the estimators to the data's reference set, on the device of the run.

        `set_image_shape` first tries the net on an image of noise. `predict` needs no estimator and builds no index.
        """
        device = self.trainer.strategy.root_device
        check_device(device)
        estimators: list[Estimator] = []
        if stage != "predict":
            candidates = self.data_estimators.values()
            estimators = [each for each in candidates if each.needs_reference]

        reference = find_reference(self.trainer)
        if reference is None:
            if estimators:  # They are bound already.
                self.set_image_shape(estimators[0].reference.shape)
            return

        class_names = getattr(self.trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
        with prefixed(type(self).__name__):
            self.conditioning.check_data(reference, class_names)
        if stage != "predict":
            reference.to(device)
        self.set_image_shape(reference.shape)
        if stage == "fit":
            self.check_scale(reference)

        def bind() -> None:
            for estimator in estimators:
                estimator.bind(reference)

        # An index takes long, so it comes last. If it fails in one process, no other may start to train.
        if estimators:
            in_every_process(bind)

    # Training

    def training_step(self, batch: object, batch_idx: int) -> StepOutput:
        """Compute the loss of a batch, which is x (B, *shape) or (x, class_label).

        Raises:
            NonFiniteLossError: the loss is not finite, and the last checkpoint is good. On the CPU the weights have not
                changed. On a GPU the error comes at the next log, validation or checkpoint, which is then not written.
        """
        x, class_label = self._unpack(batch)
        key = (self.seed, self.global_rank, self.batches_done, Stream.TRAIN)
        step = self.trainer.global_step
        with self.checks.collect(step):
            loss, t = self.losses(x, class_label, key)
            check_finite(loss, t, step)

        # The loss is not for the progress bar: Lightning would read it after each batch, and so wait for the device.
        self.log("train/loss", loss.mean())
        return {"loss": self.objective(loss, x), "item_losses": loss.detach(), "noise_levels": t}

    def validation_step(self, batch: object, batch_idx: int) -> None:
        """Log the training loss of the averaged weights; the noise is the same at every validation."""
        x, class_label = self._unpack(batch)
        key = (self.seed, self.global_rank, batch_idx, Stream.VALIDATION)
        loss, _ = self.losses(x, class_label, key)
        self.log("val/loss", loss.mean(), batch_size=len(loss), sync_dist=True, prog_bar=True)

    def _unpack(self, batch: object) -> tuple[Tensor, Tensor | None]:
        """Return the images of a batch, and their labels if the module is class-conditional."""
        x, class_label = split_batch(batch)
        if not self.conditioning:
            return x, None
        if class_label is None:
            problem = "class_conditional=True, but the batches have no labels"
            raise InputError(f"{type(self).__name__}: {problem}")
        return x, class_label

    def posterior_mean(
        self,
        x_source: Tensor,
        class_label: Tensor | None,
        generator: torch.Generator,
        estimator: Estimator | None = None,
    ) -> PosteriorMean:
        """Return the estimator's mean as a function of (z, t), which also measures the time of each call.

        Args:
            x_source: (B, *shape), the clean images.
            class_label: (B,) int64, or None.
            generator: source of the estimator's draws.
            estimator: another estimator than the module's.
        """
        estimator = self.estimator if estimator is None else estimator

        def measured(z: Tensor, t: Tensor) -> Tensor:
            with self.estimator_watch.running():
                return estimator.posterior_mean(
                    z, t, x_source=x_source, generator=generator, labels=class_label
                )

        return measured

    def on_save_checkpoint(self, checkpoint: Content) -> None:
        """Save what sampling needs. Raises what the checks have noted, such as a loss that was not finite, instead."""
        self.checks.raise_first()
        super().on_save_checkpoint(checkpoint)
