"""A one-step generator trained from scratch by the difference of two smoothed scores, both from estimators."""

import copy
from os import PathLike

import torch
from torch import Tensor, nn

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError, check_at_least, check_is, prefixed
from lit_knn.common.rng import Stream, keyed_default_rng, keyed_generator
from lit_knn.estimators import Estimator, Exact
from lit_knn.estimators.checks import check_needs_no_source
from lit_knn.estimators.composite import copied_apart
from lit_knn.modules.conditioning import Conditioning, labels_on
from lit_knn.modules.finite_loss import check_samples
from lit_knn.modules.generators import started_generator
from lit_knn.modules.one_step import OneStepTraining
from lit_knn.modules.sample_bank import SampleBank, labels_in_proportion
from lit_knn.reference import ReferenceSet
from lit_knn.runs.run import find_reference
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.score_difference import score_difference, stratified_levels

BANK_KEY = "sample_bank"
"""Key of the bank's samples in a checkpoint."""


class LitScoreDifference(OneStepTraining):
    """Trains a one-step generator x = G(ε) by V = E_data[x|z, t] − E_samples[x|z, t] at z = x + tη.

    The loss is ‖x − sg(x + V)‖², sg without gradient, so that its gradient for x is −2V. With all data and all samples,
    V/t² is minus the gradient of the Kullback-Leibler divergence between the smoothed distributions (Weber 2023, arXiv
    2304.12906). Distribution matching distillation (arXiv 2311.18828) has this loss with two networks in the places of
    the two posterior means: a teacher's, and one that follows the generator. Here `estimator` averages over the data,
    and `repulsion` over the bank, the latest samples of the generator. Neither is trained.

    - Both means are of finite sets, and each prefers images near z. If generator and data have one distribution, V has
      the mean 0 only between sets of equal size, at a z that was made from none of their images. So the bank has
      new samples of the generator, by default without the batch, as many as the data if the step may cost it.
    - With `include_batch` each sample also attracts its own z: where it has most of the posterior, nothing repels,
      and the samples contract.
    - `t_min` decides between copies and new images: below the level at which one image has nearly all of the posterior,
      V pulls each sample onto one image of the data.
    - The data gives only the shape and the labels of a batch.

    The loss that is logged is its value, the mean of V² over pixels, noise included. It does not fall to 0.

    Args:
        net: any module `net(z_scaled, noise_label, class_label=None)`. It gets the weights of `start`; null builds the
            architecture that the file stores.
        estimator: estimator over the data; not one that uses the source of z, because z is made from a sample.
        repulsion: estimator over the bank; null for `Exact`. With `OneSample` the mean of the repulsion's gradient is
            0, and the samples gather at the modes.
        start: a trained model whose one-step samples the generator starts with: an iCT, ECT, MeanFlow or EDM model, as
            `lit_knn.load` reads it. Null for random weights.
        class_conditional: give the net and the estimators class labels; the net's `num_classes` must fit the data.
        bank_size: number of the latest samples, over all ranks, that `repulsion` averages over. Take the number of
            images of the data, or as many as the step may cost.
        fresh: number of the bank's samples that each step draws anew, without gradient; null for all. With fewer, the
            samples of earlier steps stay in the bank, and checkpoints hold them. They follow the generator late, so
            that only a low learning rate is stable.
        include_batch: whether the samples of the batch are in the bank, too.
        t_min: lowest noise level; `lit-knn probe` shows where posteriors collapse.
        t_max: highest noise level; above the spread of the data, V only matches the means.
        levels: noise levels of each sample. They are uniform in ln t, stratified over a batch.
        weight_power: p of the weight t^p of the loss; −2 for the gradient of the divergence itself.
        lr: learning rate of RAdam.
        ema_decay: decay of the averaged weights; validation, sampling and checkpoints use these weights.
        sigma_data: standard deviation of the data in the preconditioning; null for that of `start`, or else 0.5.
        sigma_max: noise level σ of G(ε) = f(σε, σ), see `lit_knn.modules.generators.ConsistencyGenerator`; null for
            the highest of `start`, or else `sigma_data`.
        sampling_class: class to sample from a class-conditional net, by name or else by number;
            null draws one for each seed.
        seed: first part of the key of every random draw.
    """

    def __init__(
        self,
        estimator: Estimator,
        net: nn.Module | None = None,
        repulsion: Estimator | None = None,
        start: str | PathLike[str] | None = None,
        class_conditional: bool = False,
        bank_size: int = 1024,
        fresh: int | None = None,
        include_batch: bool = False,
        t_min: float = 1.0,
        t_max: float = 8.0,
        levels: int = 4,
        weight_power: float = 0.0,
        lr: float = 1e-3,
        ema_decay: float = 0.999,
        sigma_data: float | None = None,
        sigma_max: float | None = None,
        sampling_class: str | None = None,
        seed: int = 0,
    ) -> None:
        with prefixed("LitScoreDifference"):
            check_at_least(1, levels=levels)
            check_is(Estimator, estimator, "estimator")
            check_needs_no_source("estimator", estimator, "a sample")

            generator = started_generator(net, start, sigma_data, sigma_max)
            conditioning = Conditioning(generator.network, class_conditional, sampling_class)
            if conditioning.drops_labels:
                reason = "a sample without its class would still move towards the class"
                raise InputError(f"the net has label_dropout, but {reason}: set it to 0")
            ends = NoiseGrid(t_min, t_max)
            super().__init__(estimator, ends, conditioning, lr=lr, ema_decay=ema_decay, seed=seed)
            self.generator = generator
            # A copy, because the caller may have given the estimator of the data here, too.
            repulsion = Exact() if repulsion is None else copied_apart(repulsion)
            self.repulsion = conditioning.estimator_for(repulsion, ends)
            self.bank = SampleBank(bank_size)
            self._data_labels: Tensor | None = None
            self.fresh = bank_size if fresh is None else fresh
            if not 0 <= self.fresh <= bank_size:
                raise InputError(f"fresh={fresh} must be from 0 to bank_size={bank_size}")
            self.save_hyperparameters(ignore=["net", "estimator", "repulsion", "start"])
            # A module that is made of these options, without the start, then means the same by its weights.
            known = generator.preconditioning()
            self.hparams.update({name: known.get(name) for name in ("sigma_data", "sigma_max")})

        self.include_batch = include_batch
        self.ends = ends
        self.levels = levels
        self.weight_power = weight_power

    @property
    def estimators(self) -> dict[str, Estimator]:
        return {**super().estimators, "repulsion": self.repulsion}

    def setup(self, stage: str) -> None:
        """Set up as other trainings do, and keep the labels of the data, whose shares new samples have."""
        super().setup(stage)
        reference = find_reference(self.trainer)
        if reference is not None and reference.labels is not None:
            self._data_labels = reference.labels.sort().values

    @property
    def data_estimators(self) -> dict[str, Estimator]:
        return super().estimators

    def weight(self, t: Tensor) -> Tensor:
        """Return the weight t^p of the loss at the levels t."""
        return t**self.weight_power

    def losses(
        self, x: Tensor, class_label: Tensor | None, key: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Compute t^p·‖x' − sg(x' + V)‖²/d of samples x' at each of their levels, (levels · B,), and the levels.

        Only the shape of x counts.
        """
        draws = keyed_generator(x.device, *key)
        samples = self.generate(x, class_label, (*key, Stream.DROPOUT), draws)
        made = samples.detach()
        self._bind_repulsion(made, class_label, key, draws)

        # Each sample is repeated for its levels, (levels · B, *shape).
        repeats = self.levels, *[1] * (x.ndim - 1)
        labels = None if class_label is None else class_label.repeat(self.levels)
        repeated = made.repeat(repeats)
        t = stratified_levels(len(x), self.levels, self.ends, draws).flatten()
        noise = torch.randn(repeated.shape, device=x.device, generator=draws)
        attraction = self.posterior_mean(repeated, labels, draws)
        repulsion = self.posterior_mean(repeated, labels, draws, self.repulsion)

        target = repeated + score_difference(repeated, t, noise, attraction, repulsion)
        errors = (samples.repeat(repeats) - target).square().flatten(1).mean(1)
        return self.weight(t).float() * errors, t

    def generate(
        self,
        x: Tensor,
        class_label: Tensor | None,
        key: tuple[int, ...],
        draws: torch.Generator,
    ) -> Tensor:
        """Return a sample of the generator for each image of a batch, with gradient, (B, *shape) float32.

        Args:
            x: (B, *shape), of which only the shape counts.
            class_label: (B,) int64, the classes of the samples, or None.
            key: the key of the dropout masks.
            draws: the source of the noise.
        """
        noise = torch.randn(x.shape, device=x.device, generator=draws)
        with keyed_default_rng(x.device, *key):
            samples = self.generator(noise, labels_on(x.device, class_label))
        check_samples(samples, self.step)
        return samples

    def _bind_repulsion(
        self,
        made: Tensor,
        class_label: Tensor | None,
        key: tuple[int, ...],
        draws: torch.Generator,
    ) -> None:
        """Renew the bank and bind the repulsion to it. A batch outside a training leaves the bank as it is.

        Args:
            made: (B, *shape), the samples of the batch, without gradient.
            class_label: (B,) int64, or None.
            key: the key of the batch.
            draws: source of the new samples.
        """
        trains = key[-1] == Stream.TRAIN
        bank = self.bank if trains else copy.copy(self.bank)

        def make(number: int) -> tuple[Tensor, Tensor | None]:
            labels = class_label
            if class_label is not None and self._data_labels is not None:
                # Labels are on the CPU, so that no draw waits for the device.
                of_labels = keyed_generator("cpu", *key, Stream.LABEL, number)
                labels = labels_in_proportion(self._data_labels, len(made), of_labels)
            return self.generate(made, labels, (*key, Stream.DROPOUT, number), draws), labels

        samples = bank.renew(make, self.fresh, batch=key[2], gather=trains)
        if self.include_batch:
            samples = bank.joined(made, class_label)
        samples.check_has_classes_of(class_label)
        if self.repulsion.needs_reference:
            images = samples.images.to(made.device)
            self.repulsion.bind(ReferenceSet(images, labels=samples.labels))
        if trains and self.fresh < bank.size:
            bank.add(made, class_label, batch=key[2])

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: Content) -> None:
        """Save what sampling needs, and the bank of all whole batches, if samples of earlier steps count."""
        super().on_save_checkpoint(checkpoint)
        if self.fresh < self.bank.size:
            checkpoint[BANK_KEY] = self.bank.content(self.batches_done)

    def on_load_checkpoint(self, checkpoint: Content) -> None:
        super().on_load_checkpoint(checkpoint)
        self.bank.restore(checkpoint.get(BANK_KEY, {}))
