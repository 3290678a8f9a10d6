"""The reference set: the data set D that an estimator averages over, in memory or mapped, with its neighbour index."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.index import Index, default_index
from lit_knn.index.base import numbered
from lit_knn.reference.image_set import ImageSet
from lit_knn.reference.row_view import RowView
from lit_knn.reference.search import search_mirrored, vectors_of


class ReferenceSet(ImageSet):
    """Images (or any vectors), stored once in their own type and gathered as float32 in model space.

    Modules share one set: `copy.deepcopy` of a module keeps the same set object.

    Args:
        images: uint8 (N, C, H, W), whose pixel p becomes p / 127.5 − 1; or float (N, *shape), which
            is not rescaled (latents, toys). A tensor or a NumPy array. uint8, float16, bfloat16 and
            float32 are stored as they are and not copied, so do not change them afterwards; other
            floats become float32. They may be a mapped file (`read_prepared`, `read_array_file`),
            or some of its rows, as a `RowView`.
        index: neighbour index; built at the first search or by `build_index`. Default: the best for
            the device of the images, on a CPU exact search; see `default_index`.
        hflip: also count the mirror image (last axis flipped) of every image, without storing it:
            id i + N/2 is the mirror of image i, and a search queries z and its mirror.
        labels: (N,) integer class labels, or None.
        sha256: hash of the bytes of `images`, if known; `fingerprint` then does not read the images.

    Attributes:
        images: the images that this process stores.
        N, shape, d: number of images, mirrored ones included; shape of one image; flattened
            dimension.
        labels: (N,) int64, mirrored ones included, always on the CPU; or None.
        largest: upper bound of the absolute values of the images in model space.
        index_built: whether the index is built.
        label: the class of all images, in a set of one class; otherwise None.
        classes: the sets of the classes, once `classes_of` has made them; otherwise None.
        warned: reduced defaults that have already caused a warning, by estimator and option; all
            classes share them.
    """

    sharded = False  # whether each rank holds only a part of the images
    label: int | None = None

    def __init__(
        self,
        images: Tensor | np.ndarray | RowView,
        index: Index | None = None,
        hflip: bool = False,
        labels: Tensor | np.ndarray | None = None,
        sha256: str | None = None,
    ) -> None:
        super().__init__(images, hflip, labels, sha256)
        self.index_built = False
        self._index_shared = True  # whether all processes of a distributed run hold these images
        # An unbuilt copy of the user's index, from which a set of one class gets its own.
        self._chosen_index = copy.copy(index)
        self.index = self._unbuilt_index() if index is None else index

        self.warned: set[tuple[str, str]] = set()
        self.classes: dict[int, ReferenceSet] | None = None
        # the rows of the whole set that this set of a class is a view of
        self._rows: slice | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    @property
    def local(self) -> "ReferenceSet":
        """The part that this process holds, an ordinary set. A whole set is its own part."""
        return self

    def to(self, device: torch.device | str) -> Self:
        """Move the images and the index to `device`, unless they are there already. Returns self."""
        device = numbered(device)
        if self.device == device:
            return self

        self._move(device)
        self._cache.clear()
        for part in (self.classes or {}).values():
            part.to(device)
            # A view of the whole set's images becomes a view of the moved ones, which frees its own copy.
            if part._rows is not None:
                part.images = self.images[part._rows]
        return self

    def _move(self, device: torch.device) -> None:
        """Move the images, and a built index. Each device has its own default index, not built."""
        if self.index_built and self._chosen_index is not None:
            self.index.to(device)

        self.images = self.images.to(device)
        if self._chosen_index is None:
            self.index = self._unbuilt_index()
            self.index_built = False

    def _unbuilt_index(self) -> Index:
        """Return a copy of the index that the user has chosen, or the default one of the device; neither is built."""
        if self._chosen_index is None:
            return default_index(self.device, self.images.dtype == torch.uint8)
        return copy.copy(self._chosen_index)

    def subset(self, rows: Tensor | slice, label: int) -> "ReferenceSet":
        """Make a set of some stored images of one class.

        Args:
            rows: numbers of the images, on the CPU; a slice makes a view.
            label: their class.
        """
        # `images` may be a view, see `ImageSet`.
        stored = cast(Tensor | RowView, self.images)
        images = stored.part(rows) if isinstance(stored, RowView) else stored[rows]
        labels = torch.full((len(images),), label)

        part = ReferenceSet(images, copy.copy(self._chosen_index), self.hflip, labels)
        part.label = label
        part.warned = self.warned
        part._rows = rows if isinstance(rows, slice) else None
        # Processes of a distributed run use classes at different times, and must not wait for
        # each other.
        part._index_shared = False
        return part

    def build_index(self, k: int = 1) -> None:
        """Build the neighbour index if it is not built yet. Raises InputError before if it could not find k neighbours.

        In a distributed run, every process must call this method if the index has a cache.
        """
        if not self.index_built:
            self._build_index(k)
            self.index_built = True

    def _build_index(self, k: int) -> None:
        """Check and build the index, and move it to the device of the images."""
        # An index that another set has built holds the vectors of that set, and building it anew would change what that
        # set finds. So this set builds a copy.
        if self.index.in_use:
            self.index = self._unbuilt_index()
        self.index.in_use = True

        stored = len(self.images)
        self.index.check(stored, self.d, self.device, min(k, stored))
        # The index has no mirror images.
        fingerprint = partial(self.fingerprint, mirrored=False)
        self.index.build(vectors_of(self.images, fingerprint, self._index_shared))
        self.index.to(self.device)

    def search(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest images, 1 <= k <= N, of each z (B, *shape), model space.

        Returns:
            `sq_dist` (B, k), squared L2 in model space, ascending, and `ids` (B, k), as exact as
            the index. If the index found fewer than k, the last ids are −1 and their distances inf.
        """
        self._prepare_search(z, k)
        return self._nearest(z, k)

    def locate(self, x: Tensor) -> Tensor:
        """Find the ids (B,) of images (B, *shape).

        An image outside the set gets −1 or the id of a near image.
        """
        self._prepare_search(x, 1)
        _, ids = self._stored_image(x)
        return ids[:, 0]

    def _prepare_search(self, z: Tensor, k: int) -> None:
        """Check the arguments of a search, and build the index."""
        if not 1 <= k <= self.N:
            images = f"the {self.N} images of the reference set"
            if self.hflip:
                images += ", mirror images counted"
            raise InputError(f"k={k} must be between 1 and {images}")

        if tuple(z.shape[1:]) != self.shape or not z.is_floating_point():
            latents = f"z has shape {tuple(z.shape)} and type {z.dtype}"
            images = f"the images, floats in model space, have shape {self.shape}"
            raise InputError(f"{latents}, but {images}")
        if not self.index_built:
            # The index is built for searches of any k. Its own `search` refuses a k that is too large for it.
            self.build_index(k=1)

    @torch.no_grad()
    def _nearest(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return what `search` returns, without its checks."""
        stored = len(self.images)
        k_stored = min(k, stored)
        if self.hflip:
            return search_mirrored(
                lambda queries: self.index.search(queries, k_stored), z, k, stored
            )
        return self.index.search(z.flatten(1).float(), k_stored)

    @torch.no_grad()
    def _stored_image(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Find the nearest image of each image x of the set, as `_nearest` with k = 1."""
        if self.hflip:
            return search_mirrored(self.index.locate, x, 1, len(self.images))
        return self.index.locate(x.flatten(1).float())

    def fetch(self, ids: Tensor) -> tuple["ReferenceSet", Tensor]:
        """Return a set that holds the images of `ids`, and their ids in that set. It needs no other ranks."""
        return self, ids

    def over_shards(
        self, function: Callable[..., Sequence[Tensor]], *queries: Tensor
    ) -> list[Tensor]:
        """Evaluate `function(part, *queries)` on every part of the set; a whole set is the only part.

        Args:
            function: returns tensors with one row per query.
            queries: (B, ...) each.

        Returns:
            The tensors of `function`, (parts, B, ...) each.
        """
        return [answer.unsqueeze(0) for answer in function(self, *queries)]

    def of_all(self, rows: Tensor) -> Tensor:
        """Return rows for all images of the set, given those for the images of `local`, (N, ...)."""
        return rows

    def of_first(self, values: Tensor) -> Tensor:
        """Return the values of the first rank, because ranks might round differently."""
        return values
