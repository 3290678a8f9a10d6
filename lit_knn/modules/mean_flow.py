"""MeanFlow (Geng et al. 2025): one-step flows, trained with the velocity of any estimator as target and as tangent."""

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, check_at_least, check_not_negative, prefixed
from lit_knn.common.rng import Stream, keyed_default_rng
from lit_knn.estimators import Estimator
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.data_scale import warn_of_scale
from lit_knn.modules.mean_flow_error import (
    LabelledFlow,
    average_velocity_error,
    guidance_of_velocities,
)
from lit_knn.modules.regression import PosteriorRegression
from lit_knn.modules.shared_dropout import SharedDropout
from lit_knn.modules.time_distributions import LogitNormalTimes, TimeDistribution
from lit_knn.modules.time_pairs import TimePairs
from lit_knn.nets.average_velocity import GAP_FEATURES, AverageVelocity
from lit_knn.reference import ReferenceSet
from lit_knn.sampling import MeanFlowModel
from lit_knn.theory.noise import LINEAR_PROCESS, per_item

# c of the adaptive weight (arXiv 2505.13447, Section 4.3).
WEIGHT_FLOOR = 1e-3


class LitMeanFlow(PosteriorRegression):
    """MeanFlow (arXiv 2505.13447): fits u(z, r, t), the average velocity from r to t, to v̂ − (t − r)·du/dt.

    v̂ = (z − μ̂)/t is the velocity of z = (1 − t)x + tε, with the estimator's posterior mean μ̂. The derivative along the
    flow, du/dt = ∂u/∂z·v̂' + ∂u/∂t, needs a velocity, too: that of `tangent`. MeanFlow puts ε − x, the velocity of one
    sample, into both places (`OneSample`). Improved mean flows (arXiv 2512.02012) put the network's velocity u(z, t, t)
    into the tangent (`network`). The identity holds for the marginal velocity E[ε − x | z], which `Exact` computes.
    `OneSample` and `Exact` leave E[Δ], the mean of Δ = u − û, unbiased, in both places; self-normalised weights and the
    network's velocity do not.

    Each item's squared error ‖Δ‖² is weighted by 1/(‖Δ‖² + 1e-3)^power. With a power above 0 the optimum depends on
    the noise of Δ (docs/meanflow.md). The logged loss is ‖Δ‖²/d without the weight.

    Defaults are the paper's for CIFAR-10: Adam at 6e-4, 10,000 steps of warm-up and an EMA decay of 0.99995 at a batch
    of 1,024, logit-normal times (−2, 2), r ≠ t for 75 % of the items, and a power of 0.75.

    Args:
        net: any module `net(z, noise_label, class_label=None, augment_label=None)` with `augment_dim` = 8, or 17 with
            `augmentation`; see `lit_knn.nets.average_velocity.AverageVelocity`.
        estimator: estimator of the target's velocity; `setup` binds it to the data module's reference set.
        tangent: estimator of the tangent's velocity; null for the same estimate as the target's, and `network` for the
            network's velocity.
        times: distribution of t, and of r without `lower_times`; the larger of two draws is t.
        lower_times: distribution of r; then t is one draw from `times`, and an r above its t becomes t. With (−0.6,
            1.6) and (−4, 1.6) this is the authors' later recipe for CIFAR-10.
        different: share of the items with r < t; the others have r = t, which is flow matching.
        power: power of the adaptive weight; 0 for the plain squared error.
        separate_tangent_pass: compute du/dt in a pass without gradient, in float32, apart from u. The gradient is the
            same up to rounding. Measured on a CPU: 0.3 to 0.5 of the peak memory, at 7 to 16 % more time. Null is true
            on GPUs, where memory limits the batch, and false on CPUs.
        augmentation: as of `LitEDM`.
        warped: as of `LitEDM`.
        class_conditional: give the net and the estimators class labels; the net's `num_classes` must fit the data.
        label_dropout: probability of training an item without its class, for `guidance`.
        lr: learning rate of Adam.
        lr_ramp_up_images: images over which the learning rate grows linearly to `lr`; 0 for none.
        ema_half_life_images: half-life of the averaged weights; early on, 5 % of the images seen.
        sampling_steps: steps of the sampler, for pictures and `predict`.
        sampling_class: class to sample from a class-conditional net, by name or else by number;
            null draws one for each seed.
        guidance: weight ω of classifier-free guidance, which is part of the training: the velocities become
            ω·v̂ + kappa·u(z, t, t; class) + (1 − ω − kappa)·u(z, t, t; none). Sampling then needs one evaluation a step.
            An effective weight other than 1 needs `label_dropout`.
        kappa: see `guidance`. The effective weight is guidance/(1 − kappa).
        measure_target: as of `LitEDM`.
        seed: first part of the key of every random draw.
    """

    process = LINEAR_PROCESS
    time_labels = GAP_FEATURES

    def __init__(
        self,
        net: nn.Module,
        estimator: Estimator,
        tangent: Estimator | Literal["network"] | None = None,
        times: TimeDistribution | None = None,
        lower_times: TimeDistribution | None = None,
        different: float = 0.75,
        power: float = 0.75,
        separate_tangent_pass: bool | None = None,
        augmentation: GeometricAugmentation | None = None,
        warped: Literal["posterior", "source"] = "posterior",
        class_conditional: bool = False,
        label_dropout: float = 0.0,
        lr: float = 6e-4,
        lr_ramp_up_images: int = 10_240_000,
        ema_half_life_images: int = 14_200_000,
        sampling_steps: int = 1,
        sampling_class: str | None = None,
        guidance: float = 1.0,
        kappa: float = 0.0,
        measure_target: bool = True,
        seed: int = 0,
    ) -> None:
        with prefixed("LitMeanFlow"):
            conditioning = Conditioning(net, class_conditional, sampling_class, label_dropout)
            check_at_least(1, sampling_steps=sampling_steps)
            check_not_negative(power=power)
            if not 0 <= kappa < 1:
                raise InputError(f"kappa must be at least 0 and below 1, got {kappa}")

            times = LogitNormalTimes(-2.0, 2.0) if times is None else copy.copy(times)
            pairs = TimePairs(times, lower_times, different)
            super().__init__(
                net,
                estimator,
                level_range=times,
                conditioning=conditioning,
                augmentation=augmentation,
                warped=warped,
                lr=lr,
                lr_ramp_up_images=lr_ramp_up_images,
                ema_half_life_images=ema_half_life_images,
                measure_target=measure_target,
                seed=seed,
            )
            objects = ["net", "estimator", "tangent", "times", "lower_times", "augmentation"]
            self.save_hyperparameters(ignore=objects)
            self.tangent = tangent
            if isinstance(tangent, Estimator):
                self.tangent = conditioning.estimator_for(tangent, times)
                self.check_can_warp("tangent", tangent)

            # Dropout inside the net is no use here: it would drop other labels in each of a step's evaluations.
            conditioning.drops_labels = label_dropout > 0
            # Rounded, so that the effective weight of options such as 0.7 and 0.3 is exactly 1, which needs no dropout.
            conditioning.check_guidance(round(guidance / (1 - kappa), 9))

        self.flow = AverageVelocity(net)
        self.pairs = pairs
        self.power = power
        self.separate_tangent_pass = separate_tangent_pass
        self.sampling_steps = sampling_steps
        self.guidance = guidance
        self.kappa = kappa

    @property
    def estimators(self) -> dict[str, Estimator]:
        estimators = super().estimators
        if isinstance(self.tangent, Estimator):
            estimators["tangent"] = self.tangent
        return estimators

    @property
    def network(self) -> nn.Module:
        """The network inside the average velocity."""
        return self.flow.model

    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        """Evaluate the velocity u(z, τ, τ) at noise level t = σ."""
        return self.flow(z, self.process.t_of_sigma(t.double()))

    def draw_times(self, size: int, generator: torch.Generator) -> Tensor:
        return self.pairs.draw_upper(size, generator)

    def has_two_passes(self) -> bool:
        """Return whether the derivative is computed apart from u; see `separate_tangent_pass`."""
        if self.separate_tangent_pass is None:
            return self.device.type == "cuda"
        return self.separate_tangent_pass

    def losses(
        self, x: Tensor, class_label: Tensor | None, key: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Compute ‖u − û‖²/d of each item, (B,), and t, (B,) float64."""
        items = self.items(x, class_label, key)
        r = self.pairs.draw_lower(items.t, items.generator)
        mean = items.mean(self.estimator)
        self.log_target_error(items, mean)
        tangent_mean = self.tangent_mean(mean, items.mean)

        dropout = SharedDropout(x.device, *key, Stream.DROPOUT, mixed=True)
        with keyed_default_rng(x.device, *key, Stream.DROPOUT):
            labelled = LabelledFlow(self.flow, *items.labels)
            errors = self.errors(
                items.z, r, items.t, mean, tangent_mean, labelled=labelled, dropout=dropout
            )
            return errors, items.t

    def tangent_mean(self, mean: Tensor, mean_of: Callable[[Estimator], Tensor]) -> Tensor | None:
        """Return E[x|z] for the tangent's velocity, (B, *shape); None for the network's velocity.

        Args:
            mean: (B, *shape), E[x|z] of the target.
            mean_of: returns an estimator's E[x|z] at the same latents.
        """
        if self.tangent is None:
            return mean
        return mean_of(self.tangent) if isinstance(self.tangent, Estimator) else None

    def errors(
        self,
        z: Tensor,
        r: Tensor,
        t: Tensor,
        mean: Tensor,
        tangent_mean: Tensor | None,
        labelled: LabelledFlow | None = None,
        dropout: SharedDropout | None = None,
    ) -> Tensor:
        """Compute ‖u − û‖²/d of each item, (B,), where the target û = v̂ − (t − r)·du/dt has no gradient.

        Args:
            z: (B, *shape), latents of the straight path.
            r: (B,) float64, at most t.
            t: (B,) float64.
            mean: (B, *shape), E[x|z] for the target.
            tangent_mean: (B, *shape), E[x|z] for the tangent; None for the network's velocity.
            labelled: the average velocity with the items' labels; None for no labels.
            dropout: the mask of u and of its derivative; None draws masks from the default generator.
        """
        if labelled is None:
            labelled = LabelledFlow(self.flow, None, None)
        guided = guidance_of_velocities(labelled, z, t, self.guidance, self.kappa)
        velocity = guided(self.process.velocity(z, per_item(t, z), mean).to(z.dtype))
        if tangent_mean is None:
            # The network has learned the guided velocity.
            tangent = labelled.velocity(z, t)
        else:
            tangent = guided(self.process.velocity(z, per_item(t, z), tangent_mean).to(z.dtype))
        two_passes = self.has_two_passes()
        return average_velocity_error(
            labelled.average, z, r, t, velocity, tangent, dropout, two_passes
        )

    def objective(self, loss: Tensor, x: Tensor) -> Tensor:
        """Weight each item's ‖Δ‖² by 1/(‖Δ‖² + c)^power, without gradient, and take the mean."""
        errors = loss * x[0].numel()
        return (errors / (errors.detach() + WEIGHT_FLOOR) ** self.power).mean()

    def check_scale(self, reference: ReferenceSet) -> None:
        """Warn if the data's standard deviation is far from that of the noise, 1."""
        warn_of_scale(reference, 1.0, "a flow expects", "scale the data")

    def generative_model(self) -> MeanFlowModel:
        return MeanFlowModel(
            self.flow,
            self.known_image_shape(),
            self.sampling_steps,
            self.conditioning.chosen_class(),
        )
