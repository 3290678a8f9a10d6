"""Continuous-time consistency training (sCT, arXiv 2410.11081) with the probability flow of any estimator."""

from collections.abc import Sequence
from os import PathLike

import torch
from torch import Tensor, nn

from lit_knn.common.errors import check_at_least, check_not_negative, prefixed
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.modules.adaptive_weight import AdaptiveWeight
from lit_knn.modules.conditioning import Conditioning, labels_on
from lit_knn.modules.consistency_module import ConsistencyModule, check_start_is_trained
from lit_knn.modules.shared_dropout import SharedDropout
from lit_knn.modules.start import started_network
from lit_knn.nets.base import labels_for
from lit_knn.nets.trig_flow import TrigFlow
from lit_knn.sampling.noise_grid import EDM_GRID, NoiseGrid
from lit_knn.sampling.schedules import truncated_log_normal_sigmas
from lit_knn.theory.noise import forward_noise, per_item


class LitSCT(ConsistencyModule):
    """Continuous-time consistency models (sCM, Lu & Song 2024), trained without discretisation and without a teacher.

    A consistency function f keeps its value along the probability flow. The loss moves the network F by g =
    cos(t)·df/dt, a forward derivative along the flow (`lit_knn.nets.trig_flow.TrigFlow.tangent`), whose velocity is
    cos(t)·E[ε|x_t] − sin(t)·E[x|x_t]. Distillation (sCD) takes it from a trained teacher, and training (sCT) from the
    one sample that x_t was made of, which is `OneSample` here. With `Exact` and `KNN` this is sCD without a teacher.

    The gradient is that of their Eq. 8, exp(w)/d·‖F − F⁻ − g/(‖g‖ + c)‖² − w, whose prior weight 1/(σ_d·tan t) is
    part of g. The logged loss is ‖g‖²/d: how far f is from a consistency function. With `OneSample` it also contains
    the variance of g. Because of the norm of g the optimum depends on the variance, too.

    Defaults are the paper's for CIFAR-10 (Appendix G.2): RAdam with β = (0.9, 0.99), 10,000 steps of warm-up, a
    half-life of the average of 0.5 million images at a batch of 512, and two-step sampling through t = 1.1, which is
    σ = 0.982. Differences: the net gets EDM's noise label ln(σ)/4 and has no pixel norm in its embedding
    (docs/few_steps.md), ln σ is cut at 0.002 and `sigma_max`, and net and derivative share one dropout mask. NVIDIA's
    FastGen trains up to a sigma_max of 800, and divides the norm by √d, which is c = 0.1·√d here.

    Args:
        estimator: score estimator; `setup` binds it to the data module's reference set.
        start: a trained diffusion or consistency model to start from; see `LitECT`. Null starts from `net` as it is.
        net: any module `net(z_scaled, noise_label, class_label=None)`; null builds the architecture of `start`.
        class_conditional: give the net and the estimator class labels, so that an item follows the probability flow of
            its class; the net's `num_classes` must fit the data.
        lr: learning rate of RAdam.
        ema_decay: decay of the averaged weights; validation, sampling and checkpoints use these weights.
        tangent_warmup_steps: steps over which the part of g with dF/dt grows from 0, which is denoising, to its full
            size; 0 for none.
        tangent_floor: c of the normalisation g/(‖g‖ + c); null for g itself.
        adaptive_weight: learn the weight exp(w) of each noise level; false for w = 0.
        P_mean: mean of ln σ.
        P_std: standard deviation of ln σ.
        sigma_data: standard deviation of the data; that of `start`.
        sigma_max: largest noise level of training.
        sampling_sigmas: noise levels of multi-step sampling; an m-step sample uses the first m.
        predict_steps: sampling steps of `predict`.
        sampling_class: class to sample from a class-conditional net, by name or else by number;
            null draws one for each seed.
        seed: first part of the key of every random draw.
    """

    betas = (0.9, 0.99)

    def __init__(
        self,
        estimator: Estimator,
        start: str | PathLike[str] | None = None,
        net: nn.Module | None = None,
        class_conditional: bool = False,
        lr: float = 1e-4,
        ema_decay: float = 0.9993,
        tangent_warmup_steps: int = 10_000,
        tangent_floor: float | None = 0.1,
        adaptive_weight: bool = True,
        P_mean: float = -1.0,
        P_std: float = 1.4,
        sigma_data: float = 0.5,
        sigma_max: float = 80.0,
        sampling_sigmas: Sequence[float] = (80.0, 0.982),
        predict_steps: int = 1,
        sampling_class: str | None = None,
        seed: int = 0,
    ) -> None:
        with prefixed("LitSCT"):
            check_at_least(0, tangent_warmup_steps=tangent_warmup_steps)
            if tangent_floor is not None:
                check_not_negative(tangent_floor=tangent_floor)

            net = started_network(start, net, sigma_data, consistency=True)
            grid = NoiseGrid(EDM_GRID.sigma_min, sigma_max)
            super().__init__(
                net,
                estimator,
                grid,
                Conditioning(net, class_conditional, sampling_class),
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
            check_start_is_trained(sampling_sigmas, grid)
            # Called for the InputError that it raises.
            self.draw_levels(1, torch.Generator())

            # A path object among the options would make a checkpoint that no safe reader opens.
            self.save_hyperparameters(ignore=["net", "estimator", "start"])
            self.tunes = start is not None
            self.tangent_warmup_steps = tangent_warmup_steps
            self.tangent_floor = tangent_floor
            self.adaptive_weight = AdaptiveWeight() if adaptive_weight else None

    def draw_levels(self, size: int, generator: torch.Generator) -> Tensor:
        """Draw noise levels σ, (size,) float64, on the generator's device."""
        low, high = self.grid.noise_range()
        return truncated_log_normal_sigmas(size, self.P_mean, self.P_std, low, high, generator)

    def tangent_share(self) -> float:
        """Return the share of the tangent's part with dF/dt at the current step of training, from 0 to 1."""
        if self.step >= self.tangent_warmup_steps:
            return 1.0
        return self.step / self.tangent_warmup_steps

    def losses(
        self, x: Tensor, class_label: Tensor | None, key: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Compute `item_losses` at drawn levels, (B,), and the levels σ, (B,) float64; validation has no warm-up."""
        generator = keyed_generator(x.device, *key)
        sigma = self.draw_levels(len(x), generator)
        noise = torch.randn(x.shape, device=x.device, generator=generator)
        z = forward_noise(x, sigma, noise)
        mean = self.posterior_mean(x, class_label, generator)(z, sigma)

        share = self.tangent_share() if key[-1] == Stream.TRAIN else 1.0
        dropout = SharedDropout(x.device, *key, Stream.DROPOUT, mixed=True)
        labels = labels_on(x.device, class_label)
        return self.item_losses(z, sigma, mean, share, dropout, labels), sigma

    def item_losses(
        self,
        z: Tensor,
        sigma: Tensor,
        mean: Tensor,
        share: float,
        dropout: SharedDropout,
        class_label: Tensor | None = None,
    ) -> Tensor:
        """Return losses (B,) with the value ‖g‖²/d and the gradient of Eq. 8 of arXiv 2410.11081.

        Args:
            z: (B, *shape), latents of the EDM process.
            sigma: (B,) float64, their noise levels.
            mean: (B, *shape), the estimated posterior mean E[x|z].
            share: share of the tangent's part with dF/dt.
            dropout: the mask of both passes.
            class_label: (B,) int64, or None.
        """

        def output(x_scaled: Tensor, noise_label: Tensor) -> Tensor:
            labels = labels_for(self.network, class_label, x_scaled)
            return -self.network(x_scaled, noise_label, labels)

        latents = TrigFlow.of(z, sigma, self.sigma_data)
        with dropout.masks():
            student = latents.evaluate(output)
        with dropout.masks():
            tangent = latents.tangent(output, mean, share)

        published = self.published_losses(student, tangent, sigma)
        value = tangent.square().flatten(1).mean(1)
        return published + (value - published).detach()

    def published_losses(self, student: Tensor, tangent: Tensor, sigma: Tensor) -> Tensor:
        """Return exp(w)/d·‖F − F⁻ − g/(‖g‖ + c)‖² − w for each item, (B,); F⁻ is F without gradient.

        Args:
            student: (B, *shape), F.
            tangent: (B, *shape), g, without gradient.
            sigma: (B,), noise levels.
        """
        if self.tangent_floor is not None:
            norm = torch.linalg.vector_norm(tangent.flatten(1), dim=1)
            tangent = tangent / per_item(norm + self.tangent_floor, tangent)

        loss = (student - student.detach() - tangent).square().flatten(1).mean(1)
        if self.adaptive_weight is None:
            return loss
        weight = self.adaptive_weight(sigma)
        return weight.exp() * loss - weight

    def interval_metrics(self) -> dict[str, float]:
        """Return the share of the tangent's part with dF/dt, for the log."""
        return {"train/tangent_share": self.tangent_share()}
