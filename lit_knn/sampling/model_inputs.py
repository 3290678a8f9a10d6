"""Checks the noise levels and classes that users give, and turns them into tensors."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.nets.base import class_number

# One class or one for each item, by number or by name.
Labels: TypeAlias = int | str | Sequence[int | str] | Tensor


def checked_times(z: Tensor, t: Tensor | float, low: float, high: float) -> Tensor:
    """Return the times of z, (B,), of a float type, on its device.

    Raises InputError unless all times are above 0, finite, and from `low` to `high`.

    Args:
        z: (B, *shape).
        t: the time of each item, (B,) or (B, 1, …, 1), or one number for all.
        low: the lowest time.
        high: the highest time.
    """
    if isinstance(t, Tensor):
        t = t.to(z.device)
    else:
        t = torch.tensor(t, dtype=torch.float64, device=z.device)
    if not t.is_floating_point():
        t = t.double()

    # `low` is rounded to the type of t: in float32, 0.7 is a little below the 0.7 of float64, but not too low.
    lowest = torch.tensor(low, dtype=t.dtype)
    inside = (t > 0) & (t >= lowest) & (t.double() <= high) & t.isfinite()
    if not inside.all():
        limits = "finite"
        if low or high < math.inf:
            limits = f"from {low:g} to {high:g}"
        outside = t[~inside][0].item()
        raise InputError(f"the noise level must be above 0 and {limits}, got {outside:g}")

    per_item = (len(z),) + (1,) * (z.dim() - 1)
    if t.shape == per_item:
        t = t.flatten()
    if t.shape not in ((), (1,), (len(z),)):
        shape = tuple(t.shape)
        raise InputError(f"the noise level must be a number or ({len(z)},), got the shape {shape}")
    return t.expand(len(z))


def class_numbers(
    net: nn.Module, chosen: Labels, count: int, also_valid: tuple[int, ...] = ()
) -> Tensor:
    """Return the class of each item, (count,) int64; raise InputError for unknown classes.

    Args:
        net: the raw network, which has the classes.
        chosen: one class for all items, or one for each, by number or by name.
        count: number of items.
        also_valid: numbers that pass besides those of the classes.
    """
    if isinstance(chosen, str):
        chosen = class_number("class_label", net, chosen)
    if isinstance(chosen, list | tuple):
        numbers = []
        for label in chosen:
            if isinstance(label, str):
                label = class_number("class_label", net, label)
            numbers.append(label)
        chosen = numbers

    labels = torch.as_tensor(chosen)
    for number in labels.unique().tolist():
        if number not in also_valid:
            # Called for the error that it raises.
            class_number("class_label", net, number)
    return labels.long().expand(count)
