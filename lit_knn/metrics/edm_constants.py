"""EDM's constants of a data set: sigma_data, sigma_min and sigma_max, with the rule of each."""

from typing import NamedTuple

import torch

from lit_knn.metrics.latents import NoisyLatents
from lit_knn.reference import ReferenceSet
from lit_knn.reference.images import chunk_rows
from lit_knn.reference.streaming import all_sq_dist, batches_of

# Karras et al. 2022, Table 1.
EDM = {"sigma_data": 0.5, "sigma_min": 0.002, "sigma_max": 80.0}
# If a value differs from EDM's by more than this factor, a sentence says so.
FACTOR = 1.5

WHY_NOT = "they do not follow from the data. EDM chose them by the loss of trained networks."


class Constant(NamedTuple):
    """A constant of the data, and the rule that it follows."""

    value: float
    rule: str


def edm_constants(latents: NoisyLatents) -> dict[str, Constant]:
    """Compute EDM's constants, by name; `latents` are of the images to train on."""
    images = latents.reference
    nearest, largest = distances(latents)
    sigma_data = deviation(images)

    if images.images.dtype == torch.uint8:
        # Pixels are 2/255 apart in model space.
        sigma_min = 2 / 255 / 4
        rule = "a quarter of the step of a pixel, as EDM's"
    else:
        sigma_min = sigma_data * EDM["sigma_min"] / EDM["sigma_data"]
        rule = f"EDM's share of sigma_data; the nearest image is {nearest:.3g} away (median)"

    of_all = f"the largest distance from {len(latents.ids)} images to all"
    return {
        "sigma_data": Constant(sigma_data, "the standard deviation of all values"),
        "sigma_min": Constant(sigma_min, rule),
        "sigma_max": Constant(largest, f"{of_all} (Song & Ermon 2020, Technique 1)"),
    }


def distances(latents: NoisyLatents) -> tuple[float, float]:
    """Return two distances from the latents' images to other images: the median of the nearest, and the largest."""
    images = latents.reference
    x = latents.batch(range(len(latents.ids)), 0.0)[1]

    nearest, farthest = [], []
    for rows in batches_of(x, images.N):
        sq_dist = all_sq_dist(images, x[rows]).sort().values
        nearest.append(sq_dist[:, 1])  # The nearest one is the image itself.
        farthest.append(sq_dist[:, -1])

    median = torch.cat(nearest).clamp(min=0).median().sqrt()
    return median.item(), torch.cat(farthest).amax().sqrt().item()


def deviation(images: ReferenceSet) -> float:
    """Return the standard deviation of all values of all images."""
    mean = images.sum().mean() / images.N
    total = 0.0
    for _, chunk in images.chunks(chunk_rows(images.d)):
        total += (chunk - mean).square().sum().item()
    return (total / (images.N * images.d)) ** 0.5


def sentences(constants: dict[str, Constant]) -> list[str]:
    """Return sentences that give each constant with its rule, and say which of EDM's values do not fit."""
    lines = [f"P_mean, P_std: {WHY_NOT}"]
    for name, (value, rule) in constants.items():
        line = f"{name}: {value:.4g}, {rule}."
        if not 1 / FACTOR <= value / EDM[name] <= FACTOR:
            line += f" The {EDM[name]:g} of EDM does not fit."
        lines.append(line)
    return lines
