"""Warns of data whose scale is far from the one that a module expects."""

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lit_knn.reference import ReferenceSet
from lit_knn.reference.reference_set import to_model_space

# The largest ratio, either way, of the data's deviation to the expected one that causes no warning.
# At 3, EDM's network gets a ninth of the expected variance to predict at high noise, and of EDM's
# noise levels 31 % instead of 66 % are below the deviation. Pixels in [-1, 1] deviate by 1 at most,
# and most photographs by 0.4 to 0.7, which is within a factor of 3 of both 0.5 and 1.
FACTOR = 3.0
# Numbers of images and values that are measured at most; at least 16 images are.
MOST_IMAGES, MOST_VALUES, LEAST_IMAGES = 1024, 2**22, 16


def deviation(reference: ReferenceSet) -> float:
    """Estimate the standard deviation of all values, model space, from evenly spaced images."""
    images: Tensor = reference.local.images
    size = min(max(MOST_VALUES // reference.d, LEAST_IMAGES), MOST_IMAGES, len(images))
    rows = torch.linspace(0, len(images) - 1, size, device=images.device).long()
    values = to_model_space(images[rows]).double()

    return values.std(correction=0).item()


def warn_of_scale(reference: ReferenceSet, expected: float, owner: str, advice: str) -> None:
    """Warn once, on the first rank, if the data deviate far more or far less than expected.

    Args:
        reference: the training data.
        expected: the standard deviation that the module expects.
        owner: what expects it, in words that `expected` follows, such as "sigma_data is".
        advice: what the user can do; {deviation} in it stands for the data's deviation.
    """
    measured = deviation(reference)
    if expected / FACTOR <= measured <= expected * FACTOR:
        return

    rounded = f"{measured:.2g}"
    problem = f"the data's deviation is {rounded}, {owner} {expected:g}"
    rank_zero_warn(f"{problem}: {advice.format(deviation=rounded)}")
