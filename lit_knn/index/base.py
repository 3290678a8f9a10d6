"""The contract of a neighbour index."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lit_knn.settings import TellsSettings


class Vectors(NamedTuple):
    """What an index is built from.

    Attributes:
        chunks: yields all N vectors in order, (c, d) float32 each; may be called again.
        sample: (m) -> (m, d) float32, a seeded random subset of m <= N vectors, to train on.
        N: number of vectors.
        fingerprint: a name that these vectors have and no others; may take seconds.
        shared: whether all processes of a distributed run build from these vectors.
    """

    chunks: Callable[[], Iterable[Tensor]]
    sample: Callable[[int], Tensor]
    N: int
    fingerprint: Callable[[], str]
    shared: bool = True


class Index(TellsSettings, ABC):
    """Finds near neighbours, in squared L2 distance, among vectors it was built from.

    An index may be approximate and may return fewer than k neighbours: estimators compute the likelihood of
    what they use themselves, so they stay consistent as n → ∞. At a finite n a search that misses likely images
    costs error: those belong to the tail of the proposal, which is seldom drawn where t is small.

    `build` assigns what it makes and changes nothing in place, so that `copy.copy` of an index that is not built is
    another index of the same settings.
    """

    shared = False
    """Whether the processes of a machine hold it once, together, while it is on the CPU."""

    @abstractmethod
    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        """Refuse settings that cannot work for N vectors of dimension d, before any long work.

        Args:
            N: number of vectors.
            d: their dimension.
            device: where the index will search; None for the CPU.
            k: neighbours that will be searched.

        Raises:
            InputError: which setting, its value and the rule it breaks.
        """

    @abstractmethod
    def build(self, vectors: Vectors) -> None:
        """Build from all vectors, or find what an earlier run has built from them."""

    @abstractmethod
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest vectors of each query.

        Args:
            queries: (B, d), float32.
            k: number of neighbours, 1 <= k <= N.

        Returns:
            `sq_dist` (B, k), float32, ascending, and `ids` (B, k), int64, on the device of the queries. Where
            fewer than k were found the last ids are −1 and their distances inf.
        """

    def locate(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """As `search` with k = 1, for queries that are among the vectors, which may take less effort to find."""
        return self.search(queries, 1)

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move the index to `device`.

        Raises:
            InputError: this kind of index cannot live there.
        """

    def nbytes(self, N: int, d: int, device: torch.device) -> int | None:
        """Bytes it will hold on `device` for N vectors of dimension d, without building it; None if not known."""
        return None

    def build_bytes(self, N: int, d: int) -> int:
        """Bytes needed beside, while it is built."""
        return 0


Piece = TypeVar("Piece", Tensor, tuple[int, Tensor])


def with_progress(pieces: Iterable[Piece], total: int, description: str) -> Iterator[Piece]:
    """Yield the pieces, tensors or (first row, tensor), while a progress bar counts rows; silent outside a terminal.

    What takes less than a second, such as one class of many, shows no bar.
    """
    from tqdm import tqdm

    options = {"unit": " images", "unit_scale": True, "disable": None, "leave": False, "delay": 1.0}
    with tqdm(total=total, desc=description, **options) as bar:
        for piece in pieces:
            yield piece
            bar.update(len(piece if isinstance(piece, Tensor) else piece[1]))
