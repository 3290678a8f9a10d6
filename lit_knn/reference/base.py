"""The interface of a reference set, whole or in shards, for estimators."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.index import Index
from lit_knn.index.base import numbered
from lit_knn.reference.classes import ClassSets

if TYPE_CHECKING:
    from lit_knn.reference.reference_set import ReferenceSet

T = TypeVar("T")


class Reference(ABC):
    """The data set D that an estimator averages over.

    Modules share it: `copy.deepcopy` of a module that holds it keeps the same object.

    Attributes:
        local: the part of this process, an ordinary set; a whole set is its own part.
        index: neighbour index of that part.
        N: number of images, mirrored ones included.
        shape: shape of one image.
        d: flattened dimension.
        hflip: whether the mirror images count.
        labels: (N,) int64, mirrored ones included, always on the CPU; or None.
        index_built: whether the index is built.
        largest: largest absolute value of the images in model space, at most.
        label: the common class of all images, in a set of one class.
        told: options that have caused a warning already; the sets of all classes share them.
    """

    sharded = False
    """Tells whether each rank holds only a part of the images."""

    index: Index
    N: int
    shape: tuple[int, ...]
    d: int
    hflip: bool
    labels: Tensor | None
    largest: float
    label: int | None = None

    def __init__(self) -> None:
        self.told: set[str] = set()
        self._classes: ClassSets | None = None
        self._cache: dict[Hashable, Any] = {}
        self.index_built = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    @abstractmethod
    def local(self) -> "ReferenceSet":
        """The part of the set that this process holds; see the class."""

    @property
    def device(self) -> torch.device:
        """The device of the images."""
        return self.local.images.device

    @property
    def classes(self) -> ClassSets:
        """The images of each class as a reference set, by label.

        Raises:
            InputError: the set has no labels, or is sharded.
        """
        if self.sharded:
            raise InputError("a sharded reference set cannot be split by class: set data.sharded to false")
        if self._classes is None:
            self._classes = ClassSets(self.local)
        return self._classes

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`. It is computed once, and again after the images have moved to another device."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def to(self, device: torch.device | str) -> Self:
        """Move the images and the index to `device`. Where they are already, nothing happens. Returns self."""
        device = numbered(device)
        if self.device != device:
            self._move(device)
            self._cache.clear()
            if self._classes is not None:
                self._classes.to(self.device)
        return self

    @abstractmethod
    def _move(self, device: torch.device) -> None: ...

    @abstractmethod
    def fingerprint(self, mirrored: bool = True) -> str:
        """SHA-256 hash of the stored images and of the setting `hflip`, as 64 hexadecimal digits.

        With mirrored=False it is the fingerprint of the same set with hflip=False.
        """

    def build_index(self, k: int = 1) -> None:
        """Build the neighbour index, if that was not done before, with a progress bar on a terminal.

        In a distributed run every process must call it if the index is kept in a cache.

        Args:
            k: number of neighbours of later searches; an impossible one is refused before the build.

        Raises:
            InputError: the index refuses its settings for this set or its device.
        """
        if not self.index_built:
            self._build_index(k)
            self.index_built = True

    def try_search(self, k: int) -> None:
        """Build the neighbour index and search once, so that settings it refuses are told before any long work.

        Raises:
            InputError: as `build_index`; the search refuses k neighbours.
        """
        self.build_index(k)
        self.search(torch.zeros(1, *self.shape, device=self.device), k)

    @abstractmethod
    def _build_index(self, k: int) -> None: ...

    def search(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest images of each z.

        Args:
            z: (B, *shape), model space.
            k: number of neighbours, 1 <= k <= N.

        Returns:
            `sq_dist` (B, k), squared L2 in model space, ascending, and `ids` (B, k), as exact as the index. If the
            index found fewer than k, the last ids are −1 and their distances inf.

        Raises:
            InputError: k outside [1, N], or z of another shape.
        """
        self._check_search(z, k)
        self.build_index()
        return self._search(z, k)

    @abstractmethod
    def _search(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]: ...

    def locate(self, x: Tensor) -> Tensor:
        """Find the ids (B,) of images (B, *shape). An image that is not in the set gets −1 or the id of a near image.

        Raises:
            InputError: x of another shape.
        """
        self._check_search(x, 1)
        self.build_index()
        return self._locate(x)[1]

    @abstractmethod
    def _locate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return distances and ids, (B,) each."""

    def _check_search(self, z: Tensor, k: int) -> None:
        if not 1 <= k <= self.N:
            raise InputError(f"k={k} must be between 1 and the {self.N} images of the reference set")
        if tuple(z.shape[1:]) != self.shape:
            raise InputError(f"z has shape {tuple(z.shape)}, the reference set holds images of shape {self.shape}")

    def gather(self, ids: Tensor) -> Tensor:
        """Return the images of `ids` (any shape, in [0, N)): (*ids.shape, *shape), float32, model space.

        Raises:
            InputError: ids that are not int64 or int32, or an id outside [0, N).
        """
        if ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"ids must be int64, got {ids.dtype}")
        if ids.numel():
            # Both ends come from the GPU in one transfer.
            low, high = torch.stack(ids.aminmax()).tolist()
            if low < 0 or high >= self.N:
                bad = low if low < 0 else high
                raise InputError(f"id {bad} is not between 0 and {self.N - 1}, the images of the reference set")
        return self.take(ids)

    @abstractmethod
    def take(self, ids: Tensor) -> Tensor:
        """Gather images like `gather`, but trust that the ids are in [0, N), so that nothing waits for the GPU."""

    @abstractmethod
    def fetch(self, ids: Tensor) -> tuple["ReferenceSet", Tensor]:
        """Return a local set with the images of `ids`, and their ids in it. This set gathers without other ranks."""

    @abstractmethod
    def chunks(self, rows: int, mirrored: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Stream all N images by ascending id. Yields the first id and the images (c, *shape), float32, model space.

        Args:
            rows: images per chunk, at most.
            mirrored: with hflip, stream the mirror images, too, after all others.
        """

    @abstractmethod
    def share(self, rank: int, ranks: int, rows: int, mirrored: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Stream the images of process `rank`, when `ranks` processes split all images. Each image belongs to one rank.

        `rows` and `mirrored` are those of `chunks`.

        Yields:
            Ids (c,) and images (c, *shape), float32, model space; c <= `rows`.
        """

    def mean(self) -> Tensor:
        """Return the mean of all N images, (d,) float32. It is computed once."""
        return self.cached("mean", lambda: (self._sum() / self.N).float())

    @abstractmethod
    def _sum(self) -> Tensor:
        """Return the sum of all N images, (d,) float64."""

    @abstractmethod
    def over_shards(self, function: Callable[..., Sequence[Tensor]], *queries: Tensor) -> list[Tensor]:
        """Evaluate `function(part, *queries)` on every part of the set.

        Args:
            function: (reference, *queries) -> tensors with one row per query; they get the shape (parts, B, ...).
            queries: (B, ...) each.
        """

    def of_all(self, rows: Tensor) -> Tensor:
        """Join rows for the images of `local` to rows for all images of the set."""
        return rows

    def of_first(self, values: Tensor) -> Tensor:
        """Return the values of the first rank, because ranks might round differently."""
        return values
