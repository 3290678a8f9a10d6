"""The equivariant local score of Kamb and Ganguli (github.com/Kambm/convolutional_diffusion)."""

from importlib import import_module
from typing import Any

from torch import Tensor

from lit_knn.estimators.counts import Count
from lit_knn.referee.adapters.adapter import Origin
from lit_knn.referee.adapters.ddpm import Loader, OneLevelAdapter, alpha_bar

# Their code holds (latents · images · positions² · channels) float32: 16 images of 32x32 pixels need 0.1 GB per z.
LOADER_BATCH = 16


class KambEquivariant(OneLevelAdapter):
    """Their `LocalEquivBordersScoreModule`: the local equivariant score with boundary-broken equivariance.

    The adapter scales z to DDPM's process, gives the score the level of the call in place of its schedule, and solves
    it for the mean. It needs torchvision and matplotlib.

    Args:
        checkout: folder of a checkout of Kambm/convolutional_diffusion.
        size: edge p of the patches in pixels, odd and at least 3: their code fails for 1 and for even sizes.
        loader_batch: images per step. It changes the memory, and the result only by rounding.
    """

    origin = Origin("https://github.com/Kambm/convolutional_diffusion", "6a87f3f7c6c72474ee5cffda384c1af0277e63f7")
    referee_note = (
        "The posterior mean of each pixel over the patches around all pixels of the same overlap with the borders, in "
        "float32: a model of convolutional networks, no estimate of the posterior mean over the images."
    )
    deterministic = True
    # For patches as large as the images their code mixes the latents of a batch: it is right for one alone.
    rows = Count(1)
    loader_batch = Count(LOADER_BATCH)

    def __init__(self, checkout: str, size: int, loader_batch: int = LOADER_BATCH) -> None:
        super().__init__(checkout)
        self.size, self.loader_batch = size, loader_batch

    def _make(self) -> Any:
        # Their data loader needs a data set with a length, but only its batches are read. The labels are not used.
        made = import_module("utils.idealscore").LocalEquivBordersScoreModule
        model = made([()], kernel_size=self.size, batch_size=self.loader_batch, schedule=lambda beta: beta)
        model.trainloader = model.local_module.trainloader = Loader(self.reference, self.loader_batch, labelled=True)
        return model

    def _mean_at(self, z: Tensor, level: Tensor) -> Tensor:
        share = alpha_bar(level)
        scaled = share.sqrt().float() * z
        score = self.theirs((1 - share).float(), scaled, device=z.device)
        return (scaled + (1 - share).float() * score) / share.sqrt().float()
