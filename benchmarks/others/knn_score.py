"""Denoisers of the paper's authors, github.com/plai-group/knn-score. Their code needs FAISS."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.others.checkout import OthersEstimator


class KNNScore(OthersEstimator):
    """Their `KNNDenoiser`: Algorithm 1, with an exact FAISS index on the CPU.

    Args:
        folder: a checkout of the project.
        k: neighbours searched for each z.
        n: images drawn for each z.
    """

    project, module, name = "plai-group/knn-score", "training.denoisers", "KNNDenoiser"

    def __init__(self, folder: Path, k: int, n: int) -> None:
        super().__init__(folder)
        self.k, self.n = k, n

    def make(self, their_class: Any) -> Any:
        images = PixelDataset(self.reference.images)
        return their_class(images, ref_size=self.n, k=self.k, gpu=False)

    def mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        return self.theirs(z, t)


class KNNScoreSTF(OthersEstimator):
    """Their `STFDenoiser`: B latents share n - B images, and each has its source.

    They divide the weights by their sum + 1e-6, and clamp the mean to [-1, 1].

    Args:
        folder: a checkout of the project.
        n: images averaged, the batch included.
    """

    project, module, name = "plai-group/knn-score", "training.denoisers", "STFDenoiser"
    uses_source = True

    def __init__(self, folder: Path, n: int) -> None:
        super().__init__(folder)
        self.n = n

    def make(self, their_class: Any) -> Any:
        return their_class(PixelDataset(self.reference.images), ref_size=self.n)

    def mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        return self.theirs(z, t, x)


class PixelDataset(Dataset[tuple[Any, int]]):
    """Images (N, C, H, W), uint8, as the data set that their code reads: arrays with a label."""

    def __init__(self, images: Tensor) -> None:
        self.images = images
        self.image_shape = list(images.shape[1:])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.images[i].numpy(), 0
