"""Checks the values of latents and noise levels, with one transfer from the GPU."""

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.reference.reference_set import LARGEST_VALUE

# Noise levels outside float32's range cannot have made latents in float32.
LEAST_T, MOST_T = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def check_values(name: str, z: Tensor, t: Tensor, x_source: Tensor | None, largest: float | None) -> None:
    """Refuse values that no estimate can be computed from.

    Args:
        name: the estimator, for messages.
        z: (B, *shape).
        t: (B,) or (1,), float64.
        x_source: (B, *shape) or None.
        largest: largest absolute value of the images; None if there are none to compare with.

    Raises:
        InputError: t outside float32's range; NaN or infinite values in z or x_source; a z whose squares
            float32 cannot hold.
    """
    # Latents of a set of zeros may lie anywhere, because every mean is 0.
    limit = LARGEST_VALUE if largest else float("inf")
    size, good_t = z.detach().abs(), (t >= LEAST_T) & (t <= MOST_T)
    flags = [~good_t.all(), ~z.isfinite().all(), (size > limit).any()]
    if x_source is not None:
        flags.append(~x_source.isfinite().all().to(z.device))
    # The checks are stacked, so that all results come from the GPU in one transfer.
    bad_t, bad_z, too_far, *bad_source = torch.stack(flags).tolist()
    if bad_t:
        level = t[~good_t][0].item()
        beyond = "" if level <= 0 or level != level else f" and between {LEAST_T:.3g} and {MOST_T:.3g}"
        raise InputError(f"{name}: t must be finite and above 0{beyond}, got {level}")
    if bad_z:
        raise InputError(f"{name}: z holds a value that is not finite")
    if any(bad_source):
        raise InputError(f"{name}: x_source holds a value that is not finite")
    if too_far:
        raise InputError(f"{name}: z holds {size.max().item():.3g}, float32 can square sums up to {LARGEST_VALUE:g}")
