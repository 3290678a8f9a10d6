"""Checks the values of latents and noise levels, with one transfer from the GPU, or none inside a training step."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.deferred_checks import Failure, refuse
from lit_knn.errors import InputError
from lit_knn.reference.reference_set import LARGEST_VALUE

# Noise levels outside float32's range cannot have made latents in float32.
LEAST_T, MOST_T = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
MOST_FLOAT = torch.finfo(torch.float64).max


class Check(NamedTuple):
    """One more check.

    Attributes:
        bad: scalar bool, on the device of the latents, whether it fails.
        value: returns the value that failed, a float64 scalar on the same device.
        failure: (value, where it failed) -> the error to raise.
    """

    bad: Tensor
    value: Callable[[], Tensor]
    failure: Callable[[float, str], Exception]


def check_values(
    name: str, z: Tensor, t: Tensor, x_source: Tensor | None, largest: float | None, more: Check | None = None
) -> None:
    """Refuse values that no estimate can be computed from.

    Inside `DeferredChecks.collect` a GPU only notes them; see there.

    Args:
        name: the estimator, for messages.
        z: (B, *shape).
        t: (B,) or (1,), float64.
        x_source: (B, *shape) or None.
        largest: largest absolute value of the images; None if there are none to compare with.
        more: one more check, which comes last.

    Raises:
        InputError: t outside float32's range; NaN or infinite values in z or x_source; a z whose squares
            float32 cannot hold.
    """
    if len(t) == 0:
        return
    # Latents of a set of zeros may lie anywhere, because every mean is 0.
    limit = LARGEST_VALUE if largest else math.inf
    low, high = torch.aminmax(t)
    numbers, excess = [low, high, size_of(z)], [LEAST_T - low, high - MOST_T]
    excess.append(numbers[2] - limit)
    if x_source is not None:
        numbers.append(size_of(x_source).to(z.device))
        excess.append(numbers[3] - MOST_FLOAT)
    problem: Failure = partial(_problem, name)
    if more is not None:
        problem = partial(_problem_or_more, problem, more.failure, len(excess))
        excess.append(more.bad.double())
    # A comparison with NaN is false.
    bad = ~(torch.stack(excess) <= 0)
    refuse(f"{name}: values", bad, lambda: torch.stack(numbers if more is None else [*numbers, more.value()]), problem)


def size_of(values: Tensor) -> Tensor:
    """Return the largest absolute value, a float64 scalar; NaN if one value is NaN."""
    return values.detach().abs().amax().double() if values.numel() else values.new_zeros((), dtype=torch.float64)


def _problem_or_more(
    problem: Failure, more: Callable[[float, str], Exception], last: int, check: int, value: float, where: str
) -> Exception:
    return problem(check, value, where) if check < last else more(value, where)


def _problem(name: str, check: int, value: float, where: str) -> InputError:
    if check < 2:
        beyond = "" if value <= 0 or math.isnan(value) else f" and between {LEAST_T:.3g} and {MOST_T:.3g}"
        return InputError(f"{name}: t must be finite and above 0{beyond}, got {value}{where}")
    if math.isfinite(value):
        return InputError(f"{name}: z holds {value:.3g}, float32 can square sums up to {LARGEST_VALUE:g}{where}")
    return InputError(f"{name}: {'z' if check == 2 else 'x_source'} holds a value that is not finite{where}")
