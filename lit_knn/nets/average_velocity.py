"""The network of a mean flow: the average velocity between two times, from any network with augmentation labels."""

import math

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.nets.base import labels_for, tensor_of_net

GAP_FEATURES = 8
"""Number of augmentation labels that hold the second time."""


class AverageVelocity(nn.Module):
    """u_θ(z, r, t): the average of the velocity over the times from r to t, on the straight path z = (1 − t)x + tε.

    A step from t to r is z − (t − r)·u (Geng et al. 2025, arXiv 2505.13447). The network gets t and t − r, the pair
    that is best in their Table 1c. Its noise label is 4t − 2, which is finite at t = 1 and has about the range of
    ln(σ)/4. Its first augmentation labels are cos(πk(t − r)), k = 1 … 8, because smooth functions of t − r are sums of
    them. Both labels are our choice.

    Args:
        model: any module `model(z, noise_label, class_label, augment_label)` with `augment_dim` of at least 8; the rest
            of its augmentation labels are for augmentation, and are zeros if none are given.

    Raises:
        InputError: the network has too few augmentation labels.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.augment_dim = getattr(model, "augment_dim", 0)
        if self.augment_dim < GAP_FEATURES:
            needs = f"a mean flow needs {GAP_FEATURES} for time r"
            raise InputError(f"the net has augment_dim={self.augment_dim}; {needs}")

    def forward(
        self,
        z: Tensor,
        t: Tensor,
        class_label: Tensor | None = None,
        r: Tensor | None = None,
        augment_label: Tensor | None = None,
    ) -> Tensor:
        """Map z (B, *shape) at t and r <= t, (B,) or () in [0, 1], to u, (B, *shape) in the type of z.

        Without `r`, it is t, and u is the velocity itself. `augment_label` is (B, augment_dim − 8).
        """
        t = t.to(z.device).expand(len(z))
        gap = torch.zeros_like(t)
        if r is not None:
            gap = t - r.to(z.device)

        waves = torch.arange(1, GAP_FEATURES + 1, device=z.device)
        features = torch.cos(math.pi * waves * gap[:, None]).to(z.dtype)
        if augment_label is None:
            augment_label = features.new_zeros(len(z), self.augment_dim - GAP_FEATURES)
        augment_label = torch.cat([features, augment_label.to(z.dtype)], dim=1)

        class_label = labels_for(self.model, class_label, z)
        noise_label = (4 * t - 2).to(z.dtype)
        output = self.model(z, noise_label, class_label, augment_label)
        return tensor_of_net(self.model, output).to(z.dtype)
