"""The target of the stable target field by its authors (github.com/Newbeeer/stf)."""

from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.estimators.counts import DEFAULT_N, Count, of_images
from lit_knn.referee.adapters.adapter import Adapter, Origin, stand_in

# Their decorator, which stores source text in pickles, needs more packages and computes nothing.
PERSISTENCE = stand_in("torch_utils.persistence", persistent_class=lambda cls: cls)


class STFTarget(Adapter):
    """`EDMLoss.stf_targets` of the authors of STF, with their reference batch: B sources, then n − B other images.

    The images other than the sources are drawn without repetition, as their data loader draws them in an epoch. Their
    code imports SciPy.

    Args:
        checkout: folder of a checkout of Newbeeer/stf.
        n: size of the reference batch, their `rbatch`; null for 256. Theirs are 512 to 4,096.
    """

    origin = Origin("https://github.com/Newbeeer/stf", "7a9f2deb7583a9f39c65066411fcee92bdd9cdc4")
    referee_note = (
        "Self-normalised average over one reference batch of n images that all z of a batch share and that begins with "
        "the sources of all of them; the weights are computed in float32."
    )
    uses_source = True
    stand_ins: ClassVar = {
        "torch_utils": stand_in("torch_utils", persistence=PERSISTENCE),
        PERSISTENCE.__name__: PERSISTENCE,
    }
    n = Count(DEFAULT_N, of_images)

    def __init__(self, checkout: str, n: int | None = None) -> None:
        super().__init__(checkout)
        self.n = n

    def _make(self) -> Any:
        return import_module("training.loss").EDMLoss()

    def _mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        if x is None or len(z) > self.n:
            raise InputError(f"STFTarget: a batch of {len(z)} needs n >= {len(z)} and all x_source; n={self.n}")
        drawn = torch.randperm(self.reference.N, device=z.device)[: self.n - len(z)]
        batch = torch.cat([x, self.reference.take(drawn)])
        return self.theirs.stf_targets(t.float(), z, batch).reshape(z.shape)
