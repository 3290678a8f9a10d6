"""Measures what better targets would bring on a data set, from exact posteriors of noisy latents, without a network."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.common.distributed import own_batches
from lit_knn.common.errors import InputError
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator, Wiener, class_conditional
from lit_knn.metrics.latents import NoisyLatents, bind_all, check_at_least
from lit_knn.metrics.measure import TIME, repeated_errors
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import classes_of, rows_by_label
from lit_knn.reference.reference_set import chunk_rows
from lit_knn.reference.streaming import all_sq_dist, batches_of
from lit_knn.theory.posterior import log_posterior

# A posterior is collapsed if one image has more than this share of it.
COLLAPSED = 0.99
# Estimates at each latent. Latents differ more than estimates at one latent, so more repeats would gain little.
REPEATS = 2
BATCH_SIZE = 256
# Bytes of the probabilities of some latents. Each group of latents converts all images twice, so groups are large.
POSTERIOR_BYTES = 64 * 2**20

Level = dict[str, Tensor]
"""Values at the latents of one noise level, (latents,) float64 each, by the names that `Probe.level` explains."""


class Posterior(NamedTuple):
    """The posterior p_t(x|z), Eq. 2 (eq:posterior), at B latents, by enumeration of all images."""

    mean: Tensor  # (B, *shape), float64
    variance: Tensor  # E[‖x − mean‖² | z] / d, (B,) float64
    spread: Tensor  # number of images that it spreads over, (B,): the exponential of its entropy
    largest: Tensor  # probability of the likeliest image, (B,)
    draws: Tensor  # images drawn from it, (B, REPEATS, *shape)


@torch.no_grad()
def posterior_at(reference: ReferenceSet, z: Tensor, t: float, generator: torch.Generator) -> Posterior:
    """Enumerate the posterior at z (B, *shape) and noise level t. The memory is bounded for any number of images."""

    def sq_norms() -> Tensor:
        return torch.cat([x.flatten(1).double().square().sum(1) for _, x in reference.chunks(chunk_rows(reference.d))])

    def part(z: Tensor) -> Posterior:
        p = log_posterior(all_sq_dist(reference, z), t).exp()
        mean = p.new_zeros(len(z), reference.d)
        for start, x in reference.chunks(chunk_rows(reference.d)):
            mean += p[:, start : start + len(x)] @ x.flatten(1).double()
        sq_norm = p @ reference.cached("squared norms", sq_norms)
        variance = (sq_norm - mean.square().sum(1)).clamp(min=0) / reference.d
        draws = reference.gather(torch.multinomial(p, REPEATS, replacement=True, generator=generator))
        return Posterior(mean.reshape(z.shape), variance, torch.special.entr(p).sum(1).exp(), p.amax(1), draws)

    parts = [part(rows) for rows in z.split(max(POSTERIOR_BYTES // (8 * reference.N), 1))]
    return Posterior(*map(torch.cat, zip(*parts, strict=True)))


class Scale(NamedTuple):
    """The scale of a data set in model space."""

    sigma_data: float  # standard deviation of all values about their mean, EDM's σ_data
    variance: float  # mean squared deviation of a value from the mean image; by class, from that of its class


def scale_of(reference: ReferenceSet) -> Scale:
    """Measure the scale of all N images."""
    mean, chunks = reference.mean().double(), reference.chunks(chunk_rows(reference.d))
    # Deviations from the mean image, because a difference of large squares would lose digits.
    total = sum(x.flatten(1).double().sub(mean).square().sum().item() for _, x in chunks)
    variance = total / (reference.N * reference.d)
    return Scale((variance + mean.var(correction=0).item()) ** 0.5, variance)


@torch.no_grad()
def distances(reference: ReferenceSet, num: int, seed: int) -> tuple[float, float]:
    """Return the median distance to the nearest other image, and the largest distance, from `num` images to all."""
    ids = NoisyLatents(reference, num, seed).ids.to(reference.device)
    nearest, farthest = [], 0.0
    for rows in batches_of(ids, reference.N):
        sq_dist = all_sq_dist(reference, reference.gather(ids[rows]))
        farthest = max(farthest, sq_dist.max().item())
        nearest.append(sq_dist.scatter_(1, ids[rows].unsqueeze(1), torch.inf).amin(1))
    return torch.cat(nearest).clamp(min=0).median().sqrt().item(), farthest**0.5


class Probe:
    """Measures at noise levels how noisy the targets of a data set are, and how much of the noise estimators leave.

    Every draw is a function of (seed, batch, level, estimator).

    Args:
        reference: the images to train on.
        held_out: other images of the same kind; None for none.
        estimators: by name, not bound.
        latents: number of latents z, each from another image; fewer if there are fewer images.
        by_class: take the posterior over the images of the latent's class.
        seed: first part of the key of every draw.

    Raises:
        InputError: the images do not differ, there are no labels to split by, or all images of a class are held out.
    """

    def __init__(
        self,
        reference: ReferenceSet,
        held_out: ReferenceSet | None,
        estimators: Mapping[str, Estimator],
        latents: int = 256,
        by_class: bool = False,
        seed: int = 0,
    ) -> None:
        check_at_least(2, latents=latents)
        self.reference, self.held_out, self.by_class, self.seed = reference, held_out, by_class, seed
        self.latents = min(latents, reference.N)
        self.scale = scale_of(reference)
        labels = reference.labels if by_class else None
        if by_class and labels is None:
            raise InputError("probe: by_class=true, but the data has no labels")
        if by_class:
            inside = sum(images.N * scale_of(images).variance for images in classes_of(reference).values())
            self.scale = self.scale._replace(variance=inside / reference.N)
        if not self.scale.variance > 0:
            what = f"the {reference.N} images to train on do not differ{' in any class' if by_class else ''}"
            raise InputError(f"probe: {what}, so targets have no noise")
        if labels is not None and held_out is not None and held_out.labels is not None:
            absent = sorted(set(held_out.labels.tolist()) - set(labels.tolist()))
            if absent:
                raise InputError(f"probe: all images of class {absent[0]} are held out; give a smaller held_out")
        self.estimators = {name: class_conditional(own) if by_class else own for name, own in estimators.items()}
        bind_all(self.estimators, reference, 1.0, source=True, labels=None if labels is None else labels[:1])
        stored = len(reference.images)
        tenth = torch.randperm(stored, generator=keyed_generator("cpu", seed, 1, Stream.PROBE))[: max(stored // 10, 2)]
        kept = None if labels is None else labels[tenth]
        self._tenth = ReferenceSet(reference.images[tenth.to(reference.device)], hflip=reference.hflip, labels=kept)
        self._wiener = (class_conditional(Wiener()) if by_class else Wiener()).bind(reference)

    def level(self, number: int, t: float) -> Level:
        """Measure noise level t, the one with this number.

        Returns:
            Errors per dimension: `irreducible`, the variance of the posterior: the least loss of a denoiser of this
            set, and the noise of a target from `OneSample`; `wiener`, ‖x − μ̂‖² of the linear denoiser `Wiener`;
            `held_out` and `wiener_held_out`, ‖x − μ‖² and ‖x − μ̂‖² at latents of held-out images x; and by its name
            ‖μ̂ − μ‖² of each estimator, whose source is drawn from the posterior, with the milliseconds of an estimate,
            `NAME_ms`. `images`, over how many images the posterior spreads; `collapsed`, 1 if one image has more than
            99 % of it; `collapsed_tenth`, the same for a tenth of the images.
        """
        parts: list[Level] = []
        for key, z, x, labels in self._batches(self.reference, number, t):
            own = self._posterior(self.reference, z, t, labels, key)
            linear = self._sq_error(self._wiener.posterior_mean(z, t, labels=labels), x)
            part = {"irreducible": own.variance, "wiener": linear, "images": own.spread, "collapsed": own.largest}
            for i, (name, estimator) in enumerate(self.estimators.items()):
                source = own.draws.unbind(1).__getitem__
                measured = repeated_errors(estimator, REPEATS, z, t, own.mean, source, (*key, i), labels)
                part |= {name: measured["mse"], f"{name}_ms": measured[TIME]}
            parts.append(part)
        found = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        of_tenth = [
            self._posterior(self._tenth, z, t, labels, key).largest.cpu()
            for key, z, _, labels in self._batches(self._tenth, number, t)
        ]
        found["collapsed_tenth"] = torch.cat(of_tenth)
        for name in ("collapsed", "collapsed_tenth"):
            found[name] = (found[name] > COLLAPSED).double()
        if self.held_out is not None:
            rest: list[tuple[Tensor, Tensor]] = []
            for key, z, x, labels in self._batches(self.held_out, number, t):
                linear = self._wiener.posterior_mean(z, t, labels=labels)
                mean = self._posterior(self.reference, z, t, labels, key).mean
                rest.append((self._sq_error(mean, x), self._sq_error(linear, x)))
            found["held_out"], found["wiener_held_out"] = (torch.cat(each).cpu() for each in zip(*rest, strict=True))
        return found

    @staticmethod
    def _sq_error(mean: Tensor, x: Tensor) -> Tensor:
        return (mean - x).double().square().flatten(1).mean(1)

    def _batches(
        self, images: ReferenceSet, number: int, t: float
    ) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor, Tensor | None]]:
        """Yield for each batch of latents its key, z (B, *shape), the images x of z, and their classes."""
        latents = NoisyLatents(images, self.latents, self.seed)
        for batch, numbers in own_batches(len(latents.ids), BATCH_SIZE):
            labels = latents.labels(numbers) if self.by_class else None
            yield (self.seed, batch, number), *latents.batch(numbers, t), labels

    @staticmethod
    def _posterior(images: ReferenceSet, z: Tensor, t: float, labels: Tensor | None, key: Sequence[int]) -> Posterior:
        generator = keyed_generator(z.device, *key, Stream.SOURCE)
        if labels is None:
            return posterior_at(images, z, t, generator)
        classes, groups = classes_of(images), rows_by_label(labels)
        parts = [posterior_at(classes[label], z[rows], t, generator) for label, rows in groups.items()]
        order = torch.cat(list(groups.values())).argsort()
        return Posterior(*(torch.cat(values)[order] for values in zip(*parts, strict=True)))
