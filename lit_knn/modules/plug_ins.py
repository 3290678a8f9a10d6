"""Checks of the parts that users give to a training module: networks, solvers and metrics."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, first_line
from lit_knn.theory.noise import Process


def check_net(net: nn.Module, *labels: str) -> None:
    """Refuse a network that cannot be called as `net(z_scaled, noise_label, *labels)`, or has nothing to train."""
    _check_arguments(f"net={type(net).__name__}", net.forward, ["z_scaled", "noise_label", *labels])
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise InputError(f"net={type(net).__name__} has no parameters to train")


def check_solver(solver: Callable[..., Any], process: Process | None = None) -> None:
    """Refuse a solver that cannot step two numbers from t = 1/2 to t = 1/4, in a process if one is given."""
    z, t = torch.ones(1, 2), torch.tensor([0.5], dtype=torch.float64)
    arguments = {"z": z, "t": t, "t_next": t / 2, "posterior_mean": lambda z, t: torch.zeros_like(z)}
    name, stepped = _tried("solver", solver, arguments if process is None else {**arguments, "process": process})
    if _shape(stepped) != z.shape:
        raise InputError(f"{name} must return latents of the shape of z, {tuple(z.shape)}, got {_shape(stepped)}")


def check_metric(metric: Callable[..., Any]) -> None:
    """Refuse a metric that does not give one finite number for each of two items."""
    name, distance = _tried("metric", metric, {"student": torch.ones(2, 3), "teacher": -torch.ones(2, 3)})
    if _shape(distance) != (2,) or not distance.isfinite().all():
        raise InputError(f"{name} must return a finite distance of each item, (2,), got {_shape(distance)}")


def _tried(option: str, function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, Any]:
    """Return the name of a user's function, and what it returns; whatever it raises becomes an InputError."""
    name = f"{option}={getattr(function, '__qualname__', repr(function))}"
    _check_arguments(name, function, list(arguments))
    try:
        return name, function(*arguments.values())
    except Exception as error:  # A function of another kind may raise anything.
        raise InputError(f"{name} fails: {type(error).__name__}: {first_line(error)}") from error


def _check_arguments(name: str, function: Callable[..., Any], arguments: list[str]) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} does not take the arguments {', '.join(arguments)}") from error


def _shape(value: object) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
