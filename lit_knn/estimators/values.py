"""Checks the values of latents and noise levels, with one transfer from the GPU, or none inside a training step."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.deferred_checks import Failure, first_of, refuse
from lit_knn.errors import InputError
from lit_knn.reference.reference_set import LARGEST_VALUE

# Noise levels outside float32's range cannot have made latents in float32.
LEAST_T, MOST_T = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class Check(NamedTuple):
    """One more check.

    Attributes:
        bad: scalar bool, on the device of the latents, whether it fails.
        value: returns the value that failed, a scalar on the same device.
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
    # Latents of a set of zeros may lie anywhere, because every mean is 0.
    limit = LARGEST_VALUE if largest else float("inf")
    size, good_t = z.detach().abs(), (t >= LEAST_T) & (t <= MOST_T)
    flags = [~good_t.all(), ~z.isfinite().all(), (size > limit).any()]
    if x_source is not None:
        flags.append(~x_source.isfinite().all().to(z.device))
    if more is not None:
        flags.append(more.bad)

    def told() -> Tensor:
        level, most = first_of(t, ~good_t), size.max().double() if size.numel() else size.sum().double()
        values = [level, level, most, level][: len(flags) - (more is not None)]
        return torch.stack(values if more is None else [*values, more.value().double()])

    problem: Failure = partial(_problem, name)
    if more is not None:
        problem = partial(_problem_or_more, problem, more.failure, len(flags) - 1)
    refuse(f"{name}: values", torch.stack(flags), told, problem)


def _problem_or_more(
    problem: Failure, more: Callable[[float, str], Exception], last: int, check: int, value: float, where: str
) -> Exception:
    return problem(check, value, where) if check < last else more(value, where)


def _problem(name: str, check: int, value: float, where: str) -> InputError:
    beyond = "" if value <= 0 or value != value else f" and between {LEAST_T:.3g} and {MOST_T:.3g}"
    return InputError(
        (
            f"{name}: t must be finite and above 0{beyond}, got {value}{where}",
            f"{name}: z holds a value that is not finite{where}",
            f"{name}: z holds {value:.3g}, float32 can square sums up to {LARGEST_VALUE:g}{where}",
            f"{name}: x_source holds a value that is not finite{where}",
        )[check]
    )
