"""Warns of data whose scale or centre is far from the one that a module expects."""

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lit_knn.reference import ReferenceSet
from lit_knn.reference.images import to_model_space

# The largest ratio, either way, of the data's deviation to the expected one that causes no warning.
# At 3, EDM's network gets a ninth of the expected variance to predict at high noise, and of EDM's
# noise levels 31 % instead of 66 % are below the deviation. Pixels in [-1, 1] deviate by 1 at most,
# and most photographs by 0.4 to 0.7, which is within a factor of 3 of both 0.5 and 1.
FACTOR = 3.0
# So many images are measured, or fewer if they are large: those that have `MOST_VALUES` values together, but at least
# `LEAST_IMAGES`.
MOST_IMAGES, MOST_VALUES, LEAST_IMAGES = 1024, 2**22, 16


def mean_and_deviation(reference: ReferenceSet) -> tuple[float, float]:
    """Estimate the mean and the standard deviation of all values, in model space, from evenly spaced images.

    In a sharded set each rank uses the images that it holds.
    """
    images: Tensor = reference.local.images
    affordable = max(MOST_VALUES // reference.d, LEAST_IMAGES)
    size = min(affordable, MOST_IMAGES, len(images))
    rows = torch.linspace(0, len(images) - 1, size, device=images.device).long()
    values = to_model_space(images[rows]).double()

    return values.mean().item(), values.std(correction=0).item()


def warn_of_scale(reference: ReferenceSet, expected: float, owner: str, advice: str) -> None:
    """Warn, on the first rank alone, if the data's standard deviation is far from the expected one.

    Also warn if the data's mean is far from 0, where the modules expect it.

    Args:
        reference: the training data.
        expected: the standard deviation that the module expects.
        owner: the first words of the warning's second half, which `expected` follows, such as "sigma_data is".
        advice: what the user can do; {deviation} in it stands for the data's deviation.
    """
    mean, measured = mean_and_deviation(reference)
    rounded = f"{measured:.2g}"
    problem = f"the data's deviation is {rounded}, {owner} {expected:g}"

    if measured == 0:
        rank_zero_warn(f"{problem}: all values are {mean:.2g}, look at the data")
    elif not expected / FACTOR <= measured <= expected * FACTOR:
        rank_zero_warn(f"{problem}: {advice.format(deviation=rounded)}")

    # The mean of pixels in [-1, 1] is never so far from 0.
    if abs(mean) > expected * FACTOR:
        rank_zero_warn(f"the data's mean is {mean:.2g}, far from 0: subtract it from the data")


def warn_of_sigma_data(reference: ReferenceSet, sigma_data: float) -> None:
    """Warn if the data deviate far from the option `sigma_data`; see `warn_of_scale`."""
    advice = "scale the data, or give --model.sigma_data {deviation} and noise levels to match"
    warn_of_scale(reference, sigma_data, "sigma_data is", f"{advice}, as lit-knn probe shows")
