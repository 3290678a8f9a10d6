"""Preconditioning turns a raw network into a consistency function (Song et al. 2023) or a denoiser (EDM)."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_knn.common.errors import check_is
from lit_knn.nets.base import labels_for, tensor_of_net
from lit_knn.theory.noise import per_item


class Coefficients(NamedTuple):
    """Coefficients that turn a network F into c_skip·z + c_out·F(c_in·z, c_noise). Each is (B,), in the dtype of t."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


def coefficients(t: Tensor, sigma_data: float, sigma_min: float = 0.0) -> Coefficients:
    """Return coefficients that make f(z, sigma_min) = z exactly. At sigma_min, c_skip = 1 and c_out = 0.

    Args:
        t: (B,), noise level, t >= sigma_min.
        sigma_data: standard deviation of the data.
        sigma_min: smallest noise level t_min. 0 gives EDM's coefficients (Karras et al. 2022, Table 1), and at t = 0
            the c_noise of 1.
    """
    total = (t.square() + sigma_data**2).sqrt()
    above_min = t - sigma_min
    return Coefficients(
        c_skip=sigma_data**2 / (above_min.square() + sigma_data**2),
        c_out=sigma_data * above_min / total,
        c_in=1 / total,
        # The network's output does not count at t = 0, but it must be finite, and ln 0 is not.
        c_noise=torch.where(t == 0, 1.0, t).log() / 4,
    )


def preconditioned(
    net: nn.Module,
    c: Coefficients,
    z: Tensor,
    class_label: Tensor | None,
    augment_label: Tensor | None = None,
) -> Tensor:
    """Return c_skip·z + c_out·F(c_in·z, c_noise, *labels), (B, *shape) float32.

    Args:
        net: F, the raw network.
        c: the coefficients.
        z: (B, *shape).
        class_label: (B,), or None.
        augment_label: (B, augment_dim), or None.
    """
    c_skip = per_item(c.c_skip.float(), z)
    c_out = per_item(c.c_out.float(), z)
    c_in = per_item(c.c_in.float(), z)

    z = z.float()
    labels = [labels_for(net, class_label, z)]
    # A network without augmentation labels need not take a second label.
    if augment_label is not None:
        labels.append(augment_label)
    output = tensor_of_net(net, net(c_in * z, c.c_noise.float(), *labels))

    return c_skip * z + c_out * output.to(torch.float32)


class ConsistencyFunction(nn.Module):
    """f_θ(z, t): a raw network under the consistency preconditioning.

    Args:
        net: any module `net(z_scaled, noise_label, class_label=None)`, with `noise_label` (B,) = ln(t)/4.
        sigma_data: standard deviation of the data.
        sigma_min: smallest noise level t_min, where f is the identity; 0 makes f EDM's denoiser at all t > 0.
    """

    def __init__(self, net: nn.Module, sigma_data: float = 0.5, sigma_min: float = 0.002) -> None:
        super().__init__()
        check_is(nn.Module, net, "network")
        self.net = net
        self.sigma_data = sigma_data
        self.sigma_min = sigma_min

    def forward(self, z: Tensor, t: Tensor, class_label: Tensor | None = None) -> Tensor:
        """Map z (B, *shape) at t (B,) to the start of its PF-ODE trajectory, (B, *shape), float32.

        The coefficients are computed in float64: t − t_min must be exactly 0 at t = t_min.
        """
        # Round sigma_min to the type of t, because 0.002 in float32 differs from 0.002 in float64.
        sigma_min = torch.tensor(self.sigma_min, dtype=t.dtype).item()
        c = coefficients(t.double(), self.sigma_data, sigma_min)
        return preconditioned(self.net, c, z, class_label)


class EDMPrecond(nn.Module):
    """D_θ(z, σ): a raw network under EDM's preconditioning. It is a denoiser: it estimates E[x | z, σ] (Eq. 8).

    Its `state_dict` uses the names of the published EDM checkpoints.

    Args:
        model: any module `model(z_scaled, noise_label, class_label=None)`, with `noise_label` (B,) = ln(σ)/4. To use
            augmentation labels, it must take `augment_label` too.
        sigma_data: standard deviation of the data.
    """

    fp16 = False  # whether the model runs under autocast to float16
    drops_labels = True  # whether its training hid some class labels

    def __init__(self, model: nn.Module, sigma_data: float = 0.5) -> None:
        super().__init__()
        self.model = model
        self.sigma_data = sigma_data

    def forward(
        self,
        z: Tensor,
        sigma: Tensor,
        class_label: Tensor | None = None,
        augment_label: Tensor | None = None,
    ) -> Tensor:
        """Map z (B, *shape) at sigma, (B,), (B, 1, …, 1) or a number, to the denoised (B, *shape), float32."""
        levels = per_item(sigma, z).flatten().double().expand(len(z))
        c = coefficients(levels, self.sigma_data)
        # `autocast(enabled=self.fp16)` would be wrong, because a disabled autocast switches off the trainer's autocast.
        with torch.autocast(z.device.type, torch.float16) if self.fp16 else nullcontext():
            return preconditioned(self.model, c, z, class_label, augment_label=augment_label)
