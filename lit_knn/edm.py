"""EDM diffusion models (Karras et al. 2022) trained towards the posterior mean of any estimator: Table 2."""

from typing import Literal

import torch
from torch import Tensor, nn

from lit_knn.errors import InputError, prefixed
from lit_knn.estimators import ByClass, Estimator, ExactFloat64
from lit_knn.generative_models import DiffusionModel
from lit_knn.memory import moved
from lit_knn.nets.precond import EDMPrecond
from lit_knn.rng import keyed_default_rng, keyed_generator
from lit_knn.schedules import log_normal_sigmas
from lit_knn.theory.noise import forward_noise
from lit_knn.theory.warp import flip
from lit_knn.training.augmentation import Augmented, GeometricAugmentation
from lit_knn.training.base import (
    AUGMENTATION_STREAM,
    DROPOUT_STREAM,
    TRAIN_STREAM,
    EstimatorTraining,
    check_positive,
    checked_grid,
)
from lit_knn.training.conditioning import Conditioning
from lit_knn.training.plug_ins import check_net

# Early in training EDM limits the half-life of the average to this share of the images seen.
AVERAGE_RAMP_UP = 0.05


class LitEDM(EstimatorTraining):
    """Denoising: D(z, σ) is fitted to `estimator.posterior_mean(z, σ, x_source)`. Defaults are EDM's for CIFAR-10.

    With `OneSample` this is plain denoising score matching, Eq. 6 (eq:DSM). A better estimate of E[x|z,σ] has the same
    minimiser (eq:DSM_expanded) and less noise in its gradients.

    The network gets the augmentation of an item as labels. So the target is the posterior mean over a reference set
    with the same augmentation:

    - Flipped items: z is mirrored, and its posterior mean is mirrored back. This is exact, because a flip only
      permutes pixels.
    - Warped items: `Estimator.warped_mean` resamples each gathered image, n for each item. With EDM's p = 0.12 these
      are 1 − 0.88⁴ = 40 % of the items; `train/augmented` logs the fraction.

    The loss is EDM's: the sum over pixels, averaged over items. With the mean over pixels, many gradients would be
    below Adam's ε = 1e-8. The logged loss is the mean over pixels.

    Args:
        net: any module `net(z_scaled, noise_label, class_label=None, augment_label=None)`; `augment_label` is given
            only with `augmentation`, and the net's `augment_dim` must fit its labels.
        estimator: score estimator; `setup` binds it to the data module's reference set.
        augmentation: `lit_knn.training.augmentation.GeometricAugmentation`, or null for none.
        warped: target of warped items: `posterior`, the mean over the warped reference set, or `source`, the item
            itself, as with `OneSample`.
        class_conditional: give the net and the estimator class labels, so that the target is the mean over the images
            of the item's class; the net's `num_classes` must fit the data.
        lr: learning rate of Adam.
        lr_ramp_up_images: images over which the learning rate grows linearly to `lr`; 0 for none.
        ema_half_life_images: half-life of the averaged weights.
        P_mean: mean of ln σ.
        P_std: standard deviation of ln σ.
        sigma_data: standard deviation of the data.
        sigma_min: smallest noise level of the sampler.
        sigma_max: largest noise level of the sampler.
        rho: exponent of the sampler's grid.
        sampling_steps: steps of the Heun sampler, for pictures and `predict`.
        sampling_class: class to sample from a class-conditional net; null draws one for each seed.
        measure_target: at validation, log `val/target_mse`: the squared error per dimension of the target, against
            the exact posterior mean. This costs one call of `ExactFloat64` per batch.
        seed: first part of the key of every random draw.

    Raises:
        InputError: an option is out of its range; at `setup`, the data has no reference set or does not fit the net.
    """

    def __init__(
        self,
        net: nn.Module,
        estimator: Estimator,
        augmentation: GeometricAugmentation | None = None,
        warped: Literal["posterior", "source"] = "posterior",
        class_conditional: bool = False,
        lr: float = 1e-3,
        lr_ramp_up_images: int = 10_000_000,
        ema_half_life_images: int = 500_000,
        P_mean: float = -1.2,
        P_std: float = 1.2,
        sigma_data: float = 0.5,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = 7.0,
        sampling_steps: int = 18,
        sampling_class: int | None = None,
        measure_target: bool = True,
        seed: int = 0,
    ) -> None:
        conditioning = Conditioning("LitEDM", net, class_conditional, sampling_class)
        super().__init__(estimator, checked_grid("LitEDM", sigma_min, sigma_max, rho), conditioning)
        self.save_hyperparameters(ignore=["net", "estimator", "augmentation"])
        self.denoiser = EDMPrecond(net, sigma_data)
        self.augmentation = augmentation
        check_net("LitEDM", net, "class_label", *(() if augmentation is None else ("augment_label",)))
        check_positive(
            "LitEDM", lr=lr, P_std=P_std, sigma_data=sigma_data, ema_half_life_images=ema_half_life_images,
            sampling_steps=sampling_steps,
        )  # fmt: skip
        with prefixed("LitEDM"):
            self.grid.descending(sampling_steps)
        if lr_ramp_up_images < 0:
            raise InputError(f"LitEDM: lr_ramp_up_images must be at least 0, got {lr_ramp_up_images}")
        if warped not in ("posterior", "source"):
            raise InputError(f"LitEDM: warped={warped!r} must be posterior or source")
        if augmentation is not None and warped == "posterior" and not estimator.can_warp:
            raise InputError(
                f"LitEDM: {type(estimator).__name__} cannot estimate the posterior of warped images: set warped to "
                "source, whose target is the item itself, or augmentation to null"
            )
        given, taken = getattr(augmentation, "label_dim", 0), getattr(net, "augment_dim", 0)
        if given != taken:
            raise InputError(
                f"LitEDM: augmentation={type(augmentation).__name__} gives {given} labels, but the net has "
                f"augment_dim={taken}"
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use Adam, as EDM does."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.999), eps=1e-8)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rate. It grows linearly with the images seen, including this step's, so it is never 0."""
        ramp = self.hparams.lr_ramp_up_images
        for group in optimizer.param_groups:
            group["lr"] = self.hparams.lr * (min(self.images_seen / ramp, 1.0) if ramp else 1.0)

    def average_decay(self) -> float:
        """EDM's decay; the half-life is `ema_half_life_images` or 5 % of the images seen, whichever is less."""
        half_life = min(self.hparams.ema_half_life_images, AVERAGE_RAMP_UP * self.images_seen)
        return 0.5 ** (self.images_of_step / max(half_life, 1e-8))

    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        """Evaluate the denoiser."""
        return self.denoiser(z, t)

    def losses(self, x: Tensor, class_label: Tensor | None, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Compute λ(σ)·‖D(z, σ) − μ̂‖²/d of each item, (B,), and σ, (B,) float64; λ = (σ² + σ_data²)/(σ·σ_data)²."""
        h = self.hparams
        generator = keyed_generator(x.device, *key)
        sigma = log_normal_sigmas(len(x), h.P_mean, h.P_std, generator=generator, device=x.device)
        augmented = None
        if self.augmentation is not None and key[-1] == TRAIN_STREAM:
            # With draws of the CPU, a GPU run knows which items are warped without waiting.
            on_cpu = x.device.type == "cpu"
            augmented = self.augmentation(x, generator if on_cpu else keyed_generator("cpu", *key, AUGMENTATION_STREAM))
            self.log("train/augmented", augmented.warped.float().mean())
        clean = x if augmented is None else augmented.images
        z = forward_noise(clean, sigma, torch.randn(x.shape, device=x.device, generator=generator))
        target = self.target(z, sigma, x, class_label, augmented, generator)
        if self.trainer.validating and h.measure_target:
            self._log_target_error(z, sigma, class_label, target)
        with keyed_default_rng(x.device, *key, DROPOUT_STREAM):
            augment_label = None if augmented is None else augmented.labels
            denoised = self.denoiser(z, sigma, class_label, augment_label)
        weight = (sigma.square() + h.sigma_data**2) / (sigma * h.sigma_data).square()
        return weight.float() * (denoised - target).square().flatten(1).mean(1), sigma

    def objective(self, loss: Tensor, x: Tensor) -> Tensor:
        """Return EDM's loss: the sum over pixels, then the mean over items."""
        return loss.mean() * x[0].numel()

    def target(
        self,
        z: Tensor,
        sigma: Tensor,
        x: Tensor,
        class_label: Tensor | None,
        augmented: Augmented | None,
        generator: torch.Generator,
    ) -> Tensor:
        """Return each item's posterior mean over the reference set, augmented like the item. `x` is not augmented."""
        if augmented is None:
            return self.posterior_mean(x, class_label, generator)(z, sigma)
        target = augmented.images
        # Both estimates run even for zero items, because a sharded reference set needs all ranks in each call.
        plain, rows = (moved(each.nonzero()[:, 0], z.device) for each in (~augmented.warped, augmented.warped))
        flips, labels = augmented.warp.flips[plain], None if class_label is None else class_label[plain]
        mean = self.posterior_mean(x[plain], labels, generator)(flip(z[plain], flips), sigma[plain])
        target = target.index_copy(0, plain, flip(mean, flips))
        if self.hparams.warped == "source":
            return target
        labels = None if class_label is None else class_label[rows]
        with self.monitor.estimator_watch.measure():
            mean = self.estimator.warped_mean(
                z[rows], sigma[rows], augmented.warp.rows(rows), x[rows], generator, labels
            )
        return target.index_copy(0, rows, mean)

    def _log_target_error(self, z: Tensor, sigma: Tensor, class_label: Tensor | None, target: Tensor) -> None:
        reference = self.data_reference()
        if reference is not None:
            exact = ExactFloat64() if class_label is None else ByClass(ExactFloat64())
            mu = exact.bind(reference).posterior_mean(z, sigma, labels=class_label)
            self.log("val/target_mse", (target - mu).square().mean(), batch_size=len(z), sync_dist=True)

    def generative_model(self) -> DiffusionModel:
        """See `EstimatorTraining.generative_model`."""
        h = self.hparams
        return DiffusionModel(self.denoiser, self.known_image_shape(), self.grid, h.sampling_steps, h.sampling_class)

    def interval_metrics(self) -> dict[str, float]:
        """Return the decay of the averaged weights, for the log."""
        return {"train/ema_decay": self.average_decay()}
