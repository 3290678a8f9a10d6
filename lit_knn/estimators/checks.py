"""Checks of what an estimator gets and of what it returns. Unchecked, a wrong value would spoil a training silently."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from lit_knn.common.deferred_checks import deferring
from lit_knn.common.errors import InputError
from lit_knn.estimators.query import Query
from lit_knn.reference.images import LARGEST_VALUE
from lit_knn.theory.noise import Process, per_item

if TYPE_CHECKING:
    from lit_knn.estimators.hooks import Hooks

# Latents in float32 cannot have a noise level outside the range of float32.
LEAST_T, MOST_T = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def refusal(estimator: "Hooks", problem: str) -> InputError:
    """Return the error to raise for a call: it names the estimator's class and says what is wrong."""
    return InputError(f"{type(estimator).__name__}: {problem}")


def checked_query(
    estimator: "Hooks",
    z: Tensor,
    t: Tensor | float,
    x_source: Tensor | None,
    generator: Generator | None,
    labels: Tensor | None = None,
) -> Query:
    """Check the arguments of a call, and return them as a query.

    Args:
        estimator: gets the call.
        z: as in `Estimator.posterior_mean`, like the others.
        t: noise level.
        x_source: clean x of each z.
        generator: source of randomness.
        labels: class of each z.

    Raises:
        InputError: a wrong type, shape, device or value.
    """
    if not isinstance(z, Tensor) or not z.is_floating_point():
        kind = z.dtype if isinstance(z, Tensor) else type(z).__name__
        raise refusal(estimator, f"z must be float, got {kind}")

    if estimator.needs_reference:
        _check_fits_set(estimator, z)
    if x_source is not None:
        _check_source(estimator, x_source, z)
    if labels is not None:
        _check_labels(estimator, labels, z)

    if generator is not None and not isinstance(generator, Generator):
        advice = "a torch.Generator, such as torch.Generator().manual_seed(0)"
        raise refusal(estimator, f"generator must be {advice}, got {generator!r:.80}")

    t = per_item(t, z).double()
    if t.ndim > 0 and t.shape[0] not in (1, len(z)):
        raise refusal(
            estimator, f"t must be a scalar or ({len(z)},), got {tuple(t.flatten().shape)}"
        )

    # Reading values from a GPU would wait for it. A training step there checks only its loss, which wrong values make
    # wrong, too.
    if t.numel() > 0 and not (t.is_cuda and deferring()):
        _check_values(estimator, z, t, x_source)
    return Query(z, t.expand(len(z), *[1] * (z.ndim - 1)), x_source, generator, labels)


def _check_fits_set(estimator: "Hooks", z: Tensor) -> None:
    """Raise InputError if z has not the shape of the bound set's images, or is on another device."""
    reference = estimator.reference
    if z.ndim == 1 or z.shape[1:] != reference.shape:
        shape = ", ".join(str(size) for size in reference.shape)
        raise refusal(estimator, f"z must be (B, {shape}), got {tuple(z.shape)}")

    device = reference.images.device
    if z.device != device:
        raise refusal(
            estimator, f"z is on {z.device}, the reference set on {device}: call reference.to()"
        )


def _check_source(estimator: "Hooks", x_source: Tensor, z: Tensor) -> None:
    """Raise InputError if `x_source` has not the shape of z, or is not float."""
    if not isinstance(x_source, Tensor):
        raise refusal(estimator, f"x_source must be a tensor, got {type(x_source).__name__}")
    if x_source.shape != z.shape:
        raise refusal(
            estimator, f"x_source has shape {tuple(x_source.shape)}, z has {tuple(z.shape)}"
        )
    if not x_source.is_floating_point():
        raise refusal(estimator, f"x_source must be float, in model space, got {x_source.dtype}")


def _check_labels(estimator: "Hooks", labels: Tensor, z: Tensor) -> None:
    """Raise InputError if the estimator takes no labels, or if they are not (B,) int64."""
    if not estimator.takes_labels:
        by_class = f"ByClass({type(estimator).__name__}(...))"
        raise refusal(
            estimator, f"labels are given, but it averages over all classes; use {by_class}"
        )

    is_tensor = isinstance(labels, Tensor)
    if not is_tensor or labels.dtype != torch.int64 or labels.shape != (len(z),):
        kind = f"{tuple(labels.shape)} {labels.dtype}" if is_tensor else type(labels).__name__
        raise refusal(estimator, f"labels must be ({len(z)},) int64, got {kind}")


def _check_values(estimator: "Hooks", z: Tensor, t: Tensor, x_source: Tensor | None) -> None:
    """Raise InputError for values that are not finite, are too large for float32, or are no noise level."""
    sizes = {"z": largest_size(z)}
    if x_source is not None:
        sizes["x_source"] = largest_size(x_source)

    # One transfer brings all values from a GPU. Comparisons with NaN are false, so each tests what must be true.
    low, high, *values = torch.stack([*torch.aminmax(t), *sizes.values()]).tolist()
    if not (low >= LEAST_T and high <= MOST_T):
        value = high if low >= LEAST_T else low
        between = f" and between {LEAST_T:.3g} and {MOST_T:.3g}" if value > 0 else ""
        raise refusal(estimator, f"t must be finite and above 0{between}, got {value}")

    for name, size in zip(sizes, values, strict=True):
        if not math.isfinite(size):
            raise refusal(estimator, f"{name} holds a value that is not finite")
        if size > LARGEST_VALUE:
            limit = f"float32 can square sums up to {LARGEST_VALUE:g}"
            raise refusal(estimator, f"{name} holds {size:.3g}, {limit}")


def checked_mean(estimator: "Hooks", mean: object, z: Tensor) -> Tensor:
    """Return the mean of a hook in the dtype of `z`. Raises InputError if it is not finite, or does not fit `z`.

    Args:
        estimator: the error names its class.
        mean: what the hook returned.
        z: (B, *shape), the latents of the call.
    """
    if not isinstance(mean, Tensor) or mean.shape != z.shape or mean.device != z.device:
        result = (
            f"{tuple(mean.shape)} on {mean.device}"
            if isinstance(mean, Tensor)
            else type(mean).__name__
        )
        expected = f"{tuple(z.shape)} on {z.device}"
        raise refusal(estimator, f"the posterior mean must be a tensor {expected}, got {result}")

    # On a GPU this check would make the CPU wait. There a mean that is not finite is found later: by the check of the
    # next call's input, or in training by the check of the loss.
    if not mean.is_cuda and not largest_size(mean) < torch.inf:
        raise refusal(estimator, "the estimate of the posterior mean is not finite")
    return mean.to(z.dtype)


def time_of_process(estimator: "Hooks", query: Query, process: Process) -> Tensor:
    """Return the times of a query, (B,), float64. Raises InputError if the process has no noise level at one of them.

    Args:
        estimator: the error names its class.
        query: its t are times of `process`.
        process: the noise process.
    """
    t = query.t.flatten()
    sigma = process.sigma(t)
    bad = ~((sigma > 0) & sigma.isfinite())
    if bad.any():
        time = t[bad][0].item()
        raise refusal(estimator, f"{type(process).__name__} has no finite noise level at t={time}")
    return t


def largest_size(values: Tensor) -> Tensor:
    """Return the largest absolute value, a float64 scalar; NaN if one value is NaN."""
    if values.numel() == 0:
        return values.new_zeros((), dtype=torch.float64)
    return values.detach().abs().amax().double()


def check_needs_no_source(option: str, estimator: "Hooks", made_from: str) -> None:
    """Raise InputError if an estimator uses the image that z was made from, where z is made from something else.

    Args:
        option: the option that the estimator is given as.
        estimator: the estimator.
        made_from: what z is made from, in words.
    """
    if estimator.uses_source:
        reason = f"uses the image that z was made from, but z is made from {made_from}"
        raise InputError(f"{option}: {type(estimator).__name__} {reason}")
