"""Weighted sums of images that come in pieces."""

import torch
from torch import Tensor

from lit_knn.estimators.centred import CentredImages
from lit_knn.index.precision import add_product

# float32 adds up about this many terms, and float64 adds up these partial sums.
TERMS = 4096


class WeightedSum:
    """Accumulates Σ w and Σ w x over pieces of images, for b latents."""

    def __init__(self, images: CentredImages, b: int) -> None:
        rows = b * images.halves
        device = images.part.device
        self.images = images
        self.total = torch.zeros(rows, 1, dtype=torch.float64, device=device)
        self.sum = torch.zeros(rows, images.part.d, dtype=torch.float64, device=device)
        self.recent = torch.zeros_like(self.sum, dtype=torch.float32)
        self.terms = 0

    def add(self, weights: Tensor, y: Tensor) -> None:
        """Add the terms of images y (n, d), not centred, with the weights (b · halves, n)."""
        self.total += weights.sum(1, keepdim=True)
        add_product(self.recent, weights, y)

        self.terms += len(y)
        if self.terms >= TERMS:
            self.sum += self.recent
            self.recent.zero_()
            self.terms = 0

    def result(self) -> tuple[Tensor, Tensor]:
        """Return Σ w, (b, 1), and Σ w x, (b, d), float64."""
        images = self.images
        self.sum += self.recent
        # x = offset + unit · (y − shift).
        self.sum.sub_(images.shift * self.total).mul_(images.unit)
        if isinstance(images.offset, Tensor):
            self.sum += images.offset.flatten() * self.total
        if images.halves == 1:
            return self.total, self.sum

        # The second half has the weights of the mirror images, but sums the images themselves.
        halves = self.sum.view(-1, 2, *images.part.shape)
        both = halves[:, 0] + halves[:, 1].flip(-1)
        return self.total.view(-1, 2).sum(1, keepdim=True), both.flatten(1)
