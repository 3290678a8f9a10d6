"""How like a trained network estimators are, over noise levels and in what they sample from the same noise."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lit_knn.common.distributed import own_batches
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.metrics.estimator_error import LatentMeans
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.same_noise import MEASURES, Row, SameNoise, agreement, averaged, grouped
from lit_knn.reference import ReferenceSet

TRAINING, HELD_OUT, GENERATED = "training", "held_out", "generated"
IMAGES = (TRAINING, HELD_OUT, GENERATED)
"""Images that noise is added to: of the training set, not of it, and sampled by the networks."""
ImageSet = tuple[str, dict[str, Estimator], ReferenceSet]
"""A kind of images, the networks that are compared on them, and the images."""


def image_sets(
    networks: Mapping[str, Estimator], real: Mapping[str, ReferenceSet | None], generated: Mapping[str, Tensor]
) -> list[ImageSet]:
    """List the kinds of images: `real` ones for all networks (None is left out), each network's `generated` ones."""
    sets = [(kind, dict(networks), x) for kind, x in real.items() if x is not None]
    return sets + [(GENERATED, {name: networks[name]}, ReferenceSet(x)) for name, x in generated.items()]


@torch.no_grad()
def compare(
    estimators: Mapping[str, Estimator],
    sets: Sequence[ImageSet],
    noise_levels: Sequence[float],
    num_images: int,
    sampler: SameNoise,
    advance: Callable[[int], Any] = lambda estimates: None,
    finished: Callable[[str, str, str, float], Row | None] = lambda estimator, network, images, t: None,
) -> Iterator[Row]:
    """Compare the posterior means of bound estimators and of networks at z = x + tε, for the x of each of `image_sets`.

    All ranks must call it; they split the latents and get the same rows. `sampler` gives the seed, and the latents at a
    time; random draws are the same at all noise levels. `advance` gets the number of estimates after each batch;
    `finished` returns the row of a comparison that need not be made again, or None. A row has the means over the
    latents of each measure of `Agreement`, with standard errors over the latents (`_se`).
    """
    for (kind, networks, x), t in product(sets, noise_levels):
        rows = {pair: finished(*pair, kind, t) for pair in product(estimators, networks)}
        todo = {name: own for name, own in estimators.items() if any(rows[name, net] is None for net in networks)}
        advance(num_images * (len(estimators) - len(todo)))
        latents = NoisyLatents(x, num_images, sampler.seed)
        means = {pair: LatentMeans(MEASURES).to(x.device) for pair in product(todo, networks)}
        for batch, numbers in own_batches(num_images, sampler.batch_size) if todo else ():
            z, _ = latents.batch(numbers, t)
            wanted = {name: network.posterior_mean(z, t) for name, network in networks.items()}
            for name, estimator in todo.items():
                generator = keyed_generator(x.device, sampler.seed, batch, Stream.AGREEMENT)
                mean = estimator.posterior_mean(z, t, generator=generator)
                for network, own in wanted.items():
                    means[name, network].update(**agreement(mean, own)._asdict())
                advance(len(z))
        for pair, sums in means.items():
            row = {"estimator": pair[0], "network": pair[1], "images": kind, "t": t, "num_images": num_images}
            # A new network is compared together with finished ones, whose rows stay.
            rows[pair] = rows[pair] or {**row, "seed": sampler.seed, **averaged(sums.compute())}
        yield from (row for row in rows.values() if row is not None)


def over_networks(rows: Sequence[Row]) -> list[Row]:
    """Average rows of `compare` over the networks, for each `estimator`, kind of `images` and noise level `t`.

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
