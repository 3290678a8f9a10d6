"""How near a network is to analytic estimators at latents of new images: the direction in which it generalises."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning_curves.kind import NEIGHBOURHOOD, LatentKind, Latents
from benchmarks.learning_curves.regression_kinds import Regression
from lit_knn.common.rng import keyed_default_rng
from lit_knn.estimators import Estimator, Exact, PatchPosterior, Smoothed
from lit_knn.reference import ReferenceSet

# No more latents, because analytic estimators take long on many images.
AGREEMENT_LATENTS = 512
# The estimators by column. Towards the exact mean a network memorises. The others sample new images.
ANALYTIC: dict[str, Callable[[], Estimator]] = {
    "distance_to_exact": Exact,
    "distance_to_patches": PatchPosterior,
    "distance_to_smoothed": lambda: Smoothed(Exact(), width=0.2, n=16),
}


class Agreement:
    """The distances of a network to analytic estimators of the training images, at fixed latents of new images.

    Nothing is measured for a module whose output is no posterior mean, without new images, and in a set by class.

    Args:
        kind: the kind of module.
        new: latents of images that no run trains on, or None.
        reference: the training images.
    """

    def __init__(self, kind: LatentKind, new: Latents | None, reference: ReferenceSet) -> None:
        self.kind = kind
        self.outputs: dict[str, Tensor] = {}
        if new is None or new.label is not None or not isinstance(kind, Regression):
            return

        x, z, t, lower = (part[:AGREEMENT_LATENTS] for part in (new.x, new.z, new.t, new.lower))
        self.latents = Latents(x, z, t, lower, None)
        for column, make in ANALYTIC.items():
            # `Smoothed` draws its neighbourhood.
            with keyed_default_rng(torch.device("cpu"), NEIGHBOURHOOD):
                self.outputs[column] = kind.exact_output(self.latents, make().bind(reference))

    def distances(self, module: Any) -> dict[str, float]:
        """Return the mean distance to each estimator, by column, with the weight of the loss; NaN if not measured."""
        row = dict.fromkeys(ANALYTIC, math.nan)
        for column, output in self.outputs.items():
            row[column] = self.kind.errors(module, self.latents, output).mean().item()
        return row
