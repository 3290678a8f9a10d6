"""EDM diffusion models (Karras et al. 2022) trained towards the posterior mean of any estimator: Table 2."""

from typing import Literal

import torch
from torch import Tensor, nn

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import check_at_least, check_positive, prefixed
from lit_knn.estimators import Estimator
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.data_scale import warn_of_sigma_data
from lit_knn.modules.model_checks import check_preconditioning
from lit_knn.modules.regression import PosteriorRegression
from lit_knn.nets.precond import EDMPrecond
from lit_knn.reference import ReferenceSet
from lit_knn.sampling import DiffusionModel
from lit_knn.sampling.diffusion_model import check_process
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.schedules import edm_weight, log_normal_sigmas
from lit_knn.theory.noise import EDM_PROCESS, Process


class LitEDM(PosteriorRegression):
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
        augmentation: `lit_knn.modules.augmentation.GeometricAugmentation`, or null for none.
        warped: target of warped items: `posterior`, the mean over the warped reference set, or `source`, the item
            itself, as with `OneSample`.
        class_conditional: give the net and the estimator class labels, so that the target is the mean over the images
            of the item's class; the net's `num_classes` must fit the data.
        label_dropout: probability of training an item without its class, for `guidance`; its target is then the mean
            over all images. EDM's networks have an option of this name, whose target stays the mean over the class.
        lr: learning rate of Adam.
        lr_ramp_up_images: images over which the learning rate grows linearly to `lr`; 0 for none. The current batch
            counts.
        ema_half_life_images: half-life of the averaged weights; early on, 5 % of the images seen, which include the
            current batch.
        P_mean: mean of ln σ.
        P_std: standard deviation of ln σ.
        sigma_data: standard deviation of the data.
        sigma_min: smallest noise level of the sampler.
        sigma_max: largest noise level of the sampler.
        rho: exponent of the sampler's grid.
        sampling_steps: steps of the Heun sampler, for pictures and `predict`.
        sampling_class: class to sample from a class-conditional net, by name or else by number;
            null draws one for each seed.
        guidance: weight w of classifier-free guidance in sampling, see `lit_knn.sampling.guidance.guided`. 1 is the
            class-conditional model, 0 the unconditional one; others than 1 need `label_dropout`.
        process: noise process whose probability flow the sampler integrates: `lit_knn.theory.noise.EDM`, `VP` or
            `LinearInterpolant`; null for EDM's. The network is the same, because every process divided by its scale is
            EDM's (ap:general_diffusion).
        measure_target: at validation, log `val/target_mse`: the squared error per dimension of the target, against
            the exact posterior mean. This costs one call of `Exact` per batch.
        seed: first part of the key of every random draw.
    """

    untrained_options = (*PosteriorRegression.untrained_options, "guidance")

    def __init__(
        self,
        net: nn.Module,
        estimator: Estimator,
        augmentation: GeometricAugmentation | None = None,
        warped: Literal["posterior", "source"] = "posterior",
        class_conditional: bool = False,
        label_dropout: float = 0.0,
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
        sampling_class: str | None = None,
        guidance: float = 1.0,
        process: Process | None = None,
        measure_target: bool = True,
        seed: int = 0,
    ) -> None:
        with prefixed("LitEDM"):
            conditioning = Conditioning(net, class_conditional, sampling_class, label_dropout)
            conditioning.check_guidance(guidance)

            grid = NoiseGrid(sigma_min, sigma_max, rho)
            process = EDM_PROCESS if process is None else process
            check_process(process, grid)

            check_positive(P_std=P_std, sigma_data=sigma_data)
            check_at_least(1, sampling_steps=sampling_steps)
            super().__init__(
                net,
                estimator,
                level_range=grid,
                conditioning=conditioning,
                augmentation=augmentation,
                warped=warped,
                lr=lr,
                lr_ramp_up_images=lr_ramp_up_images,
                ema_half_life_images=ema_half_life_images,
                measure_target=measure_target,
                seed=seed,
            )

        self.save_hyperparameters(ignore=["net", "estimator", "augmentation", "process"])
        self.denoiser = EDMPrecond(net, sigma_data)
        self.grid = grid
        self.sigma_data = sigma_data
        self.P_mean = P_mean
        self.P_std = P_std
        self.sampling_steps = sampling_steps
        self.sampling_process = process
        self.guidance = guidance

    @property
    def network(self) -> nn.Module:
        """The network inside the denoiser."""
        return self.denoiser.model

    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        """Evaluate the denoiser."""
        return self.denoiser(z, t)

    def draw_times(self, size: int, generator: torch.Generator) -> Tensor:
        """Draw the noise levels: ln σ ~ N(P_mean, P_std²)."""
        return log_normal_sigmas(size, self.P_mean, self.P_std, generator)

    def item_losses(
        self,
        z: Tensor,
        t: Tensor,
        target: Tensor,
        class_label: Tensor | None,
        augment_label: Tensor | None,
    ) -> Tensor:
        """Compute λ(σ)·‖D(z, σ) − μ̂‖²/d of each item, (B,), with EDM's λ = (σ² + σ_data²)/(σ·σ_data)²."""
        denoised = self.denoiser(z, t, class_label, augment_label)
        weight = edm_weight(t, self.sigma_data).float()
        return weight * (denoised - target).square().flatten(1).mean(1)

    def objective(self, loss: Tensor, x: Tensor) -> Tensor:
        """Return EDM's loss: the sum over pixels, then the mean over items."""
        return loss.mean() * x[0].numel()

    def check_checkpoint(self, checkpoint: Content) -> None:
        """Check the architecture, and also that the checkpoint has the same preconditioning."""
        super().check_checkpoint(checkpoint)
        check_preconditioning(
            "LitEDM", checkpoint.get("hyper_parameters", {}), sigma_data=self.denoiser.sigma_data
        )

    def check_scale(self, reference: ReferenceSet) -> None:
        """Warn if the data's standard deviation is far from `sigma_data`."""
        warn_of_sigma_data(reference, self.sigma_data)

    def generative_model(self) -> DiffusionModel:
        return DiffusionModel(
            self.denoiser,
            self.known_image_shape(),
            grid=self.grid,
            num_steps=self.sampling_steps,
            sampling_class=self.conditioning.chosen_class(),
            process=self.sampling_process,
            guidance=self.guidance,
            drops_labels=self.conditioning.drops_labels,
        )
