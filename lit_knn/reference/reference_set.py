"""The reference set: the data set D that an estimator averages over, in memory or mapped, with its neighbour index."""

import copy
import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.index import Index, default_index
from lit_knn.index.base import Vectors, numbered
from lit_knn.index.precision import full_float32
from lit_knn.reference.row_view import RowView

T = TypeVar("T")

CHUNK_BYTES = 64 * 2**20
# float32 could not hold the squared distances of larger values.
LARGEST_VALUE = 1e15


class ReferenceSet:
    """Images (or any vectors), stored once in their own type and gathered as float32 in model space.

    Modules share one set: `copy.deepcopy` of a module keeps the same set object.

    Args:
        images: uint8 (N, C, H, W), whose pixel p becomes p / 127.5 − 1; or float (N, *shape), which is stored as
            float32 and not rescaled (latents, toys). A tensor or a NumPy array. uint8 and float32 are not copied, so
            do not change them afterwards. They may be a file mapped by `read_prepared`,
            or some of its rows, as a `RowView`.
        index: neighbour index; built at the first search or by `build_index`. Default: the best for the device of
            the images, on a CPU exact search; see `default_index`.
        hflip: also count the mirror image (last axis flipped) of every image, without storing it: id i + N/2 is the
            mirror of image i, and a search queries z and its mirror.
        labels: (N,) integer class labels, or None.
        sha256: hash of the bytes of `images`, if known; `fingerprint` then does not read the images.

    Attributes:
        images: the images that this process stores.
        N, shape, d: number of images, mirrored ones included; shape of one image; flattened dimension.
        labels: (N,) int64, mirrored ones included, always on the CPU; or None.
        largest: upper bound of the absolute values of the images in model space.
        index_built: whether the index is built.
        label: the class of all images, in a set of one class; otherwise None.
        classes: the sets of the classes, once `classes_of` has made them; otherwise None.
        told: options that have already caused a warning; all classes share them.
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
        # A view has what this class uses of a tensor.
        images = (
            cast(Tensor, images)
            if isinstance(images, RowView)
            else torch.as_tensor(images).detach()
        )
        _check_images(images, hflip)
        # Check values after the conversion, because a float64 value may be too large for float32.
        self.images = images if images.dtype == torch.uint8 else images.float()
        self.largest = _largest_value(self.images)
        self.hflip = hflip
        self.index_built = False
        self.shape = tuple(images.shape[1:])
        self.d = math.prod(self.shape)
        self.N = len(images) * (2 if hflip else 1)
        self.labels = expand_labels(labels, len(images), hflip)
        self._sha256 = sha256
        # Reduced defaults that all classes of the set have been warned of, by estimator and option.
        self.warned: set[tuple[str, str]] = set()
        self._index_shared = True  # whether all processes of a distributed run hold these images
        self._given_index = copy.copy(index)
        self.index = self._unbuilt_index() if index is None else index
        self._cache: dict[Hashable, Any] = {}
        self.classes: dict[int, ReferenceSet] | None = None
        # the rows of the whole set that this set of a class is a view of
        self._rows: slice | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def local(self) -> "ReferenceSet":
        """The part that this process holds, an ordinary set. A whole set is its own part."""
        return self

    @property
    def device(self) -> torch.device:
        return self.images.device

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, computed once. A move of the images to another device discards it."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def to(self, device: torch.device | str) -> Self:
        """Move the images and the index to `device`, unless they are there already. Returns self."""
        device = numbered(device)
        if self.device != device:
            self._move(device)
            self._cache.clear()
            for part in (self.classes or {}).values():
                part.to(device)
                if part._rows is not None:
                    part.images = self.images[part._rows]
        return self

    def _move(self, device: torch.device) -> None:
        if self.index_built and self._given_index is not None:
            self.index.to(device)
        self.images = self.images.to(device)
        if self._given_index is None:
            self.index, self.index_built = self._unbuilt_index(), False

    def _unbuilt_index(self) -> Index:
        if self._given_index is None:
            return default_index(self.device, self.images.dtype == torch.uint8)
        return copy.copy(self._given_index)

    def subset(self, rows: Tensor | slice, label: int) -> "ReferenceSet":
        """Make a set of some stored images of one class; `rows` are on the CPU, and a slice makes a view."""
        view: Any = self.images
        images = view.part(rows) if isinstance(view, RowView) else view[rows]
        labels = torch.full((len(images),), label)
        part = ReferenceSet(images, copy.copy(self._given_index), self.hflip, labels)
        part.label, part.warned = label, self.warned
        part._rows = rows if isinstance(rows, slice) else None
        # Processes of a distributed run use classes at different times, and must not wait for each other.
        part._index_shared = False
        return part

    def fingerprint(self, mirrored: bool = True) -> str:
        """Hash the images and `hflip`; with mirrored=False, the same set with hflip=False."""
        if self._sha256 is None:
            digest = hashlib.sha256()
            for rows in self.images.split(4096):
                digest.update(rows.cpu().contiguous().numpy())
            self._sha256 = digest.hexdigest()
        what = f"{tuple(self.images.shape)} {self.images.dtype} hflip={self.hflip and mirrored} {self._sha256}"
        return hashlib.sha256(what.encode()).hexdigest()

    def build_index(self, k: int = 1) -> None:
        """Build the neighbour index if it is not built yet; refuse first what cannot find k neighbours.

        In a distributed run, every process must call this method if the index has a cache.
        """
        if not self.index_built:
            self._build_index(k)
            self.index_built = True

    def _build_index(self, k: int) -> None:
        # An index holds the vectors of one set. Building it anew would change what another set finds.
        if self.index.in_use:
            self.index = self._unbuilt_index()
        self.index.in_use = True
        stored = len(self.images)

        def chunks() -> Iterator[Tensor]:
            return (x.flatten(1) for _, x in self.chunks(chunk_rows(self.d), mirrored=False))

        def sample(size: int) -> Tensor:
            ids = torch.randperm(
                stored, device="cpu", generator=keyed_generator("cpu", Stream.SUBSET, 0)
            )[:size]
            return to_model_space(self.images[ids.to(self.device)].cpu()).flatten(1)

        self.index.check(stored, self.d, self.device, min(k, stored))
        self.index.build(
            Vectors(chunks, sample, stored, partial(self.fingerprint, False), self._index_shared)
        )
        self.index.to(self.device)

    def search(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest images, 1 <= k <= N, of each z (B, *shape), model space.

        Returns:
            `sq_dist` (B, k), squared L2 in model space, ascending, and `ids` (B, k), as exact as the index. If the
            index found fewer than k, the last ids are −1 and their distances inf.
        """
        self._prepare_search(z, k)
        return self._nearest(z, k)

    def locate(self, x: Tensor) -> Tensor:
        """Find the ids (B,) of images (B, *shape). An image outside the set gets −1 or the id of a near image."""
        self._prepare_search(x, 1)
        return self._nearest(x, 1, stored=True)[1][:, 0]

    def _prepare_search(self, z: Tensor, k: int) -> None:
        if not 1 <= k <= self.N:
            raise InputError(
                f"k={k} must be between 1 and the {self.N} images of the reference set"
            )
        if tuple(z.shape[1:]) != self.shape or not z.is_floating_point():
            got = f"z has shape {tuple(z.shape)} and type {z.dtype}"
            raise InputError(
                f"{got}, but the images, floats in model space, have shape {self.shape}"
            )
        self.build_index()

    @torch.no_grad()
    @full_float32()
    def _nearest(self, z: Tensor, k: int, stored: bool = False) -> tuple[Tensor, Tensor]:
        """Find the k nearest images, mirrored ones included; `stored` means that z are images of the set and k = 1."""

        def find(queries: Tensor) -> tuple[Tensor, Tensor]:
            return (
                self.index.locate(queries)
                if stored
                else self.index.search(queries, min(k, len(self.images)))
            )

        if not self.hflip:
            return find(z.flatten(1).float())
        # ‖z − mirror(x)‖ = ‖mirror(z) − x‖, so the mirrored images are searched with the mirrored query.
        queries = z.flatten(1).float(), z.flip(-1).flatten(1).float()
        if z.is_cuda:
            # One search reads the vectors once.
            (sq_dist, mirrored_sq_dist), (ids, mirrored_ids) = (
                part.chunk(2) for part in find(torch.cat(queries))
            )
        else:
            (sq_dist, ids), (mirrored_sq_dist, mirrored_ids) = map(find, queries)
        mirrored_ids = torch.where(mirrored_ids < 0, mirrored_ids, mirrored_ids + len(self.images))
        sq_dist, order = torch.cat([sq_dist, mirrored_sq_dist], 1).topk(
            k, dim=1, largest=False, sorted=True
        )
        return sq_dist, torch.cat([ids, mirrored_ids], 1).gather(1, order)

    def gather(self, ids: Tensor) -> Tensor:
        """Return the images of `ids` (any shape, in [0, N)): (*ids.shape, *shape), float32, model space."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"ids must be integers, got {ids.dtype}; for a mask give mask.nonzero()[:, 0]"
            )
        if ids.numel():
            # One transfer copies both values from the GPU.
            low, high = torch.stack(ids.aminmax()).tolist()
            if low < 0 or high >= self.N:
                raise InputError(f"ids must be between 0 and {self.N - 1}, got {low} to {high}")
        return self.take(ids)

    def take(self, ids: Tensor) -> Tensor:
        """Gather images like `gather`, but do not check that ids are in [0, N), because the check waits for the GPU."""
        return images_of(self.images, self.hflip, ids)

    def fetch(self, ids: Tensor) -> tuple["ReferenceSet", Tensor]:
        """Return a set that holds the images of `ids`, and their ids in that set. That set needs no other ranks."""
        return self, ids

    def chunks(self, rows: int, mirrored: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Stream all N images by ascending id. Yields the first id and the images (c, *shape), float32, model space.

        A chunk has at most `rows` images. `mirrored` streams the mirror images of hflip, too, after all others.
        """
        stored = len(self.images)
        for mirror in range(2 if self.hflip and mirrored else 1):
            for start in range(0, stored, rows):
                x = to_model_space(self.images[start : start + rows])
                yield mirror * stored + start, x.flip(-1) if mirror else x

    def share(
        self, rank: int, ranks: int, rows: int, mirrored: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Stream the share of process `rank` when `ranks` processes split all images. Each image belongs to one rank.

        Yields ids (c,) and images (c, *shape), as `chunks`.
        """
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

    def over_shards(
        self, function: Callable[..., Sequence[Tensor]], *queries: Tensor
    ) -> list[Tensor]:
        """Evaluate `function(part, *queries)` on every part of the set; a whole set is the only part.

        `queries` are (B, ...) each. The tensors of `function` have one row per query, and become (parts, B, ...).
        """
        return [answer.unsqueeze(0) for answer in function(self, *queries)]

    def of_all(self, rows: Tensor) -> Tensor:
        """Join rows for the images of `local` to rows for all images of the set."""
        return rows

    def of_first(self, values: Tensor) -> Tensor:
        """Return the values of the first rank, because ranks might round differently."""
        return values


def chunk_rows(d: int) -> int:
    """Return how many images of dimension d are converted to float at a time, to build an index or to stream."""
    return max(CHUNK_BYTES // (4 * d), 1)


def images_of(images: Tensor, hflip: bool, ids: Tensor) -> Tensor:
    """Gather stored images (N, *shape): (*ids.shape, *shape), float32, model space; id i + N is image i mirrored."""
    flat, stored = ids.reshape(-1), len(images)
    x = to_model_space(images.index_select(0, flat % stored))
    if hflip:
        mirrored = (flat >= stored).reshape(-1, *[1] * (images.ndim - 1))
        x = torch.where(mirrored, x.flip(-1), x)
    return x.reshape(*ids.shape, *images.shape[1:])


def to_model_space(images: Tensor) -> Tensor:
    """Map pixels p to p / 127.5 − 1; floats stay as they are."""
    if images.dtype != torch.uint8:
        return images
    return images.float().div_(127.5).sub_(1.0)


def _check_images(images: Tensor, hflip: bool) -> None:
    if images.ndim < 2 or images.numel() == 0:
        raise InputError(f"images must be (N, *shape) with N >= 1, got shape {tuple(images.shape)}")
    pixels = images.dtype == torch.uint8
    channels_last = images.ndim == 4 and min(images.shape[1:3]) > 4 >= images.shape[3]
    if not pixels and not images.is_floating_point():
        raise InputError(f"images must be uint8 or float, got {images.dtype}")
    if (hflip or pixels) and (images.ndim != 4 or channels_last):
        kind = "hflip=True needs images" if hflip else "uint8 images must be"
        raise InputError(f"{kind} (N, C, H, W), got shape {tuple(images.shape)}")


def _largest_value(images: Tensor) -> float:
    """Return an upper bound of absolute values in model space. Refuse floats that are not finite or too large."""
    if images.dtype == torch.uint8:
        return 1.0
    largest = torch.stack(images.aminmax()).abs().max().item()
    if not math.isfinite(largest):
        row = images.flatten(1).isfinite().all(1).int().argmin()
        raise InputError(f"images hold a value that is not finite (first in item {row})")
    if largest > LARGEST_VALUE:
        raise InputError(
            f"images hold the value {largest:.3g}, float32 can square sums up to {LARGEST_VALUE:g}"
        )
    return largest


def expand_labels(labels: Tensor | np.ndarray | None, stored: int, hflip: bool) -> Tensor | None:
    """Expand the labels of the `stored` images to all images, mirrored ones included: (N,) int64, or None."""
    if labels is None:
        return None
    labels = torch.as_tensor(labels).cpu()
    if labels.shape != (stored,) or labels.is_floating_point():
        raise InputError(
            f"labels must be ({stored},) integers, got {tuple(labels.shape)} {labels.dtype}"
        )
    labels = labels.long()
    if (labels < 0).any():
        raise InputError(f"labels must be at least 0, got {labels.min()}")
    return torch.cat([labels, labels]) if hflip else labels
