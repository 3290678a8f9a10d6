"""What estimators ask of a reference set, whole or in shards."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.index import Index
from lit_knn.reference.classes import ClassSets

if TYPE_CHECKING:
    from lit_knn.reference.reference_set import ReferenceSet

T = TypeVar("T")


class Reference(ABC):
    """The data set D that an estimator averages over.

    It is shared, never copied: `copy.deepcopy` of a module that holds it returns the same object.

    Attributes:
        local: the part that this process holds, an ordinary set: the set itself, if that is whole.
        index: neighbour index of that part.
        N: number of images, mirrored ones included.
        shape: shape of one image.
        d: flattened dimension.
        hflip: whether the mirror images count.
        labels: (N,) int64, mirrored ones included, or None.
        index_built: whether the index is built.
        label: the class of all images, where the set is that of one class.
        told: options that a warning has told of; the sets of all classes share them.
    """

    sharded = False
    """Whether each rank holds only a part of the images."""

    index: Index
    N: int
    shape: tuple[int, ...]
    d: int
    hflip: bool
    labels: Tensor | None
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
        """See above."""

    @property
    def device(self) -> torch.device:
        """Where the images are."""
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
        """What `make` gives, computed once, and again after the images have moved to another device."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def to(self, device: torch.device | str) -> Self:
        """Move the images and the index to `device`; returns self."""
        before = self.device
        self._move(torch.device(device))
        # Of the images, for "cuda" may mean the "cuda:0" where they are.
        if self.device != before:
            self._cache.clear()
        self.labels = None if self.labels is None else self.labels.to(device)
        return self

    @abstractmethod
    def _move(self, device: torch.device) -> None: ...

    @abstractmethod
    def fingerprint(self, mirrored: bool = True) -> str:
        """SHA-256 of the images as they are stored and of whether their mirror images count, 64 hexadecimal digits.

        Without `mirrored` it is that of a set with hflip=False.
        """

    def build_index(self, k: int = 1) -> None:
        """Build the neighbour index if that was not done before; shows a progress bar on a terminal.

        In a distributed run every process must call it where the index is kept in a cache.

        Args:
            k: neighbours that will be searched; one that the index cannot find is refused before it is built.

        Raises:
            InputError: the index refuses its settings for this set, on its device.
        """
        if not self.index_built:
            self._build_index(k)
            self.index_built = True

    @abstractmethod
    def _build_index(self, k: int) -> None: ...

    def search(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest images of each z.

        Args:
            z: (B, *shape), model space.
            k: number of neighbours, 1 <= k <= N.

        Returns:
            `sq_dist` (B, k), squared L2 in model space, ascending, and `ids` (B, k): as exact as the index says.
            Where the index found fewer than k the last ids are −1 and their distances inf.

        Raises:
            InputError: k outside [1, N], or z of another shape.
        """
        self._check_search(z, k)
        self.build_index()
        return self._search(z, k)

    @abstractmethod
    def _search(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]: ...

    def locate(self, x: Tensor) -> Tensor:
        """The ids of images that are in the set, (B, *shape) to (B,); of others −1 or the id of a near one.

        Raises:
            InputError: x of another shape.
        """
        self._check_search(x, 1)
        self.build_index()
        return self._locate(x)[1]

    @abstractmethod
    def _locate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Distances and ids, (B,) each."""

    def _check_search(self, z: Tensor, k: int) -> None:
        if not 1 <= k <= self.N:
            raise InputError(f"k={k} must be between 1 and the {self.N} images of the reference set")
        if tuple(z.shape[1:]) != self.shape:
            raise InputError(f"z has shape {tuple(z.shape)}, the reference set holds images of shape {self.shape}")

    @abstractmethod
    def gather(self, ids: Tensor) -> Tensor:
        """The images of `ids` (any shape, in [0, N)): (*ids.shape, *shape), float32, model space."""

    @abstractmethod
    def fetch(self, ids: Tensor) -> tuple["ReferenceSet", Tensor]:
        """A set that this process can gather the images of `ids` from by itself, and their ids there."""

    @abstractmethod
    def chunks(self, rows: int, mirrored: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Stream all N images in the order of their ids.

        Args:
            rows: images per chunk, at most.
            mirrored: with hflip, stream the mirror images, too, which come last.

        Yields:
            The first id of the chunk and its images, (c, *shape), float32, model space.
        """

    @abstractmethod
    def share(self, rank: int, ranks: int, rows: int, mirrored: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """What is one rank's of a pass over all images that the ranks share; each image is one rank's.

        Args:
            rank: this process.
            ranks: number of processes.
            rows: images per chunk, at most.
            mirrored: see `chunks`.

        Yields:
            Ids (c,) and images (c, *shape), float32, model space; c <= `rows`.
        """

    def mean(self) -> Tensor:
        """The mean of all N images, (d,) float32; computed once."""
        return self.cached("mean", lambda: (self._sum() / self.N).float())

    @abstractmethod
    def _sum(self) -> Tensor:
        """The sum of all N images, (d,) float64."""

    @abstractmethod
    def over_shards(self, function: Callable[..., Sequence[Tensor]], *queries: Tensor) -> list[Tensor]:
        """Ask every part of the set the same: `function(part, *queries)`.

        Args:
            function: (reference, *queries) -> tensors with a row for each query.
            queries: (B, ...) each.

        Returns:
            The tensors of `function`, each with the parts as its first dimension, (parts, B, ...).
        """

    def of_all(self, rows: Tensor) -> Tensor:
        """Rows for all images of the set, from those for the images of `local`."""
        return rows

    def of_first(self, values: Tensor) -> Tensor:
        """The values that the first rank has, where ranks might round otherwise."""
        return values
