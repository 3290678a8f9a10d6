"""Denoisers of the paper's authors: github.com/plai-group/knn-score, which needs FAISS."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_knn.common.errors import InputError
from lit_knn.estimators.counts import DEFAULT_K, DEFAULT_N, Count, of_images
from lit_knn.referee.adapters.adapter import Adapter, Origin
from lit_knn.reference import ReferenceSet

KNN_SCORE = Origin("https://github.com/plai-group/knn-score", "3b4c85d5684ed5ad359c5f743bf59936b7ce868f")


class KNNScore(Adapter):
    """The authors' `KNNDenoiser`, Algorithm 1 with an exact or 8-bit FAISS index on the CPU.

    Args:
        checkout: folder of a checkout of plai-group/knn-score.
        k: neighbours searched per z; null for their 2048, or N if that is less.
        n: draws per z, their `ref_size`; null for their 256.
        quantize: search in FAISS's SQ8.
    """

    origin = KNN_SCORE
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

    origin, uses_source = KNN_SCORE, True
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


class Pixels(Dataset[tuple[Any, int]]):
    """The uint8 images of a reference set, mirrored ones included, as the data set that code derived from EDM reads."""

    def __init__(self, reference: ReferenceSet) -> None:
        if reference.images.dtype != torch.uint8:
            raise InputError(f"KNNScore: its code needs uint8 images, got {reference.images.dtype}")
        self.images, self.hflip = reference.images, reference.hflip
        self.image_shape = list(reference.shape)
        self.num_channels, self.resolution = reference.shape[0], reference.shape[-1]

    def __len__(self) -> int:
        return len(self.images) * (2 if self.hflip else 1)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for mirrored in (False, True) if self.hflip else (False,):
            for image in self.images:
                yield (image.flip(-1) if mirrored else image).cpu().numpy(), 0
