"""The error of an average velocity, and the guidance of its target (MeanFlow, Geng et al. 2025)."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_knn.modules.shared_dropout import SharedDropout
from lit_knn.nets.average_velocity import AverageVelocity
from lit_knn.nets.base import NO_CLASS
from lit_knn.nets.forward_derivative import value_and_derivative
from lit_knn.theory.noise import per_item


class LabelledFlow(NamedTuple):
    """An average velocity with the labels of a batch."""

    flow: AverageVelocity
    class_label: Tensor | None  # (B,) int64, `NO_CLASS` for an item without a class
    augment_label: Tensor | None  # (B, label_dim)

    def average(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """Return u(z, r, t), (B, *shape)."""
        return self.flow(z, t, self.class_label, r, augment_label=self.augment_label)

    @torch.no_grad()
    def velocity(self, z: Tensor, t: Tensor) -> Tensor:
        """Return the network's velocity u(z, t, t), (B, *shape), without gradient."""
        return self.flow(z, t, self.class_label, augment_label=self.augment_label)


def average_velocity_error(
    average: Callable[[Tensor, Tensor, Tensor], Tensor],
    z: Tensor,
    r: Tensor,
    t: Tensor,
    velocity: Tensor,
    tangent: Tensor,
    dropout: SharedDropout | None = None,
    two_passes: bool = False,
) -> Tensor:
    """Compute ‖u − û‖²/d of each item, (B,), where the target û = v̂ − (t − r)·du/dt has no gradient.

    Args:
        average: u(z, r, t), the average velocity from r to t.
        z: (B, *shape), latents at t.
        r: (B,) float64, at most t.
        t: (B,) float64.
        velocity: (B, *shape), v̂, the velocity at t.
        tangent: (B, *shape), the velocity of z in the derivative du/dt.
        dropout: the mask of u and of the derivative; None draws masks from the default generator.
        two_passes: compute u and the derivative in passes of their own; else in one pass.
    """
    masks = nullcontext if dropout is None else dropout.masks
    # Along the flow z moves by the tangent and t by 1, while r stays.
    directions = tangent, torch.zeros_like(r), torch.ones_like(t)
    # Autocast keeps the weights that it has cast. Older PyTorch would reuse those that were cast without gradients.
    torch.clear_autocast_cache()
    if two_passes:
        with masks():
            u = average(z, r, t)
        with masks():
            derivative = value_and_derivative(average, (z, r, t), directions)[1]
    else:
        # The fused kernels of attention have no forward derivative, and a CPU's group norm mixes number types in it.
        with sdpa_kernel(SDPBackend.MATH), masks(), torch.autocast("cpu", enabled=False):
            u, derivative = torch.func.jvp(average, (z, r, t), directions)[:2]

    target = velocity - per_item(t - r, z).to(z.dtype) * derivative.detach()
    return (u - target).square().flatten(1).mean(1)


def guidance_of_velocities(
    labelled: LabelledFlow, z: Tensor, t: Tensor, weight: float, kappa: float
) -> Callable[[Tensor], Tensor]:
    """Return a function that turns a velocity (B, *shape) into the guided one. Items without a class keep theirs.

    The guided velocity is weight·v + kappa·u(z, t, t; class) + (1 − weight − kappa)·u(z, t, t; none).

    Args:
        labelled: the average velocity and the labels.
        z: (B, *shape), latents at t.
        t: (B,) float64.
        weight: weight of the velocity of the class.
        kappa: weight of the network's own velocity of the class, see `LitMeanFlow`.
    """
    class_label = labelled.class_label
    if class_label is None or (weight == 1 and kappa == 0):
        return lambda velocity: velocity

    no_class = torch.full_like(class_label, NO_CLASS)
    of_class = labelled.velocity(z, t)
    of_none = labelled._replace(class_label=no_class).velocity(z, t)
    # The terms that do not depend on the velocity.
    rest = kappa * of_class + (1 - weight - kappa) * of_none
    unlabelled = per_item(class_label == NO_CLASS, z)
    return lambda velocity: torch.where(unlabelled, velocity, weight * velocity + rest)
