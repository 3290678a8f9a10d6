"""Improved consistency training (iCT) with a plug-in score estimator: Eq. 7 (eq:CM)."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from lit_knn.errors import InputError
from lit_knn.estimators import Estimator
from lit_knn.monitor import TrainingMonitor
from lit_knn.precond import ConsistencyFunction
from lit_knn.process import forward_noise
from lit_knn.rng import keyed_default_rng, keyed_generator
from lit_knn.sampling import consistency_sampler, seeded_noise
from lit_knn.schedules import consistency_weight, ict_num_steps, karras_sigmas, lognormal_step_probs, pseudo_huber
from lit_knn.solvers import heun_step

# What a random stream is for: the last part of its key, so that no two streams coincide.
TRAIN_STREAM, VALIDATION_STREAM, DROPOUT_STREAM = 0, 1, 2


class LitICT(pl.LightningModule):
    """Consistency matching in which any estimator supplies the score. Defaults are the paper's (tab:hyperparams).

    The student is evaluated at (z, t_i), the stop-gradient teacher, the same weights with the same dropout mask,
    at (ẑ, t_{i−1}), where ẑ is one solver step down the PF-ODE from z. Every random draw is a function of (seed,
    rank, batch number), so a resumed run repeats the uninterrupted one.

    Args:
        net: any module `net(z_scaled, noise_label, class_label=None)`.
        estimator: score estimator, bound to the data module's reference set in `setup`.
        solver: `lit_knn.solvers.euler_step` or `lit_knn.solvers.heun_step`.
        lr: learning rate of RAdam.
        ema_decay: decay of the averaged weights, which validation, sampling and checkpoints use.
        total_steps: K of the discretisation schedule N(k); the paper's number of training iterations.
        s0: discretisation intervals at the start.
        s1: discretisation intervals at the end.
        P_mean: mean of ln t in the discretised log-normal p(i).
        P_std: standard deviation of ln t in it.
        sigma_data: standard deviation of the data.
        sigma_min: smallest noise level t_min.
        sigma_max: largest noise level T.
        rho: exponent of the noise-level grid.
        huber_c: c of the pseudo-Huber metric; None for 0.00054·sqrt(d).
        sampling_sigmas: noise levels of multi-step sampling; an m-step sample uses the first m.
        predict_steps: sampling steps of `predict`.
        seed: first part of the key of every random draw.

    Raises:
        InputError: an option out of its range; at `setup`, no data to bind to or a net that does not accept it.
    """

    hparams: Any

    def __init__(
        self,
        net: nn.Module,
        estimator: Estimator,
        solver: Callable = heun_step,
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
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net", "estimator", "solver"])
        self.consistency_function = ConsistencyFunction(net, sigma_data, sigma_min)
        self.estimator = estimator
        self.solver = solver
        self.image_shape: tuple[int, ...] | None = None
        self.images_seen = 0
        self._logged_step = 0
        self._loaded_step = 0
        self._check_options()
        if getattr(net, "num_classes", 0):
            raise InputError(f"LitICT trains unconditional networks, but the net has num_classes={net.num_classes}")

    def _check_options(self) -> None:
        h = self.hparams
        for name in ("lr", "P_std", "sigma_data"):
            if not h[name] > 0:
                raise InputError(f"LitICT: {name} must be above 0, got {h[name]}")
        if h.huber_c is not None and not h.huber_c > 0:
            raise InputError(f"LitICT: huber_c must be above 0, or null for 0.00054·sqrt(d), got {h.huber_c}")
        if not 0 <= h.ema_decay < 1:
            raise InputError(f"LitICT: ema_decay must be in [0, 1), got {h.ema_decay}")
        if not 1 <= h.predict_steps <= len(h.sampling_sigmas):
            raise InputError(
                f"LitICT: predict_steps={h.predict_steps} must be between 1 and the number of sampling_sigmas, "
                f"{len(h.sampling_sigmas)}"
            )
        try:
            ict_num_steps(0, h.total_steps, h.s0, h.s1)
            sigmas = karras_sigmas(h.s0 + 1, h.sigma_min, h.sigma_max, h.rho)
        except ValueError as error:
            raise InputError(f"LitICT: {error}") from error
        if not lognormal_step_probs(sigmas, h.P_mean, h.P_std).isfinite().all():
            raise InputError(f"LitICT: P_mean={h.P_mean}, P_std={h.P_std} leave no noise level any probability")
        levels = [*h.sampling_sigmas, h.sigma_min]
        if any(high <= low for high, low in pairwise(levels)):
            raise InputError(
                f"LitICT: sampling_sigmas={list(h.sampling_sigmas)} must descend and stay above sigma_min={h.sigma_min}"
            )

    # Setting up

    def configure_callbacks(self) -> list[pl.Callback]:
        """Average the weights while training; validation and checkpoints then see the averaged ones."""
        if self.trainer.state.fn != "fit":
            return []
        # The callback is set up before the module moves, so without a device it would average on the CPU.
        return [EMAWeightAveraging(device=self.trainer.strategy.root_device, decay=self.hparams.ema_decay)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """RAdam, as iCT."""
        return torch.optim.RAdam(self.parameters(), lr=self.hparams.lr)

    def setup(self, stage: str) -> None:
        """Bind the estimator to the data module's reference set (on the device of training) and try the net.

        `predict` needs no estimator, so it builds no index.
        """
        device = self.trainer.strategy.root_device
        if device.type == "mps":
            raise InputError("Apple's GPU has no float64, which the estimators need: use --trainer.accelerator cpu")
        self.monitor = TrainingMonitor(self.hparams.sigma_min, self.hparams.sigma_max, device)
        reference = getattr(getattr(self.trainer, "datamodule", None), "reference", None)
        if reference is not None:
            if stage != "predict":
                reference.to(device)
                if self.estimator.needs_reference:
                    self.estimator.bind(reference)
            self._set_image_shape(reference.shape)
        elif stage != "predict" and self.estimator.needs_reference:
            self._set_image_shape(self.estimator.reference.shape)

    def _set_image_shape(self, shape: tuple[int, ...]) -> None:
        self._check_image_shape(shape)
        parameter = next(self.parameters())
        trial = torch.zeros(1, *shape, device=parameter.device)
        try:
            with torch.no_grad(), keyed_default_rng(trial.device, 0):
                output = self.consistency_function(trial, torch.ones(1, device=trial.device))
        except InputError:
            raise
        except (RuntimeError, ValueError) as error:
            raise InputError(f"the net does not accept images of shape {tuple(shape)}: {error}") from error
        if output.shape != trial.shape:
            raise InputError(f"the net maps images of shape {tuple(shape)} to {tuple(output.shape[1:])}")

    def _check_image_shape(self, shape: tuple[int, ...]) -> None:
        """Take the shape of the data, or of a checkpoint, whichever comes first; the other must agree."""
        shape = tuple(shape)
        if self.image_shape not in (None, shape):
            raise InputError(
                f"the images of the checkpoint and of the data differ in shape: {self.image_shape}, {shape}"
            )
        self.image_shape = shape

    # Training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step of Eq. 7 (eq:CM). `batch` is x (B, *shape) or a tuple that starts with it."""
        x = _images_of(batch)
        # Completed batches, unlike started ones, are counted right after an interruption, too.
        batch_number = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed
        loss, t = self._consistency_losses(x, batch_number, TRAIN_STREAM)
        self.images_seen += len(x) * self.trainer.world_size
        self.monitor.update(loss.detach(), t, len(x) * self.trainer.world_size)
        self.log("train/loss", loss.mean(), prog_bar=True)
        self.log("images_seen", float(self.images_seen))
        return loss.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The training loss of the averaged weights, with noise that is the same at every validation."""
        loss, _ = self._consistency_losses(_images_of(batch), batch_idx, VALIDATION_STREAM)
        self.log("val/loss", loss.mean(), batch_size=len(loss), sync_dist=True, prog_bar=True)

    @property
    def step(self) -> int:
        """Optimiser steps taken; outside a fit those of the loaded checkpoint."""
        return max(self.trainer.global_step, self._loaded_step)

    @property
    def num_steps(self) -> int:
        """Grid points N(k) at the current iteration."""
        h = self.hparams
        return ict_num_steps(self.step, h.total_steps, h.s0, h.s1)

    def _consistency_losses(self, x: Tensor, batch_number: int, stream: int) -> tuple[Tensor, Tensor]:
        """λ(t_i)·d(f(z, t_i), f⁻(ẑ, t_{i−1})) of each item, (B,), and t_i, (B,) float64."""
        key = (self.hparams.seed, self.global_rank, batch_number, stream)
        generator = keyed_generator(x.device, *key)
        t, t_prev = self._draw_times(len(x), generator)
        z = forward_noise(x, t, torch.randn(x.shape, device=x.device, generator=generator))

        def posterior_mean(z: Tensor, t: Tensor) -> Tensor:
            with self.monitor.estimator_watch.measure():
                return self.estimator.posterior_mean(z, t, x_source=x, generator=generator)

        z_hat = self.solver(z, t, t_prev, posterior_mean)
        with keyed_default_rng(x.device, *key, DROPOUT_STREAM):
            student = self.consistency_function(z, t)
        with torch.no_grad(), keyed_default_rng(x.device, *key, DROPOUT_STREAM):
            teacher = self.consistency_function(z_hat, t_prev)
        weight = consistency_weight(t, t_prev).float()
        return weight * pseudo_huber(student, teacher, self.hparams.huber_c), t

    def _draw_times(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw t_i and t_{i−1} of `size` items from p(i); (size,) float64 each."""
        h = self.hparams
        sigmas = karras_sigmas(self.num_steps, h.sigma_min, h.sigma_max, h.rho)
        probs = lognormal_step_probs(sigmas, h.P_mean, h.P_std)
        lower = torch.multinomial(probs.to(self.device), size, replacement=True, generator=generator)
        sigmas = sigmas.to(self.device)
        return sigmas[lower + 1], sigmas[lower]

    # Logging

    def on_fit_start(self) -> None:
        """Start the clock."""
        self.monitor.restart()

    def on_validation_end(self) -> None:
        """Keep the time of a validation out of the training throughput."""
        self.monitor.restart()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log averages since the last time, every `log_every_n_steps` optimiser steps."""
        step = self.trainer.global_step
        if step == self._logged_step or step % self.trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self._logged_step = step
        self.log_dict(
            {
                "train/num_steps": float(self.num_steps),
                "train/lr": self.trainer.optimizers[0].param_groups[0]["lr"],
                **self.monitor.read(),
            }
        )

    # Sampling

    @torch.no_grad()
    def sample(self, seeds: Sequence[int] | Tensor, num_steps: int = 1) -> Tensor:
        """Draw one image per seed; image i depends on seeds[i] alone, not on the batch it is drawn in.

        Args:
            seeds: (B,), non-negative integers.
            num_steps: sampling steps, at most the number of `sampling_sigmas`.

        Returns:
            (B, *shape), float32, model space.
        """
        if self.image_shape is None:
            raise InputError("sample: the image shape is not known before setup or a loaded checkpoint")
        sigmas = list(self.hparams.sampling_sigmas)[:num_steps]
        if not 1 <= num_steps == len(sigmas):
            raise InputError(f"sample: num_steps={num_steps}, but there are {len(sigmas)} sampling_sigmas")
        noise = torch.stack([seeded_noise(seeds, self.image_shape, draw, self.device) for draw in range(len(sigmas))])
        return consistency_sampler(self.consistency_function, noise, sigmas, self.hparams.sigma_min)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Samples for a batch of seeds (B,)."""
        return self.sample(batch, self.hparams.predict_steps)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what a resumed run and sampling need beside the weights."""
        checkpoint["images_seen"] = self.images_seen
        checkpoint["image_shape"] = self.image_shape

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another architecture in one line, before anything is loaded."""
        _check_architecture(self.state_dict(), checkpoint.get("state_dict", {}))
        self.images_seen = checkpoint.get("images_seen", 0)
        self._loaded_step = checkpoint.get("global_step", 0)
        if checkpoint.get("image_shape") is not None:
            self._check_image_shape(checkpoint["image_shape"])


def _images_of(batch: Any) -> Tensor:
    return batch if isinstance(batch, Tensor) else batch[0]


def _check_architecture(own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raise InputError at the first parameter that is missing, unexpected or of another shape."""
    for name in [*own, *saved]:
        ours, theirs = (tuple(state[name].shape) if name in state else "absent" for state in (own, saved))
        if ours != theirs:
            raise InputError(
                f"the checkpoint is of another architecture: {name} is {theirs} in the checkpoint, {ours} in the model"
            )
