"""Checks of the parts that users give to a training module: networks, solvers and metrics."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, first_line
from lit_knn.theory.noise import Process


def check_net(owner: str, net: nn.Module, *labels: str) -> None:
    """Refuse a network that cannot be called as `net(z_scaled, noise_label, *labels)`, or has nothing to train.

    Args:
        owner: name of the model, for messages.
        net: the network.
        labels: names of the label arguments.
    """
    arguments = ("z_scaled", "noise_label", *labels)
    if not _takes(net.forward, len(arguments)):
        raise InputError(f"{owner}: net={type(net).__name__} does not take the arguments {', '.join(arguments)}")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise InputError(f"{owner}: net={type(net).__name__} has no parameters to train")


def check_solver(owner: str, solver: Callable[..., Any], *process: Process) -> None:
    """Refuse a solver that cannot step two numbers from t = 1/2 to t = 1/4, in a process if one is given."""
    z, t = torch.ones(1, 2), torch.tensor([0.5], dtype=torch.float64)
    name = getattr(solver, "__qualname__", repr(solver))
    arguments = ("z", "t", "t_next", "posterior_mean", *(["process"] if process else []))
    if not _takes(solver, len(arguments)):
        raise InputError(f"{owner}: solver={name} does not take the arguments {', '.join(arguments)}")
    try:
        stepped = solver(z, t, t / 2, lambda z, t: torch.zeros_like(z), *process)
    except Exception as error:  # A function that is no solver may raise anything.
        raise InputError(f"{owner}: solver={name} fails: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(stepped, Tensor) or stepped.shape != z.shape:
        got = tuple(stepped.shape) if isinstance(stepped, Tensor) else type(stepped).__name__
        raise InputError(f"{owner}: solver={name} must return latents of the shape of z, {tuple(z.shape)}, got {got}")


def check_metric(owner: str, metric: Callable[..., Any]) -> None:
    """Refuse a metric that does not give one finite number for each of two items."""
    a = torch.ones(2, 3)
    name = getattr(metric, "__qualname__", repr(metric))
    if not _takes(metric, 2):
        raise InputError(f"{owner}: metric={name} does not take two arguments")
    try:
        distance = metric(a, -a)
    except Exception as error:  # A function that is no metric may raise anything.
        raise InputError(f"{owner}: metric={name} fails: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(distance, Tensor) or distance.shape != (2,) or not distance.isfinite().all():
        got = tuple(distance.shape) if isinstance(distance, Tensor) else type(distance).__name__
        raise InputError(f"{owner}: metric={name} must return a finite distance of each item, (2,), got {got}")


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except (TypeError, ValueError):
        return False
    return True
