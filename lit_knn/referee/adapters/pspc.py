"""Denoisers of Patch Set Posterior Composites (github.com/plai-group/pspc)."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lit_knn.estimators.counts import Count
from lit_knn.referee.adapters.adapter import Adapter
from lit_knn.referee.adapters.checkout import Origin
from lit_knn.referee.adapters.ddpm import OneLevelAdapter
from lit_knn.referee.adapters.knn_score import Pixels

ORIGIN = Origin("https://github.com/plai-group/pspc", "146fc35dff4f3e1602dc0a7d7af898b11ad4a6ba")
MODULE = "pspc.denoisers"


class PSPCEmpirical(Adapter):
    """The `empirical` denoiser of PSPC, the exact mean over all images.

    Args:
        checkout: folder of a checkout of plai-group/pspc.
    """

    origin, needs_pixels = ORIGIN, True
    referee_note = "The posterior mean over all images, streamed in float32 in batches of 100 images."
    deterministic = True

    def _make(self) -> Any:
        return import_module(MODULE).EmpiricalDenoiser(Pixels(self.reference))


class PSPCSquare(OneLevelAdapter):
    """The `pspc_sq` denoiser: posterior means of all square patches at a position, averaged where patches overlap.

    Args:
        checkout: folder of a checkout of plai-group/pspc.
        patch_sizes: side of the patches at each of as many noise levels from 80 down to 0.002, spaced as in EDM; a
            level in between takes the nearest. They use 32 32 32 32 32 32 32 23 15 11 7 5 3 3 3 3 3 3 for CIFAR-10.
    """

    origin, needs_pixels = ORIGIN, True
    referee_note = (
        "Posterior means over the patches at each position, averaged where patches overlap; below the largest patch "
        "size it is no estimate of the posterior mean over the images."
    )
    deterministic = True
    # Its code takes the patch size of the first z of a batch, so a batch has one level; it may be of any size.
    rows = Count(2**62)

    def __init__(self, checkout: str, patch_sizes: Sequence[int]) -> None:
        super().__init__(checkout)
        self.patch_sizes = patch_sizes

    def _make(self) -> Any:
        return import_module(MODULE).PSPCSquareDenoiser(Pixels(self.reference), torch.tensor(self.patch_sizes))

    def _mean_at(self, z: Tensor, level: Tensor) -> Tensor:
        return self.theirs(z, level.float().expand(len(z)))
