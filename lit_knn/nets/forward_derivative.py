"""The derivative of a network along a direction, in forward mode."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@torch.no_grad()
def value_and_derivative(
    function: Callable[..., Tensor], point: tuple[Tensor, ...], direction: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return a function's value and its derivative along `direction`, in full precision and without gradient.

    Nothing is stored for a backward pass, so this needs little more memory than an evaluation without gradient.

    Args:
        function: maps tensors to one tensor.
        point: the tensors.
        direction: one tensor for each, of its shape.
    """
    # The derivative needs more digits than half precision has. The fused kernels of attention have none.
    full_precision = torch.autocast(point[0].device.type, enabled=False)
    with full_precision, sdpa_kernel(SDPBackend.MATH):
        return torch.func.jvp(function, point, direction)[:2]
