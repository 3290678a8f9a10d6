"""The base of all training modules: it binds the estimator, averages weights, logs and writes checkpoints."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lit_knn.common.checkpoint_file import MODEL_KEY
from lit_knn.common.deferred_checks import DeferredChecks, refuse
from lit_knn.common.distributed import in_every_process
from lit_knn.common.errors import InputError, NonFiniteLossError, prefixed
from lit_knn.common.rng import Stream
from lit_knn.common.settings import flat_settings
from lit_knn.estimators import ByClass, Estimator, class_conditional
from lit_knn.modules.averaging import Averaging
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.data_scale import warn_of_scale
from lit_knn.modules.model_checks import check_architecture, check_device, try_blank_image
from lit_knn.modules.optimiser_options import optimiser_options, set_optimiser_options
from lit_knn.modules.tuners import check_no_tuner
from lit_knn.reference import ReferenceSet
from lit_knn.runs.clock import TrainingMonitor, TrainingTime, hardware_name
from lit_knn.runs.interruption import Interruption
from lit_knn.runs.resumption import (
    RUN_KEY,
    check_optimisation,
    check_ranks,
    check_same_run,
    describe_run,
    optimisation,
    repair_progress,
)
from lit_knn.runs.run import find_reference
from lit_knn.sampling import GenerativeModel
from lit_knn.sampling.model_files import prefix_of
from lit_knn.sampling.noise_grid import LevelRange
from lit_knn.sampling.solvers import PosteriorMean

# With other values of these options of the trainer, ranks would wait for each other, or train other weights.
SAME_ON_RANKS = (
    "max_steps",
    "max_epochs",
    "precision",
    "gradient_clip_val",
    "val_check_interval",
    "limit_val_batches",
)


class EstimatorTraining(pl.LightningModule):
    """Trains a network on targets from an estimator; subclasses define the loss and the sampler.

    Every random draw is a function of (seed, rank, batch number), so a resumed run repeats the uninterrupted one.
    Subclasses call `save_hyperparameters` with at least `seed`, and implement `losses`, `network`, `evaluate_network`,
    `generative_model` and `average_decay`.

    Args:
        estimator: score estimator; `setup` binds it to the data module's reference set.
        grid: the noise levels; losses are logged by the bands into which it divides them.
        conditioning: says whether network and estimator get class labels; if so, the estimator averages by class.
    """

    hparams: Any
    # Options that change samples or measurements, and no step of a training. A run can go on with
    # other values of them.
    untrained_options: tuple[str, ...] = (
        "sampling_steps",
        "sampling_sigmas",
        "sampling_class",
        "predict_steps",
        "measure_target",
    )

    def __init__(self, estimator: Estimator, grid: LevelRange, conditioning: Conditioning) -> None:
        super().__init__()
        self.grid = grid
        self.conditioning = conditioning
        self.estimator = self.fitted(estimator)
        self.image_shape: tuple[int, ...] | None = None
        self.images_seen = 0
        self.batches_done = 0
        self._images_of_open_batch = 0
        self._images_before_step = 0
        self.checks = DeferredChecks()
        self._optimiser_options: list[dict[str, Any]] = []
        self._last_step = 0
        self.loaded_step = 0
        self._time_before_resuming = TrainingTime()
        self._resumed_run: dict[str, Any] = {}
        self._resumed_groups: list[dict[str, Any]] = []

    def fitted(self, estimator: Estimator) -> Estimator:
        """Return an estimator for the items of this module. Raises InputError if its own levels do not fit."""
        estimator.check_levels(*self.grid.noise_range())
        # Each target is then a mean over the images of one class, or of all images for an item without a class.
        unlabelled = self.conditioning.label_dropout > 0
        return class_conditional(estimator, unlabelled) if self.conditioning else estimator

    @property
    def estimators(self) -> dict[str, Estimator]:
        """The estimators of training, by the names of their options."""
        return {"estimator": self.estimator}

    # Subclasses define these

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

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The raw network, without its preconditioning or its parameterisation."""

    @abstractmethod
    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        """Evaluate the network at z (B, *shape) and noise level t = σ (B,); returns (B, *shape)."""

    @abstractmethod
    def generative_model(self) -> GenerativeModel:
        """Return the model that samples, in plain PyTorch; it shares the network of this module."""

    @abstractmethod
    def average_decay(self) -> float:
        """Decay of the averaged weights at the current step."""

    def sample(self, seeds: Sequence[int] | Tensor, num_steps: int | None = None) -> Tensor:
        """Draw one image per seed: (B, *shape), float32, model space.

        Image i depends only on seeds[i], not on the batch. Its class is `sampling_class` or drawn from the seed.

        Args:
            seeds: (B,), non-negative integers.
            num_steps: sampling steps; None for the module's default.
        """
        return self.generative_model().sample(seeds, num_steps)

    # Setting up

    def configure_callbacks(self) -> list[pl.Callback]:
        """Average the weights during training; validation and checkpoints use the averaged weights.

        The other callback counts the batches, and ends the run between two batches if it is interrupted.
        """
        check_no_tuner(self.trainer.callbacks)  # type: ignore[attr-defined]
        if self.trainer.state.fn != "fit":
            return []
        return [Averaging(self.trainer.strategy.root_device, self.average_decay), Interruption()]

    def setup(self, stage: str) -> None:
        """Bind the estimator to the data's reference set, on the device of the run, and try the net on one image.

        With class labels it binds one estimator to each class. `predict` needs no estimator, so it builds no index.
        """
        device = self.trainer.strategy.root_device
        check_device(device)
        self.monitor = TrainingMonitor(self.grid, device)
        self._resumed_run, self._resumed_groups = {}, []
        # A trainer that goes on counts on; the count of a checkpoint is loaded later.
        self.batches_done = self.trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
        reference = find_reference(self.trainer)
        needing = []
        for estimator in self.estimators.values():
            if estimator.needs_reference and stage != "predict":
                needing.append(estimator)

        if reference is not None:
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            class_names = getattr(data, "class_names", None)
            with prefixed(type(self).__name__):
                self.conditioning.check_data(reference, class_names)
            if stage != "predict":
                reference.to(device)
            # An index takes longer, so it comes later.
            self._set_image_shape(reference.shape)
            if stage == "fit":
                self.check_scale(reference)
            for estimator in needing:
                self._bind(estimator, reference)
        elif needing:
            self._set_image_shape(needing[0].reference.shape)

    def check_scale(self, reference: ReferenceSet) -> None:
        """Warn if the data's standard deviation is far from `sigma_data`, the one that the module expects."""
        if "sigma_data" in self.hparams:
            advice = (
                "scale the data, or give --model.sigma_data {deviation} and noise levels to match"
            )
            expected = float(self.hparams.sigma_data)
            warn_of_scale(reference, expected, "sigma_data is", f"{advice}, as lit-knn probe shows")

    def _bind(self, estimator: Estimator, reference: ReferenceSet) -> None:
        if self.conditioning:
            # If binding fails in one process, the other processes must not start to train.
            in_every_process(lambda: estimator.bind(reference) and None)
        else:
            estimator.bind(reference)

    def _set_image_shape(self, shape: tuple[int, ...]) -> None:
        """Store the shape, and try the net on one blank image of it."""
        self._check_image_shape(shape)
        device = next((parameter.device for parameter in self.parameters()), self.device)
        try_blank_image(self.evaluate_network, shape, device)

    def _check_image_shape(self, shape: tuple[int, ...]) -> None:
        """Store the image shape. If both the data and a checkpoint give a shape, the two must be equal."""
        shape = tuple(shape)
        if self.image_shape not in (None, shape):
            raise InputError(
                f"the images of checkpoint and data differ in shape: {self.image_shape}, {shape}"
            )
        self.image_shape = shape

    # Training

    @property
    def step(self) -> int:
        """Number of optimiser steps taken. Outside a fit, this is the number of the fit or checkpoint before."""
        return self.trainer.global_step if self.trainer.state.fn == "fit" else self.loaded_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Do one step. `batch` is x (B, *shape) or (x, class_label).

        Raises:
            NonFiniteLossError: the loss is not finite, and the last checkpoint is good. On the CPU the weights have not
                changed. On a GPU the error comes at the next log, validation or checkpoint, which is then not written.
        """
        x, class_label = self._unpack(batch)
        key = (self.hparams.seed, self.global_rank, self.batches_done, Stream.TRAIN)
        with self.checks.collect(self.trainer.global_step):
            loss, t = self.losses(x, class_label, key)
            self._check_finite(loss, t)
        self._images_of_open_batch = len(x) * self.trainer.world_size
        self.images_seen += self._images_of_open_batch
        self.monitor.update(loss.detach(), t, self._images_of_open_batch)
        # Lightning reads what is in its progress bar after each batch, and would wait for the device.
        self.log("train/loss", loss.mean())
        # A number would be copied to the device.
        self.log("train/images_seen", torch.tensor(float(self.images_seen)))
        minimised = self.objective(loss, x)
        # If the objective were None, Lightning would skip the batch and train nothing.
        if not isinstance(minimised, Tensor) or minimised.numel() != 1:
            result = tuple(minimised.shape) if isinstance(minimised, Tensor) else minimised
            rule = "objective must return a scalar tensor"
            raise InputError(f"{type(self).__name__}: {rule}, got {result}")
        return minimised

    def finish_batch(self) -> None:
        """Count a batch whose step, if any, is done. Checkpoints hold it from now on."""
        self.batches_done += 1
        self._images_of_open_batch = 0

    def _check_finite(self, loss: Tensor, t: Tensor) -> None:
        bad, step = ~loss.isfinite(), self.trainer.global_step

        def failure(check: int, level: float, where: str) -> NonFiniteLossError:
            place = f"{where or f' at step {step}'}, first at noise level t={level:.4g}"
            return NonFiniteLossError(
                f"the loss is not finite{place}; the last checkpoint is from before it"
            )

        refuse(
            "loss",
            bad.any().reshape(1),
            lambda: t.index_select(0, bad.int().argmax(0, keepdim=True)),
            failure,
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the training loss of the averaged weights; the noise is the same at every validation."""
        x, class_label = self._unpack(batch)
        loss, _ = self.losses(
            x, class_label, (self.hparams.seed, self.global_rank, batch_idx, Stream.VALIDATION)
        )
        self.log("val/loss", loss.mean(), batch_size=len(loss), sync_dist=True, prog_bar=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Draw samples for a batch of seeds (B,), in float32 with any `trainer.precision`, as all measurements do."""
        with torch.autocast(self.device.type, enabled=False):
            return self.sample(batch)

    def _unpack(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Return the images of a batch, and their labels if the module is class-conditional."""
        x, class_label = batch, None
        if not isinstance(batch, Tensor):
            x = batch[0]
            class_label = batch[1] if len(batch) > 1 else None

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
        """Return the (or another) estimator as a function of (z, t); the monitor measures the time of each call."""
        estimator = self.estimator if estimator is None else estimator

        def measured(z: Tensor, t: Tensor) -> Tensor:
            with self.monitor.estimator_watch.running():
                return estimator.posterior_mean(z, t, x_source, generator, class_label)

        return measured

    @property
    def images_of_step(self) -> int:
        """Number of images in the latest optimiser step, over all ranks and accumulated batches."""
        return self.images_seen - self._images_before_step

    # Logging

    def on_fit_start(self) -> None:
        """Check that all ranks run the same, and with the optimiser of the checkpoint; start the clock.

        Keep the optimiser's options before Lightning loads those of a checkpoint.
        """
        check_ranks(self._same_on_ranks())
        check_optimisation(self.trainer, self._resumed_run, self._resumed_groups)
        self.monitor.restart()
        self.checks = DeferredChecks()
        self._optimiser_options = optimiser_options(self.trainer)

    def _same_on_ranks(self) -> dict[str, Any]:
        """Return what must be the same on all ranks: data, optimiser, and the options of model and trainer."""
        same: dict[str, Any] = {**describe_run(self.trainer, self), **optimisation(self.trainer)}
        same["step"] = self.loaded_step

        options = dict(self.hparams)
        for option, estimator in self.estimators.items():
            part = estimator.estimator if isinstance(estimator, ByClass) else estimator
            options |= flat_settings(option, part)
        for name, value in options.items():
            if isinstance(value, (bool, int, float, str)):
                same[name] = value

        for name in SAME_ON_RANKS:
            same[name] = getattr(self.trainer, name)
        return same

    def on_train_start(self) -> None:
        """Give the optimiser the options of this run, but for those that a scheduler sets."""
        set_optimiser_options(self.trainer, self._optimiser_options)
        self._last_step = self.trainer.global_step

    def on_validation_start(self) -> None:
        """Read the checks, and keep the time of a validation out of the training throughput."""
        self.checks.raise_first()
        self.monitor.pause()

    def on_validation_end(self) -> None:
        """Start the clock again."""
        self.monitor.restart()

    def training_time(self) -> TrainingTime:
        """Return how long training took so far, including the time before it was resumed. Call this after `setup`."""
        now = self.monitor.elapsed()
        name = hardware_name(self.trainer.strategy.root_device, self.trainer.world_size)
        return self._time_before_resuming + (replace(now, hardware=(name,)) if now.seconds else now)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log averages since the last log, every `log_every_n_steps` optimiser steps."""
        step = self.trainer.global_step
        if step == self._last_step:
            return  # The batch was only accumulated.
        if step % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self.checks.raise_first()
            lr = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.log_dict({"train/lr": lr, **self.interval_metrics(), **self.monitor.read()})
        # Callbacks run before this hook, and the weight averaging still needs the old numbers for `images_of_step`.
        self._last_step, self._images_before_step = step, self.images_seen

    def on_train_end(self) -> None:
        """Read the checks of the last steps."""
        self.checks.raise_first()
        self.loaded_step = self.trainer.global_step

    def interval_metrics(self) -> dict[str, float]:
        """Return more values to log beside the averages. Subclasses define these values."""
        return {}

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the counters, image shape and times that a resumed run and sampling need.

        Raises:
            NonFiniteLossError: a loss since the last log was not finite; the checkpoint is then not written.
            InputError: a class label since the last log was none of the network's.
        """
        self.checks.raise_first()
        # A resumed run repeats an interrupted batch, so its images must not count twice.
        checkpoint["images_seen"] = self.images_seen - self._images_of_open_batch
        checkpoint["batches_done"] = self.batches_done
        checkpoint["image_shape"] = self.image_shape
        checkpoint["training_time"] = asdict(self.training_time())
        checkpoint[RUN_KEY] = describe_run(self.trainer, self) | optimisation(self.trainer)
        if self.image_shape is not None:
            model = self.generative_model()
            checkpoint[MODEL_KEY] = {**model.description(), "prefix": prefix_of(self, model.net)}

    def check_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Check that the weights of a checkpoint mean the same in this module; nothing is loaded.

        Raises:
            InputError: the checkpoint is of another architecture; in subclasses, also of another parameterisation.
        """
        kind = checkpoint.get(MODEL_KEY, {}).get("kind")
        check_architecture(self.state_dict(), checkpoint.get("state_dict", {}), kind)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the counters. Refuse a checkpoint as `check_checkpoint` does, before its weights are loaded."""
        self.check_checkpoint(checkpoint)
        trains = self._trainer is not None and self.trainer.state.fn == "fit"
        self.conditioning.take_over(checkpoint.get(MODEL_KEY, {}), trains)
        self.conditioning.check_guidance(self.hparams.get("guidance", 1.0))
        self.images_seen = self._images_before_step = checkpoint.get("images_seen", 0)
        self.loaded_step = checkpoint.get("global_step", 0)
        before = checkpoint.get("training_time", {})
        self._time_before_resuming = TrainingTime(
            **{**before, "hardware": tuple(before.get("hardware", ()))}
        )
        if checkpoint.get("image_shape") is not None:
            self._check_image_shape(checkpoint["image_shape"])
        if trains:
            check_same_run(checkpoint, describe_run(self.trainer, self))
            self._resumed_run = checkpoint.get(RUN_KEY, {})
            self._resumed_groups = []
            for state in checkpoint["optimizer_states"]:
                self._resumed_groups += state["param_groups"]
            self.batches_done = checkpoint["batches_done"]
            repair_progress(checkpoint)

    def known_image_shape(self) -> tuple[int, ...]:
        """Return the shape of one image. Raises InputError if neither data nor a checkpoint gave the shape."""
        if self.image_shape is None:
            raise InputError(
                "sample: the image shape is not known before setup or a loaded checkpoint"
            )
        return self.image_shape
