"""Regression to the posterior mean: the base of the modules whose network is fitted to an estimator's mean."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, check_at_least, check_is, check_positive
from lit_knn.common.rng import Stream, keyed_default_rng, keyed_generator
from lit_knn.estimators import ByClass, Estimator, Exact
from lit_knn.modules.augmentation import Augmented, GeometricAugmentation, check_labels
from lit_knn.modules.augmented_mean import augmented_mean
from lit_knn.modules.base import EstimatorTraining
from lit_knn.modules.conditioning import Conditioning, labels_on
from lit_knn.runs.run import data_autoencoder, find_reference
from lit_knn.sampling.noise_grid import LevelRange
from lit_knn.theory.noise import EDM_PROCESS, Process, forward_noise, under_process

# Early in training EDM limits the half-life of the average to this share of the images seen.
AVERAGE_RAMP_UP = 0.05


class Items(NamedTuple):
    """A batch of noisy items."""

    z: Tensor  # (B, *shape), latents of the module's process
    t: Tensor  # (B,) float64, their times
    # class and augmentation labels for the network, on its device
    labels: tuple[Tensor | None, Tensor | None]
    # (B,) int64, class labels for the estimator, on the device where the batch has them
    class_label: Tensor | None
    # the posterior mean E[x|z] of each item by an estimator, (B, *shape)
    mean: Callable[[Estimator], Tensor]
    generator: torch.Generator  # the source of all draws


class PosteriorRegression(EstimatorTraining):
    """Fits a network to the estimator's posterior mean, in any noise process. Subclasses define levels and loss.

    Subclasses implement `draw_times`, `item_losses` (or `losses` itself), `network`, `evaluate_network` and
    `generative_model`. `LitEDM` explains the arguments.
    """

    process: Process = EDM_PROCESS
    """The noise process. Its time t is the noise level that the losses are logged by."""
    time_labels = 0
    """Number of the net's augmentation labels that hold a second time."""

    def __init__(
        self,
        net: nn.Module,
        estimator: Estimator,
        level_range: LevelRange,
        conditioning: Conditioning,
        augmentation: GeometricAugmentation | None,
        warped: Literal["posterior", "source"],
        *,
        lr: float,
        lr_ramp_up_images: int,
        ema_half_life_images: int,
        measure_target: bool,
        seed: int,
    ) -> None:
        check_is(nn.Module, net, "network")
        super().__init__(estimator, level_range, conditioning, seed)
        if warped not in ("posterior", "source"):
            raise InputError(f"warped={warped!r} must be posterior or source")
        check_positive(lr=lr, ema_half_life_images=ema_half_life_images)
        check_at_least(0, lr_ramp_up_images=lr_ramp_up_images)

        self.augmentation = augmentation
        self.warped = warped
        self.lr = lr
        self.lr_ramp_up_images = lr_ramp_up_images
        self.ema_half_life_images = ema_half_life_images
        self.measure_target = measure_target
        check_labels(augmentation, net, self.time_labels)
        self.check_can_warp("estimator", estimator)

    def check_can_warp(self, option: str, estimator: Estimator) -> None:
        """Raise InputError if an estimator would need the posterior of warped images, and has none."""
        if self.augmentation and self.warped == "posterior" and not estimator.can_warp:
            problem = f"{option} cannot estimate the posterior of warped images"
            advice = (
                "set warped to source, whose target is the item itself, or augmentation to null"
            )
            raise InputError(f"{problem}: {advice}")

    def setup(self, stage: str) -> None:
        """Refuse an augmentation of latents, and then set up as every training does."""
        encoded = data_autoencoder(self.trainer) is not None
        if stage == "fit" and encoded and self.augmentation is not None:
            problem = "augmentation would warp latents, not images: set it to null"
            raise InputError(f"{type(self).__name__}: {problem}")
        super().setup(stage)

    # Subclasses define these

    @abstractmethod
    def draw_times(self, size: int, generator: torch.Generator) -> Tensor:
        """Draw the times t of `process` for `size` items, (size,) float64, on the generator's device."""

    @abstractmethod
    def item_losses(
        self,
        z: Tensor,
        t: Tensor,
        target: Tensor,
        class_label: Tensor | None,
        augment_label: Tensor | None,
    ) -> Tensor:
        """Compute the loss of each item, (B,), as a mean over pixels.

        Args:
            z: (B, *shape), latents of `process`.
            t: (B,) float64, their times.
            target: (B, *shape), the estimated posterior mean E[x|z].
            class_label: (B,) int64, `NO_CLASS` for an item without a class, or None.
            augment_label: (B, label_dim), or None.
        """

    # The optimiser and the average

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use Adam, as EDM and flow matching do."""
        return torch.optim.Adam(self.parameters(), lr=self.lr, betas=(0.9, 0.999), eps=1e-8)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rate. It grows linearly with the images seen, including this step's, so it is never 0.

        EDM's code counts the images before the step. A run with a learning-rate schedule leaves the rate to it.
        """
        if self.trainer.lr_scheduler_configs:
            return

        lr = self.lr
        if self.lr_ramp_up_images:
            lr *= min(self.images_seen / self.lr_ramp_up_images, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr

    def average_decay(self) -> float:
        """Return EDM's decay, whose half-life is `ema_half_life_images` or 5 % of the images seen, whichever is less.

        The images seen include this step's. EDM's code counts those before it, so that its first decay is 0.
        """
        half_life = min(self.ema_half_life_images, AVERAGE_RAMP_UP * self.images_seen)
        # The bound of the half-life avoids a division by 0 before the first batch.
        return 0.5 ** (self.images_of_step / max(half_life, 1e-8))

    def interval_metrics(self) -> dict[str, float]:
        """Return the decay of the averaged weights, for the log."""
        return {"train/ema_decay": self.average_decay()}

    # The loss

    def losses(
        self, x: Tensor, class_label: Tensor | None, key: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Compute `item_losses` at drawn times with the estimator's target; also return the times, (B,) float64."""
        items = self.items(x, class_label, key)
        target = items.mean(self.estimator)
        self.log_target_error(items, target)
        with keyed_default_rng(x.device, *key, Stream.DROPOUT):
            class_label, augment_label = items.labels
            losses = self.item_losses(
                items.z, items.t, target, class_label=class_label, augment_label=augment_label
            )
            return losses, items.t

    def items(self, x: Tensor, class_label: Tensor | None, key: tuple[int, ...]) -> Items:
        """Draw times and noise for clean items x (B, *shape); in training, also drop labels and augment."""
        generator = keyed_generator(x.device, *key)
        trains = key[-1] == Stream.TRAIN
        if trains:
            class_label = self.conditioning.dropped(class_label, *key, Stream.LABEL)
        t = self.draw_times(len(x), generator)

        augmented = None
        if self.augmentation is not None and trains:
            # With draws of the CPU, a GPU run knows which items are warped without waiting.
            on_cpu = x.device.type == "cpu"
            draws = generator if on_cpu else keyed_generator("cpu", *key, Stream.AUGMENTATION)
            augmented = self.augmentation(x, draws)
            self.log("train/augmented", augmented.warped.float().mean())

        clean = x if augmented is None else augmented.images
        noise = torch.randn(x.shape, device=x.device, generator=generator)
        z = forward_noise(clean, t, noise, self.process)

        def mean(estimator: Estimator) -> Tensor:
            target = under_process(self.target, self.process)
            return target(
                z,
                t,
                x=x,
                class_label=class_label,
                augmented=augmented,
                generator=generator,
                estimator=estimator,
            )

        augment_label = None if augmented is None else augmented.labels
        labels = labels_on(x.device, class_label), augment_label
        return Items(
            z=z, t=t, labels=labels, class_label=class_label, mean=mean, generator=generator
        )

    def target(
        self,
        z: Tensor,
        sigma: Tensor,
        x: Tensor,
        class_label: Tensor | None,
        augmented: Augmented | None,
        generator: torch.Generator,
        estimator: Estimator,
    ) -> Tensor:
        """Return each item's posterior mean over the reference set, augmented like the item, in the EDM process.

        Args:
            z: (B, *shape), latents of the EDM process.
            sigma: (B,) float64, their noise levels.
            x: (B, *shape), clean items before augmentation.
            class_label: (B,) int64, or None.
            augmented: the augmented items, or None.
            generator: source of the estimator's draws.
            estimator: the estimator, bound.
        """
        if augmented is None:
            return self.posterior_mean(x, class_label, generator, estimator)(z, sigma)
        with self.estimator_watch.running():
            return augmented_mean(
                estimator,
                z,
                sigma,
                x,
                class_label=class_label,
                augmented=augmented,
                generator=generator,
                warp=self.warped == "posterior",
            )

    def log_target_error(self, items: Items, target: Tensor) -> None:
        """At validation, with `measure_target`, log the squared error of targets (B, *shape) against the exact mean."""
        reference = find_reference(self.trainer)
        measured = self.trainer.validating and self.measure_target
        if not measured or reference is None:
            return

        exact = Exact() if items.class_label is None else ByClass(Exact())
        mean = partial(exact.bind(reference).posterior_mean, labels=items.class_label)
        mu = under_process(mean, self.process)(items.z, items.t)
        error = (target - mu).square().mean()
        self.log("val/target_mse", error, batch_size=len(mu), sync_dist=True)
