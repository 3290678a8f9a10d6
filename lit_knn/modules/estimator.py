"""A module with an estimator in place of a trained model: `validate` measures estimators, `predict` draws samples."""

from collections.abc import Sequence
from functools import partial

import pytorch_lightning as pl
import torch
from torch import Tensor

from lit_knn.common.errors import InputError, check_at_least, check_is, prefixed
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.model_checks import check_device
from lit_knn.runs.run import data_reference
from lit_knn.sampling.diffusion_model import check_process
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.samplers import heun_sampler, seeded_noise
from lit_knn.theory.noise import EDM_PROCESS, Process


class LitEstimator(pl.LightningModule):
    """A module without training: in `validate` the callbacks measure estimators, without a checkpoint.

    Args:
        estimator: posterior mean for the sampler, used by `predict` and by callbacks that sample: a trained `Network`
            or any other estimator (an average over the data set reproduces its images); null if nothing samples.
        sigma_min: smallest noise level of the sampler.
        sigma_max: largest noise level of the sampler.
        rho: exponent of the sampler's grid.
        sampling_steps: steps of the Heun sampler.
        sampling_class: class to sample from a `Network` with classes, by name or else by number;
            null draws one for each seed.
        process: noise process whose probability flow `predict` integrates; see `LitEDM`.
        seed: first part of the key of every random draw.
    """

    needs_checkpoint = False
    """False: there is nothing to `fit`, and `validate` and `predict` need no checkpoint."""

    def __init__(
        self,
        estimator: Estimator | None = None,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = 7.0,
        sampling_steps: int = 18,
        sampling_class: str | None = None,
        process: Process | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["estimator", "process"])
        with prefixed("LitEstimator"):
            check_at_least(1, sampling_steps=sampling_steps)
            self.grid = NoiseGrid(sigma_min, sigma_max, rho)
            self.process = EDM_PROCESS if process is None else process
            check_process(self.process, self.grid)
            if estimator is not None:
                check_is(Estimator, estimator, "estimator")
                estimator.check_lies_within(*self.grid.noise_range())
            self.estimator = estimator
            knows_classes = estimator is not None and estimator.num_classes > 0
            self.conditioning = Conditioning(estimator, knows_classes, sampling_class)

        self.sampling_steps = sampling_steps
        self.seed = seed
        self.step = 0
        self.images_seen = 0

    @property
    def estimators(self) -> dict[str, Estimator]:
        """The estimator, if any, by the name of its option."""
        return {} if self.estimator is None else {"estimator": self.estimator}

    def setup(self, stage: str) -> None:
        """Bind the estimator, if any, to the data module's reference set, on the device of the run."""
        check_device(self.trainer.strategy.root_device)
        reference = data_reference(self.trainer)
        reference.to(self.trainer.strategy.root_device)
        if self.estimator is not None and self.estimator.needs_reference:
            self.estimator.bind(reference)

    def validation_step(self, batch: object, batch_idx: int) -> None:
        """Do nothing, because the callbacks measure."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Draw samples for a batch of seeds (B,)."""
        return self.sample(batch)

    @torch.no_grad()
    def sample(self, seeds: Sequence[int] | Tensor, num_steps: int | None = None) -> Tensor:
        """Draw one image per seed with EDM's deterministic Heun sampler: (B, *shape), by default in `sampling_steps`.

        With a random estimator an image also depends on the estimator's draws, and so on the batch.
        """
        if self.estimator is None:
            raise InputError("LitEstimator: estimator is null, so there is nothing to sample with")

        seeds = torch.as_tensor(seeds)
        generator = keyed_generator(self.device, self.seed, *seeds[:1].tolist(), Stream.SAMPLING)
        labels = self.conditioning.of_samples(seeds, self.device)
        mean = partial(self.estimator.posterior_mean, generator=generator, labels=labels)

        noise = seeded_noise(seeds, data_reference(self.trainer).shape, device=self.device)
        steps = self.sampling_steps if num_steps is None else num_steps
        return heun_sampler(mean, noise, steps, self.grid, process=self.process)
