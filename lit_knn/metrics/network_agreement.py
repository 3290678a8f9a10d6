"""How like a trained network estimators are, over noise levels and in what they sample from the same noise."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lit_knn.common.distributed import own_batches
from lit_knn.common.errors import InputError
from lit_knn.common.progress import progress_bar
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator, Exact
from lit_knn.metrics.agreement import MEASURES, Row, agreement, averaged, grouped
from lit_knn.metrics.estimator_error import LatentMeans
from lit_knn.metrics.latents import NoisyLatents, check_at_least, check_names, check_not_empty, try_estimator
from lit_knn.metrics.same_noise import SameNoise, same_noise
from lit_knn.reference import ReferenceSet

TRAINING, HELD_OUT, GENERATED = "training", "held_out", "generated"
IMAGES = (TRAINING, HELD_OUT, GENERATED)
"""Images that noise is added to: of the training set, not of it, and sampled by the networks."""
ImageSet = tuple[str, dict[str, Estimator], ReferenceSet]
"""A kind of images, the networks that are compared on them, and the images."""


def network_agreement(
    estimators: Mapping[str, Estimator],
    networks: Mapping[str, Estimator],
    reference: ReferenceSet,
    noise_levels: Sequence[float],
    *,
    held_out: ReferenceSet | None = None,
    num_images: int = 256,
    sampler: SameNoise | None = None,
) -> tuple[list[Row], list[Row]]:
    """Compare estimators with trained networks, both by name. Shows a progress bar on a terminal.

    `Exact`, the ideal denoiser, is added unless an estimator has that name. The estimators are bound to `reference`,
    the training set; `held_out` are images that no network was trained on, if there are any. `num_images` is the number
    of images of each kind, and of latents that `sampler` samples from, by default in 18 steps of EDM's grid.

    Returns:
        Rows of `compare` at the noise levels t, and rows of `same_noise`.
    """
    estimators = with_ideal(estimators)
    sampler = SameNoise(reference) if sampler is None else sampler
    highest = max(*noise_levels, sampler.grid.sigma_max)
    check_agreement(estimators, networks, reference, held_out, num_images, highest)
    parts = {**estimators, **networks}
    kinds = 1 + (held_out is not None) + len(networks)
    total = num_images * (len(parts) * sampler.estimates + kinds * len(estimators) * len(noise_levels))
    with progress_bar(total, "Network agreement", " estimates") as bar:
        samples = {name: sampler.draw(part, num_images, bar.update) for name, part in parts.items()}
        generated = {name: samples[name] for name in networks}
        sets = image_sets(networks, {TRAINING: reference, HELD_OUT: held_out}, generated)
        rows = list(compare(estimators, sets, noise_levels, num_images, sampler, bar.update))
    return rows, same_noise({name: samples[name] for name in estimators}, generated)


def with_ideal(estimators: Mapping[str, Estimator]) -> dict[str, Estimator]:
    """Add the ideal denoiser, whose samples are training images, as what every estimator is compared with."""
    return {**estimators} if "Exact" in estimators else {**estimators, "Exact": Exact()}


def check_agreement(
    estimators: Mapping[str, Estimator],
    networks: Mapping[str, Estimator],
    reference: ReferenceSet,
    held_out: ReferenceSet | None,
    num_images: int,
    t: float,
) -> None:
    """Bind the estimators, and call each estimator and network at noise level t, before any long work."""
    check_not_empty(networks=networks)
    for name in networks:
        if name in estimators:
            raise InputError(f"the network {name!r} has the name of an estimator")
    check_names((*networks, *estimators))
    check_at_least(2, num_images=num_images)
    for kind, images in (("training", reference), ("held-out", held_out)):
        if images is not None and num_images > images.N:
            raise InputError(f"num_images={num_images} is more than the {images.N} {kind} images")
    for option, parts in (("networks", networks), ("estimators", estimators)):
        for name, part in parts.items():
            try_estimator(f"{option}.{name}", part, reference, t)


def image_sets(
    networks: Mapping[str, Estimator], real: Mapping[str, ReferenceSet | None], generated: Mapping[str, Tensor]
) -> list[ImageSet]:
    """List the kinds of images, the networks that are compared on them, and the images.

    All networks see the `real` images, by kind (None leaves a kind out), and each its own `generated` ones, by network.
    """
    sets = [(kind, dict(networks), x) for kind, x in real.items() if x is not None]
    return sets + [(GENERATED, {name: networks[name]}, ReferenceSet(x)) for name, x in generated.items()]


def compare(
    estimators: Mapping[str, Estimator],
    sets: Sequence[ImageSet],
    noise_levels: Sequence[float],
    num_images: int,
    sampler: SameNoise,
    advance: Callable[[int], Any] = lambda estimates: None,
    finished: Callable[[str, str, str, float], Row | None] = lambda estimator, network, images, t: None,
) -> Iterator[Row]:
    """Compare bound estimators with networks on `image_sets` and noise levels t. All ranks get the same rows.

    `sampler` gives the seed, and the latents at a time. `advance` is called with the number of estimates after each
    batch; `finished(estimator, network, kind of images, t)` returns the row of a comparison that need not be made
    again, or None.

    Yields:
        Rows of `compare_at`, with the kind of images as `images`, and the `seed`.
    """
    for (kind, networks, x), t in product(sets, noise_levels):
        rows = {pair: finished(*pair, kind, t) for pair in product(estimators, networks)}
        todo = {name: own for name, own in estimators.items() if any(rows[name, net] is None for net in networks)}
        advance(num_images * (len(estimators) - len(todo)))
        if todo:
            latents = NoisyLatents(x, num_images, sampler.seed)
            for row in compare_at(todo, networks, latents, t, sampler.batch_size, advance):
                # A new network is compared together with finished ones, whose rows stay.
                pair = row["estimator"], row["network"]
                rows[pair] = rows[pair] or {**row, "images": kind, "seed": sampler.seed}
        yield from (row for row in rows.values() if row is not None)


@torch.no_grad()
def compare_at(
    estimators: Mapping[str, Estimator],
    networks: Mapping[str, Estimator],
    latents: NoisyLatents,
    t: float,
    batch_size: int,
    advance: Callable[[int], Any] = lambda estimates: None,
) -> list[Row]:
    """Compare the posterior means at z = x + tε. All ranks must call it; they split the latents and get the same rows.

    The estimators are bound; their random draws are the same at all noise levels. `advance` is called with the number
    of estimates after each batch. The result is a row for each pair of `estimator` and `network`: `t`, `num_images`,
    and the means over the latents of each measure of `Agreement`, with standard errors over the latents (`_se`).
    """
    device, num = latents.reference.device, len(latents.ids)
    means = {pair: LatentMeans(MEASURES).to(device) for pair in product(estimators, networks)}
    for batch, numbers in own_batches(num, batch_size):
        z, _ = latents.batch(numbers, t)
        wanted = {name: network.posterior_mean(z, t) for name, network in networks.items()}
        for name, estimator in estimators.items():
            generator = keyed_generator(device, latents.seed, batch, Stream.AGREEMENT)
            mean = estimator.posterior_mean(z, t, generator=generator)
            for network, own in wanted.items():
                means[name, network].update(**agreement(mean, own)._asdict())
            advance(len(z))
    return [
        {"estimator": estimator, "network": network, "t": t, "num_images": num, **averaged(sums.compute())}
        for (estimator, network), sums in means.items()
    ]


def over_networks(rows: Sequence[Row]) -> list[Row]:
    """Average rows of `compare_at` over the networks, for each `estimator`, kind of `images` and noise level `t`.

    The columns of a measure are the mean over the networks; `_se`, the mean of their standard errors over images, which
    is at least the standard error of the mean, because the networks may share their images; `_low` and `_high`, the
    least and the largest of the networks' means. The rows also tell `num_networks`.
    """
    result = []
    for (estimator, images, t), own in grouped(rows, "estimator", "images", "t").items():
        made: Row = {"estimator": estimator, "images": images, "t": t, "num_networks": len(own)}
        for name in MEASURES:
            values, errors = [row[name] for row in own], [row[f"{name}_se"] for row in own]
            made |= {name: sum(values) / len(own), f"{name}_se": sum(errors) / len(own)}
            made |= {f"{name}_low": min(values), f"{name}_high": max(values)}
        result.append(made)
    return result


def nearest(rows: Sequence[Row]) -> list[Row]:
    """Return the row with the least MSE for each kind of images and noise level, of rows of `over_networks`."""
    return [min(own, key=lambda row: row["mse"]) for own in grouped(rows, "images", "t").values()]
