"""The images of a reference set: stored once, gathered and streamed in model space."""

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.transforms import outside_transforms
from lit_knn.reference.images import (
    STORED_TYPES,
    check_images,
    chunk_rows,
    expand_labels,
    images_of,
    largest_value,
    stored_chunks,
    tensor_of,
)
from lit_knn.reference.row_view import RowView

T = TypeVar("T")


class ImageSet:
    """Images (or any vectors), stored in their own type and returned as float32 in model space.

    `ReferenceSet` explains the arguments and attributes.
    """

    def __init__(
        self,
        images: Tensor | np.ndarray | RowView,
        hflip: bool,
        labels: Tensor | np.ndarray | None,
        sha256: str | None,
    ) -> None:
        if isinstance(images, RowView):
            # A view has those attributes and methods of a tensor that this class uses.
            tensor = cast(Tensor, images)
        else:
            tensor = tensor_of(images).detach()
        check_images(tensor, hflip)

        # Check values after the conversion, because a float64 value may be too large for float32.
        self.images = tensor if tensor.dtype in STORED_TYPES else tensor.float()
        self.largest = largest_value(self.images)
        self.hflip = hflip
        self.shape = tuple(tensor.shape[1:])
        self.d = math.prod(self.shape)
        self.N = len(tensor) * (2 if hflip else 1)
        self.labels = expand_labels(labels, len(tensor), hflip)
        self._sha256 = sha256
        self._cache: dict[Hashable, Any] = {}

    @property
    def device(self) -> torch.device:
        return self.images.device

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called only the first time and stored under `key`.

        A move of the images to another device discards the result.
        """
        if key not in self._cache:
            self._cache[key] = outside_transforms(make)
        return self._cache[key]

    def fingerprint(self, mirrored: bool = True) -> str:
        """Return a hash of the images and of `hflip`. With mirrored=False, `hflip` counts as False."""
        if self._sha256 is None:
            digest = hashlib.sha256()
            for rows in self.images.split(4096):
                # NumPy has no bfloat16, so the bytes of a row of all values are hashed.
                digest.update(rows.cpu().reshape(-1).view(torch.uint8).numpy())
            self._sha256 = digest.hexdigest()

        kind = f"{tuple(self.images.shape)} {self.images.dtype} hflip={self.hflip and mirrored}"
        return hashlib.sha256(f"{kind} {self._sha256}".encode()).hexdigest()

    def gather(self, ids: Tensor) -> Tensor:
        """Return the images of `ids`: (*ids.shape, *shape), float32, model space.

        Args:
            ids: of any shape, int64 or int32, in [0, N).
        """
        if not isinstance(ids, Tensor):
            raise InputError(f"ids must be a tensor of integers, got {type(ids).__name__}")
        if ids.dtype not in (torch.int64, torch.int32):
            advice = "for a mask give mask.nonzero()[:, 0]"
            raise InputError(f"ids must be integers, got {ids.dtype}; {advice}")

        if ids.numel():
            # One transfer copies both values from the GPU.
            low, high = torch.stack(ids.aminmax()).tolist()
            if low < 0 or high >= self.N:
                raise InputError(f"ids must be between 0 and {self.N - 1}, got {low} to {high}")
        return self.take(ids)

    def take(self, ids: Tensor) -> Tensor:
        """Gather images like `gather`, without the check that ids are in [0, N), because the check waits for a GPU."""
        return images_of(self.images, self.hflip, ids)

    def chunks(self, rows: int, mirrored: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Stream all N images by ascending id, at most `rows` at a time.

        Args:
            rows: the largest number of images of a chunk.
            mirrored: whether to stream the mirror images of `hflip`, too, after all others.

        Yields:
            The first id and the images (c, *shape), float32, model space.
        """
        yield from stored_chunks(self.images, rows)

        if self.hflip and mirrored:
            for start, x in stored_chunks(self.images, rows):
                yield len(self.images) + start, x.flip(-1)

    def share(
        self, rank: int, ranks: int, rows: int, mirrored: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Stream the share of one process, when several processes split all images among them.

        Each image is in the share of exactly one rank.

        Args:
            rank: number of the process.
            ranks: number of processes.
            rows: the largest number of images of a chunk.
            mirrored: see `chunks`.

        Yields:
            Ids (c,) and images (c, *shape), as `chunks`.
        """
        # Whole chunks go to the ranks in turn.
        for number, (start, x) in enumerate(self.chunks(rows, mirrored)):
            if number % ranks == rank:
                yield torch.arange(start, start + len(x), device=self.device), x

    def mean(self) -> Tensor:
        """Return the mean of all N images, (d,) float32. It is computed once."""
        return self.cached("mean", lambda: (self.sum() / self.N).float())

    def sum(self) -> Tensor:
        """Return the sum of all N images, (d,) float64."""
        total = torch.zeros(self.d, dtype=torch.float64, device=self.device)
        for _, x in self.chunks(chunk_rows(self.d)):
            total += x.flatten(1).sum(0, dtype=torch.float64)
        return total
