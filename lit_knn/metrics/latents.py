"""The latents and samples that are measured, and checks of the options of measurements."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.distributed import own_batches
from lit_knn.common.errors import InputError, check_at_least, joined_lines, prefixed
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.reference import ReferenceSet


class NoisyLatents:
    """Noisy latents z = x + t ε: images x are drawn without replacement, and ε depends on the latent's number.

    Images and noise are the same at all noise levels, so that curves over t are smooth. They depend
    neither on the batch nor on the number of ranks.

    Args:
        reference: the images.
        num: number of latents, at most N.
        seed: the first part of the key of every draw.
    """

    def __init__(self, reference: ReferenceSet, num: int, seed: int) -> None:
        self.reference = reference
        self.seed = seed
        generator = keyed_generator("cpu", seed, Stream.LATENT)
        order = torch.randperm(reference.N, device="cpu", generator=generator)
        self.ids = order[:num]

    def batch(self, numbers: range, t: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return some latents and their images.

        Args:
            numbers: numbers of the latents.
            t: noise level, also (B, 1, ...).

        Returns:
            z and x, (B, *shape) each, float32.
        """
        ids = self.ids[numbers.start : numbers.stop]
        x = self.reference.gather(ids.to(self.reference.device))

        noise = []
        for number in numbers:
            generator = keyed_generator("cpu", self.seed, number, Stream.LATENT)
            noise.append(torch.randn(*x.shape[1:], generator=generator, dtype=x.dtype))
        return x + t * torch.stack(noise).to(x.device), x


def draw_samples(
    sample: Callable[[Tensor], Tensor], num: int, batch_size: int, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw this rank's share of samples.

    Ranks share whole batches, so an image that depends on its batch is the same for any number of
    ranks.

    Args:
        sample: (seeds (B,)) -> images (B, *shape).
        num: number of samples, over all ranks.
        batch_size: samples at a time.
        first: the first of `num` seeds.

    Yields:
        Seeds (B,) and images (B, *shape).
    """
    for _, numbers in own_batches(num, batch_size):
        seeds = torch.arange(first + numbers.start, first + numbers.stop)
        yield seeds, sample(seeds)


def checked_levels(noise_levels: Sequence[float]) -> list[float]:
    """Return noise levels that a user lists; refuse those that are not finite and above 0, and an empty list."""
    check_not_empty(noise_levels=noise_levels)
    for t in noise_levels:
        if not 0 < t < math.inf:
            raise InputError(f"noise_levels must be finite and above 0, got {float(t)}")
    return [float(t) for t in noise_levels]


def levels_of(noise_levels: Sequence[float] | int, t_min: float, t_max: float) -> list[float]:
    """Return the listed noise levels, or so many from t_min to t_max, evenly spaced in ln t.

    Args:
        noise_levels: levels; or how many, at least 2.
        t_min: the lowest of them, if there is no list.
        t_max: the highest of them, if there is no list.
    """
    if not isinstance(noise_levels, int):
        return checked_levels(noise_levels)
    check_at_least(2, noise_levels=noise_levels)
    if not 0 < t_min < t_max < math.inf:
        raise InputError(f"need 0 < t_min < t_max, got t_min={t_min} and t_max={t_max}")
    levels: list[float] = np.geomspace(t_min, t_max, noise_levels).tolist()
    return levels


def check_not_empty(**options: Collection[object]) -> None:
    """Refuse options without an entry, and names that YAML reads as numbers."""
    for name, value in options.items():
        if not value:
            raise InputError(f"{name} is empty; name at least one")
        if not isinstance(value, dict):
            continue
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{name}: the name {key!r} is no text; put it in quotes")


def bind_all(
    options: Mapping[str, Estimator], reference: ReferenceSet, t: float, source: bool = False
) -> None:
    """Bind estimators and try each of them, before any long work.

    Args:
        options: estimators by the names of their options.
        reference: the images to bind them to.
        t: the noise level of the trial.
        source: whether the estimators get the source of z.

    Raises:
        InputError: an estimator fails, or says that it is deterministic although two calls differ.
    """
    for option, estimator in options.items():
        if estimator.needs_reference:
            with prefixed(option):
                estimator.bind(reference)

        try:
            mean = again = _mean_at_zero(estimator, reference, t, source)
            if estimator.deterministic:
                again = _mean_at_zero(estimator, reference, t, source)
        except Exception as error:
            reason = joined_lines(error)[:300]
            images = f"images {reference.shape}"
            raise InputError(f"{option} cannot be used on {images}: {reason}") from error

        # An estimator that says it is deterministic is called once, so its variance would not be measured.
        if not torch.equal(mean, again):
            name = type(estimator).__name__
            difference = "but two calls differ"
            raise InputError(f"{option}: {name} says that it is deterministic, {difference}")


def _mean_at_zero(estimator: Estimator, reference: ReferenceSet, t: float, source: bool) -> Tensor:
    """Return the estimate at the latent 0, (1, *shape)."""
    z = torch.zeros(1, *reference.shape, device=reference.device)
    return estimator.posterior_mean(z, t, x_source=z if source else None)
