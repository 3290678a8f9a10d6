"""Distances between the outputs of student and teacher, which the losses of iCT and ECT minimise.

`PseudoHuber` is iCT's (Song & Dhariwal 2023), and `euclidean` is ECT's (Geng et al. 2024, arXiv 2406.14548).
`squared_euclidean` is for comparisons: the noise of targets moves its optimum least.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_knn.common.errors import check_positive, prefixed

Metric = Callable[[Tensor, Tensor], Tensor]
"""(a (B, *shape), b (B, *shape)) -> distance of each item (B,)."""


@dataclass(frozen=True)
class PseudoHuber:
    """iCT's metric d(a, b) = sqrt(‖a − b‖² + c²) − c over the whole vector of each item.

    Attributes:
        c: smoothing, c > 0; None for 0.00054·sqrt(d), which is 0.03 on CIFAR-10.
    """

    c: float | None = None

    def __post_init__(self) -> None:
        if self.c is not None:
            with prefixed("PseudoHuber"):
                check_positive(c=self.c)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the distance of each item of a and b, (B, *shape): (B,)."""
        difference = (a - b).flatten(1)
        c = 0.00054 * math.sqrt(difference.shape[1]) if self.c is None else self.c
        sq_norm = difference.square().sum(1)
        # sqrt(s + c²) − c would lose digits for small s. This form keeps them.
        return sq_norm / (torch.sqrt(sq_norm + c * c) + c)


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖a − b‖ over the whole vector of each item, (B,): ECT's metric, its adaptive weighting with c = 0.

    It is the limit c → 0 of `PseudoHuber`. Its gradient has length 1, but 0 where a = b.
    """
    return torch.linalg.vector_norm((a - b).flatten(1), dim=1)


def squared_euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖a − b‖² over the whole vector of each item, (B,).

    Its optimum is the mean of the teacher's outputs, so that the noise of targets moves it only through the teacher,
    whose output is no linear function of its input.
    """
    return (a - b).flatten(1).square().sum(1)
