"""Denoisers of the paper's authors: github.com/plai-group/knn-score, which needs FAISS, and their later pspc."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_knn.estimators.counts import DEFAULT_K, DEFAULT_N, Count, of_images
from lit_knn.referee.adapters.adapter import Adapter, Origin
from lit_knn.referee.adapters.ddpm import OneLevelAdapter
from lit_knn.reference import ReferenceSet

KNN_SCORE = Origin("https://github.com/plai-group/knn-score", "3b4c85d5684ed5ad359c5f743bf59936b7ce868f")
PSPC = Origin("https://github.com/plai-group/pspc", "146fc35dff4f3e1602dc0a7d7af898b11ad4a6ba")


class KNNScore(Adapter):
    """The authors' `KNNDenoiser`, Algorithm 1 with an exact or 8-bit FAISS index on the CPU.

    Args:
        checkout: folder of a checkout of plai-group/knn-score.
        k: neighbours searched per z; null for their 2048, or N if that is less.
        n: draws per z, their `ref_size`; null for their 256.
        quantize: search in FAISS's SQ8.
    """

    origin, needs_pixels = KNN_SCORE, True
    referee_note = (
        "SNIS over n draws from the nearest-neighbour proposal, as in the paper's Algorithm 1, with exact likelihoods "
        "in float32; it fails if all k neighbours are equally likely, e.g. at k = 1."
    )
    k = Count(DEFAULT_K, of_images)
    n = Count(DEFAULT_N)

    def __init__(self, checkout: str, k: int | None = None, n: int | None = None, quantize: bool = False) -> None:
        super().__init__(checkout)
        self.k, self.n, self.quantize = k, n, quantize

    def _make(self) -> Any:
        made = import_module("training.denoisers").KNNDenoiser
        return made(Pixels(self.reference), ref_size=self.n, k=self.k, gpu=False, quantize=self.quantize)


class KNNScoreSTF(Adapter):
    """The authors' `STFDenoiser`, their version of the stable target field.

    Args:
        checkout: folder of a checkout of plai-group/knn-score.
        n: their `ref_size`; null for their 256.
        shared: average over images that all z of a batch share, their default.
    """

    origin, needs_pixels, uses_source = KNN_SCORE, True, True
    referee_note = (
        "Self-normalised average over n − B images that a batch of B shares, and each z's source (n − 1 images of its "
        "own and the source with shared=false); weights are divided by sum + 1e-6 and the mean is clamped to [−1, 1]."
    )
    n = Count(DEFAULT_N)

    def __init__(self, checkout: str, n: int | None = None, shared: bool = True) -> None:
        super().__init__(checkout)
        self.n, self.shared = n, shared

    def _make(self) -> Any:
        made = import_module("training.denoisers").STFDenoiser
        return made(Pixels(self.reference), ref_size=self.n, use_batch_as_ref=self.shared)

    def _mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        return self.theirs(z, t.float(), x)


class PSPCEmpirical(Adapter):
    """The `empirical` denoiser of PSPC, the exact mean over all images."""

    origin, needs_pixels, deterministic = PSPC, True, True
    referee_note = "The posterior mean over all images, streamed in float32 in batches of 100 images."

    def _make(self) -> Any:
        return import_module("pspc.denoisers").EmpiricalDenoiser(Pixels(self.reference))


class PSPCSquare(OneLevelAdapter):
    """The `pspc_sq` denoiser: posterior means of all square patches at a position, averaged where patches overlap.

    Args:
        checkout: folder of a checkout of plai-group/pspc.
        patch_sizes: side of the patches at each of as many noise levels from 80 down to 0.002, spaced as in EDM; a
            level in between takes the nearest. They use 32 32 32 32 32 32 32 23 15 11 7 5 3 3 3 3 3 3 for CIFAR-10.
    """

    origin, needs_pixels, deterministic = PSPC, True, True
    referee_note = (
        "Posterior means over the patches at each position, averaged where patches overlap; below the largest patch "
        "size it is no estimate of the posterior mean over the images."
    )
    # Its code takes the patch size of the first z of a batch, so a batch has one level; it may be of any size.
    rows = Count(2**62)

    def __init__(self, checkout: str, patch_sizes: Sequence[int]) -> None:
        super().__init__(checkout)
        self.patch_sizes = patch_sizes

    def _make(self) -> Any:
        made = import_module("pspc.denoisers").PSPCSquareDenoiser
        return made(Pixels(self.reference), torch.tensor(self.patch_sizes))

    def _mean_at(self, z: Tensor, level: Tensor) -> Tensor:
        return self.theirs(z, level.float().expand(len(z)))


class Pixels(Dataset[tuple[Any, int]]):
    """The uint8 images of a reference set, mirrored ones included, as the data set that code derived from EDM reads."""

    def __init__(self, reference: ReferenceSet) -> None:
        self.images, self.hflip = reference.images, reference.hflip
        self.image_shape = list(reference.shape)
        self.num_channels, self.resolution = reference.shape[0], reference.shape[-1]

    def __len__(self) -> int:
        return len(self.images) * (2 if self.hflip else 1)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for mirrored in (False, True) if self.hflip else (False,):
            for image in self.images:
                yield (image.flip(-1) if mirrored else image).cpu().numpy(), 0
