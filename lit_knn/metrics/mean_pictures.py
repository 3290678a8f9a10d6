"""The posterior mean and its estimates over noise levels, as in Figure 2 (fig:denoiser_viz)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator, Exact
from lit_knn.metrics.latents import NoisyLatents, bind_all
from lit_knn.reference import ReferenceSet


def mean_pictures(
    estimators: Mapping[str, Estimator],
    reference: ReferenceSet,
    noise_levels: Sequence[float],
    num_images: int = 1,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Bind the estimators, and estimate the means with equal images and noise at all levels.

    Args:
        estimators: estimators by name.
        reference: the images.
        noise_levels: levels t.
        num_images: number of latents at each level.
        seed: the first part of the key of every draw.

    Returns:
        The rows of Figure 2 by name, (levels, images, *shape), model space, on the CPU: z / sqrt(1 + t²), the exact
        mean, and each estimate of it.
    """
    named = {f"estimators.{name}": estimator for name, estimator in estimators.items()}
    bind_all(named, reference, max(noise_levels), source=True)
    latents = NoisyLatents(reference, num_images, seed)
    exact = Exact().bind(reference)
    rows: dict[str, list[Tensor]] = {name: [] for name in ("$z$", "true mean", *estimators)}

    for level, t in enumerate(noise_levels):
        z, x = latents.batch(range(num_images), t)
        rows["$z$"].append(z / (1 + t**2) ** 0.5)
        rows["true mean"].append(exact.posterior_mean(z, t))
        for index, (name, estimator) in enumerate(estimators.items()):
            generator = keyed_generator(z.device, seed, level, index, Stream.ESTIMATOR)
            rows[name].append(estimator.posterior_mean(z, t, x_source=x, generator=generator))
    return {name: torch.stack(images).cpu() for name, images in rows.items()}
