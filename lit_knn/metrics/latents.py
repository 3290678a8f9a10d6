"""The latents and samples that are measured, and shared options of measurements."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lit_knn.common.distributed import own_batches
from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.reference import ReferenceSet


class NoisyLatents:
    """Noisy latents z = x + t ε: images x are drawn without replacement, and ε depends on the latent's number.

    Images and noise are the same at all noise levels, so that curves over t are smooth. They depend neither on the
    batch nor on the number of ranks. `num` is at most N; `seed` is the first part of the key of every draw.
    """

    def __init__(self, reference: ReferenceSet, num: int, seed: int) -> None:
        self.reference = reference
        self.seed = seed
        order = torch.randperm(
            reference.N, device="cpu", generator=keyed_generator("cpu", seed, Stream.LATENT)
        )
        self.ids = order[:num]

    def batch(self, numbers: range, t: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents with these numbers, (B, *shape), float32, at t, also (B, 1, ...), and their images x."""
        x = self.reference.gather(self.ids[numbers.start : numbers.stop].to(self.reference.device))
        draws = (keyed_generator("cpu", self.seed, i, Stream.LATENT) for i in numbers)
        noise = [
            torch.randn(*x.shape[1:], generator=generator, dtype=x.dtype) for generator in draws
        ]
        return x + t * torch.stack(noise).to(x.device), x


def draw_samples(
    sample: Callable[[Tensor], Tensor], num: int, batch_size: int, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of the samples with `num` seeds from `first`: seeds (B,), images (B, *shape).

    Ranks share whole batches, so an image that depends on its batch is the same for any number of ranks.
    """
    for _, numbers in own_batches(num, batch_size):
        seeds = torch.arange(first + numbers.start, first + numbers.stop)
        yield seeds, sample(seeds)


def noise_grid(noise_levels: Sequence[float] | int, t_min: float, t_max: float) -> list[float]:
    """Return the listed noise levels; for a number, that many levels, evenly spaced in ln t in [t_min, t_max]."""
    if not isinstance(noise_levels, int):
        check_not_empty(noise_levels=noise_levels)
        bad = [t for t in noise_levels if not 0 < t < float("inf")]
        if bad:
            raise InputError(f"noise_levels must be finite and above 0, got {float(bad[0])}")
        return [float(t) for t in noise_levels]
    if noise_levels < 2:
        raise InputError(f"noise_levels={noise_levels}, a number of levels, must be at least 2")
    if not 0 < t_min < t_max < float("inf"):
        raise InputError(f"need 0 < t_min < t_max, got t_min={t_min} and t_max={t_max}")
    ratio = t_max / t_min
    return [t_min * ratio ** (i / (noise_levels - 1)) for i in range(noise_levels)]


def check_not_empty(**options: Collection[object]) -> None:
    """Refuse options without an entry, and names that YAML reads as numbers."""
    for name, value in options.items():
        if not value:
            raise InputError(f"{name} is empty; name at least one")
        for key in value if isinstance(value, dict) else ():
            if not isinstance(key, str):
                raise InputError(f"{name}: the name {key!r} is no text; put it in quotes")


def bind_all(
    options: Mapping[str, Estimator], reference: ReferenceSet, t: float, source: bool = False
) -> None:
    """Bind the estimators, by the names of their options, and call each at level t, before any long work."""
    for option, own in options.items():
        if own.needs_reference:
            with prefixed(option):
                own.bind(reference)
        z = torch.zeros(1, *reference.shape, device=reference.device)
        x = z if source else None
        try:
            means = [
                own.posterior_mean(z, t, x_source=x) for _ in range(2 if own.deterministic else 1)
            ]
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"{option} cannot be used on images {reference.shape}: {reason}"
            ) from error
        # Its variance would not be measured.
        if not torch.equal(means[0], means[-1]):
            raise InputError(
                f"{option}: {type(own).__name__} says that it is deterministic, but two calls differ"
            )
