"""Denoisers of Patch Set Posterior Composites (github.com/plai-group/pspc)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.estimators.counts import check_count
from lit_knn.referee.adapters.adapter import Adapter, check_pixels, check_square
from lit_knn.referee.adapters.checkout import Load, Origin
from lit_knn.referee.adapters.knn_score import Pixels
from lit_knn.referee.adapters.levels import by_level

ORIGIN = Origin(
    "https://github.com/plai-group/pspc",
    "146fc35dff4f3e1602dc0a7d7af898b11ad4a6ba",
    {
        "pspc/denoisers.py": "3d6996076fa5db495a2491e697fb647735ff3e455c2cde095632f2ecc4687919",
        "pspc/utils.py": "048c987ce82b223e66f3769fa12f111efec4ccd00c6f5de97843a5aeabc82e44",
    },
)
MODULE = "pspc.denoisers"


class PSPCEmpirical(Adapter):
    """The `empirical` denoiser of PSPC, the exact mean over all images.

    Args:
        checkout: folder of a checkout of plai-group/pspc.
    """

    origin = ORIGIN
    referee_note = "The posterior mean over all images, streamed in float32 in batches of 100 images."
    deterministic = True

    def _make(self, load: Load) -> Any:
        check_pixels(self)
        return load(MODULE).EmpiricalDenoiser(Pixels(self.reference))

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        with self._running(generator):
            return self.theirs(z.float(), t.flatten().float())


class PSPCSquare(Adapter):
    """The `pspc_sq` denoiser: posterior means of all square patches at a position, averaged where patches overlap.

    Args:
        checkout: folder of a checkout of plai-group/pspc.
        patch_sizes: side of the patches at each of as many noise levels from 80 down to 0.002, spaced as in EDM; a
            level in between takes the nearest. They use 32 32 32 32 32 32 32 23 15 11 7 5 3 3 3 3 3 3 for CIFAR-10.
    """

    origin = ORIGIN
    referee_note = (
        "Posterior means over the patches at each position, averaged where patches overlap; below the largest patch "
        "size it is no estimate of the posterior mean over the images."
    )
    deterministic = True

    def __init__(self, checkout: str, patch_sizes: Sequence[int]) -> None:
        super().__init__(checkout)
        self.patch_sizes = [check_count("PSPCSquare", "patch_sizes", size) for size in patch_sizes]
        if len(self.patch_sizes) < 2:
            raise InputError(f"PSPCSquare: patch_sizes must have at least two sizes, got {patch_sizes}")

    def _make(self, load: Load) -> Any:
        check_pixels(self)
        check_square(self)
        side = self.reference.shape[-1]
        if max(self.patch_sizes) > side:
            raise InputError(f"PSPCSquare: patch_sizes has {max(self.patch_sizes)}, the images have only {side} pixels")
        return load(MODULE).PSPCSquareDenoiser(Pixels(self.reference), torch.tensor(self.patch_sizes))

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        # Its code takes the patch size of the first z of a batch.
        with self._running(generator):
            return by_level(
                z, t.flatten(), len(z), lambda z, level: self.theirs(z.float(), level.float().expand(len(z)))
            )
