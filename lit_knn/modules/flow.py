"""Flow matching (Lipman et al. 2022) trained towards the velocity of any estimator."""

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError, check_at_least, prefixed
from lit_knn.estimators import Estimator
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.data_scale import warn_of_scale
from lit_knn.modules.regression import PosteriorRegression
from lit_knn.modules.time_distributions import TimeDistribution, UniformTimes
from lit_knn.nets.flow import OUTPUTS, FlowNetwork, VelocityOutput
from lit_knn.reference import ReferenceSet
from lit_knn.sampling import FlowModel
from lit_knn.sampling.flow_model import check_flow_process
from lit_knn.sampling.flow_times import FixedSteps
from lit_knn.theory.noise import LINEAR_PROCESS, LinearInterpolant, Process, per_item

# Key of a checkpoint that holds the description of what the network puts out.
FLOW_KEY = "flow"


class LitFlow(PosteriorRegression):
    """Flow matching: v(z, τ) is fitted to (z − μ̂)/τ, the velocity E[ε − x | z] of the path z = (1 − τ)x + τε.

    Another `process` has another velocity.

    μ̂ is the estimator's posterior mean at z/(1 − τ) and noise level σ = τ/(1 − τ). With `OneSample` this is plain
    conditional flow matching (arXiv 2210.02747), whose target is ε − x. With `STF` and `Exact` it is the empirical and
    the closed-form flow matching of arXiv 2506.03719. These three have the same minimiser. An estimator with a bias,
    such as `UniformSNIS`, has another one.

    The loss is the squared error of the velocity, averaged over pixels and items, whatever the network puts out.
    `LitEDM` explains the target of augmented items. `TimeDistribution` has the rule for τ → 0 and τ → 1.

    Defaults are those of torchcfm's CIFAR-10 runs (Tong et al. 2023, arXiv 2302.00482; examples/images/cifar10 of
    github.com/atong01/conditional-flow-matching): Adam at 2e-4, 5,000 steps of warm-up and an EMA decay of 0.9999, all
    at a batch of 128.

    Args:
        net: any module `net(z, noise_label, class_label=None, augment_label=None)`; `lit_knn.nets.flow.FlowNetwork` has
            the noise label. `augment_label` is given only with `augmentation`.
        estimator: score estimator; `setup` binds it to the data module's reference set.
        output: what the net puts out, a class of `lit_knn.nets.flow`: `VelocityOutput`, `DataOutput`, or `EDMOutput`,
            EDM's preconditioned denoiser.
        times: distribution of the times of training; `lit_knn.modules.time_distributions`.
        augmentation: as of `LitEDM`.
        warped: as of `LitEDM`.
        class_conditional: give the net and the estimator class labels; the net's `num_classes` must fit the data.
        label_dropout: probability of training an item without its class, for `guidance`, as of `LitEDM`.
        lr: learning rate of Adam.
        lr_ramp_up_images: images over which the learning rate grows linearly to `lr`; 0 for none. The current batch
            counts.
        ema_half_life_images: half-life of the averaged weights; early on, 5 % of the images seen, which include the
            current batch.
        sampler: `lit_knn.sampling.flow_times.FixedSteps`, for pictures and `predict`; null for its Heun steps.
        sampling_steps: steps of the sampler.
        sampling_class: class to sample from a class-conditional net, by name or else by number;
            null draws one for each seed.
        guidance: weight of classifier-free guidance in sampling, as of `LitEDM`.
        process: noise process z = s(τ)(x + σ(τ)ε) with times between 0 and 1: `lit_knn.theory.noise.LinearInterpolant`,
            the straight path, or `VP`; null for the straight path. The velocity of every process is
            (ṡ/s)z + (σ̇/σ)(z − sμ̂), Eq. 4 of Karras et al. 2022 (eq:general_pfode).
        measure_target: as of `LitEDM`.
        seed: first part of the key of every random draw.
    """

    untrained_options = (*PosteriorRegression.untrained_options, "guidance")

    def __init__(
        self,
        net: nn.Module,
        estimator: Estimator,
        output: Callable[[nn.Module], FlowNetwork] = VelocityOutput,
        times: TimeDistribution | None = None,
        augmentation: GeometricAugmentation | None = None,
        warped: Literal["posterior", "source"] = "posterior",
        class_conditional: bool = False,
        label_dropout: float = 0.0,
        lr: float = 2e-4,
        lr_ramp_up_images: int = 640_000,
        ema_half_life_images: int = 887_000,
        sampler: FixedSteps | None = None,
        sampling_steps: int = 50,
        sampling_class: str | None = None,
        guidance: float = 1.0,
        process: Process | None = None,
        measure_target: bool = True,
        seed: int = 0,
    ) -> None:
        with prefixed("LitFlow"):
            conditioning = Conditioning(net, class_conditional, sampling_class, label_dropout)
            conditioning.check_guidance(guidance)

            times = UniformTimes() if times is None else copy.copy(times)
            process = LINEAR_PROCESS if process is None else process
            check_flow_process(process, times)
            times.process = process
            check_at_least(1, sampling_steps=sampling_steps)

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

            objects = ["net", "estimator", "output", "times", "augmentation", "sampler", "process"]
            self.save_hyperparameters(ignore=objects)
            self.flow = _flow_network(output, net, process)

        self.times = times
        self.process = process
        self.sampler = FixedSteps() if sampler is None else sampler
        self.sampling_steps = sampling_steps
        self.guidance = guidance

    @property
    def network(self) -> nn.Module:
        """The network inside the flow network."""
        return self.flow.model

    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        """Evaluate the velocity at noise level t = σ."""
        return self.flow(z, self.process.t_of_sigma(t.double()))

    def draw_times(self, size: int, generator: torch.Generator) -> Tensor:
        """Draw times τ from `times`."""
        return self.times.draw(size, generator)

    def item_losses(
        self,
        z: Tensor,
        t: Tensor,
        target: Tensor,
        class_label: Tensor | None,
        augment_label: Tensor | None,
    ) -> Tensor:
        """Compute ‖v(z, τ) − v̂‖²/d of each item, (B,), where v̂ is (z − μ̂)/τ on the straight path."""
        velocity = self.process.velocity(z, per_item(t, z), target).to(z.dtype)
        return (self.flow(z, t, class_label, augment_label) - velocity).square().flatten(1).mean(1)

    def check_scale(self, reference: ReferenceSet) -> None:
        """Warn if the data's standard deviation is far from the expected: `sigma_data` of `output`, or else 1."""
        expected = getattr(self.flow, "sigma_data", None)
        if expected is None:
            warn_of_scale(reference, 1.0, "a flow expects", "scale the data")
        else:
            warn_of_scale(reference, expected, "sigma_data of output is", "scale the data")

    def generative_model(self) -> FlowModel:
        return FlowModel(
            self.flow,
            self.known_image_shape(),
            times=self.times,
            sampler=self.sampler,
            num_steps=self.sampling_steps,
            sampling_class=self.conditioning.chosen_class(),
            guidance=self.guidance,
            drops_labels=self.conditioning.drops_labels,
        )

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: Content) -> None:
        """Save what every module saves, and also what the network puts out."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[FLOW_KEY] = self.flow.description()

    def check_checkpoint(self, checkpoint: Content) -> None:
        """Check the architecture, and also that the checkpoint's network puts out the same."""
        saved, expected = checkpoint.get(FLOW_KEY), self.flow.description()
        if saved is None:
            raise InputError(
                "the checkpoint is not of LitFlow: it has no parameterisation of a flow"
            )
        if saved != expected:
            problem = f"the checkpoint is of another parameterisation: {saved}"
            raise InputError(f"{problem}, but the model has {expected}")
        super().check_checkpoint(checkpoint)


def _flow_network(
    output: Callable[[nn.Module], FlowNetwork], net: nn.Module, process: Process
) -> FlowNetwork:
    """Make the flow network whose net puts out what `output` says, for the times of a process; see `LitFlow`."""
    flow = output(net)
    if type(flow) not in OUTPUTS.values() and type(process) is not LinearInterpolant:
        raise InputError(f"process={type(process).__name__} needs an output of lit_knn.nets.flow")
    flow.process = process
    return flow
