"""Measures one noise level of a probe: posteriors, and the errors and times of estimators."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.metrics.enumeration import SOURCES, Columns, posterior
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.measure import TIME, repeated_errors
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import rows_by_label

# Name of the linear denoiser, which is measured beside the targets, and of its column.
LINEAR = "wiener"
LOSS = "loss"

# Latents at a time, and bytes of their probabilities. Batches are large because each of them
# converts all images twice.
BATCH_SIZE = 256
POSTERIOR_BYTES = 128 * 2**20

Bound = dict[str, dict[int, Estimator]]  # bound estimators, by name and class


def measure_sets(
    latents: Sequence[NoisyLatents],
    by_class: bool,
    bound: Bound,
    number: int,
    t: float,
) -> Columns:
    """Measure one noise level: all estimators at images to train on, `wiener` at held-out ones.

    Args:
        latents: those of the images to train on, and perhaps those of held-out images.
        by_class: take each posterior over the images of the latent's class.
        bound: estimators by name and class, bound to the images to train on.
        number: number of the noise level.
        t: the noise level.
    """
    columns = measure_level(latents[0], by_class, bound, number=number, t=t)
    columns.pop(LOSS)

    linear = {LINEAR: bound[LINEAR]}
    for held_out in latents[1:]:
        rest = measure_level(held_out, by_class, linear, number=number, t=t)
        columns["held_out"] = rest[LOSS]
        columns["wiener_held_out"] = rest[LINEAR]
    return columns


@torch.no_grad()
def measure_level(
    latents: NoisyLatents,
    by_class: bool,
    bound: Bound,
    number: int,
    t: float,
) -> Columns:
    """Measure one noise level at one set of latents.

    Every draw is a function of (seed, batch, number of the level, estimator).

    Args:
        latents: the latents, of images to train on or of held-out images.
        by_class: take each posterior over the images of the latent's class.
        bound: estimators by name and class, bound to the images to train on. The source that they
            get is drawn from the posterior.
        number: number of the noise level.
        t: the noise level.

    Returns:
        Columns of docs/probe.md, (latents,) each, by class in the order of the classes; and `loss`,
        the squared distance from the posterior's mean to the image of the latent.

    Raises:
        InputError: all images of a latent's class are held out.
    """
    z, x = latents.batch(range(len(latents.ids)), t)
    sets = {label: estimator.reference for label, estimator in bound[LINEAR].items()}
    labels = torch.zeros_like(latents.ids)
    if by_class:
        labels = torch.as_tensor(latents.reference.labels)[latents.ids]

    measured = []
    for batch, (label, rows) in enumerate(batches(labels, sets)):
        of_class = {name: by_label[label] for name, by_label in bound.items()}
        key = latents.seed, batch, number
        measured.append(measure_batch(z[rows], x[rows], t, estimators=of_class, key=key))

    columns = {}
    for name in measured[0]:
        columns[name] = torch.cat([values[name] for values in measured]).cpu()
    return columns


def measure_batch(
    z: Tensor,
    x: Tensor,
    t: float,
    estimators: dict[str, Estimator],
    key: tuple[int, int, int],
) -> Columns:
    """Measure the estimators at latents of one class; return the columns of `measure_level`.

    Args:
        z: (B, *shape), the latents.
        x: (B, *shape), the images that they were made of.
        t: the noise level.
        estimators: estimators by name, bound to the images of the class.
        key: seed of the draws, number of the batch and number of the noise level.
    """
    generator = keyed_generator(z.device, *key, Stream.SOURCE)
    mean, sources, columns = posterior(estimators[LINEAR].reference, z, t, generator)
    columns[LOSS] = (mean - x).square().flatten(1).mean(1)

    for place, (name, estimator) in enumerate(estimators.items()):
        varies = estimator.uses_source or not estimator.deterministic
        repeats = SOURCES if varies else 1
        # A linear denoiser is compared with the image, a target with the posterior's mean.
        truth = x.double() if name == LINEAR else mean

        errors = repeated_errors(
            estimator,
            repeats,
            z,
            t,
            truth,
            source=lambda repeat: sources[repeat],
            key=(*key, place),
        )
        columns[name] = errors["mse"]
        columns[f"{name}_ms"] = errors[TIME]
    return columns


def batches(labels: Tensor, sets: dict[int, ReferenceSet]) -> list[tuple[int, Tensor]]:
    """Divide latents into batches of one class each: pairs of the class and the rows, (b,) int64.

    Args:
        labels: (latents,), the class of each latent.
        sets: the images to train on, by class.

    Raises:
        InputError: a class has no images to train on.
    """
    absent = set(labels.tolist()) - sets.keys()
    if absent:
        reason = f"all images of class {min(absent)} are held out"
        raise InputError(f"probe: {reason}; give a smaller held_out")

    most_images = max(images.N for images in sets.values())
    size = max(min(BATCH_SIZE, POSTERIOR_BYTES // (8 * most_images)), 1)

    pairs = []
    for label, rows in rows_by_label(labels).items():
        for part in rows.split(size):
            pairs.append((label, part))
    return pairs
