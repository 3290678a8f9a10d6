"""The contract of a neighbour index."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.common.settings import RecordsArguments


class Vectors(NamedTuple):
    """The vectors that `Index.build` gets, in pieces."""

    # yields all N vectors in order, (c, d) float32 each; may be called again
    chunks: Callable[[], Iterable[Tensor]]
    # (m) -> (m, d) float32, a seeded random subset of m <= N vectors, for training
    sample: Callable[[int], Tensor]
    N: int  # number of vectors
    fingerprint: Callable[[], str]  # returns a name that only these vectors have; may take seconds
    shared: bool = True  # whether all processes of a distributed run build from these vectors


class Index(RecordsArguments, ABC):
    """Finds near neighbours, in squared L2 distance, among the vectors that `build` got.

    An index may be approximate and may return fewer than k neighbours. Estimators stay consistent as n → ∞, because
    they compute exact likelihoods of the images that they use. At finite n, missed images increase the error: they are
    in the tail of the proposal, and tail draws are rare at small t.

    `build` assigns new attributes and changes nothing in place. So `copy.copy` of an unbuilt index makes an
    independent index with the same settings.

    Attributes:
        in_use: whether a reference set has built this index for itself. Another set builds a copy.
    """

    in_use = False

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        """Check before the build that a search can work with the settings of the index.

        Args:
            N: number of vectors.
            d: their dimension.
            device: where the index is used; None for the CPU.
            k: the most neighbours that are searched.

        Raises:
            InputError: the settings cannot find k of the vectors on the device.
        """
        return

    @abstractmethod
    def build(self, vectors: Vectors) -> None:
        """Build from all vectors, or load an index that an earlier run built from them."""

    @abstractmethod
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest vectors, 1 <= k <= N, of each query (B, d), float32.

        Returns:
            `sq_dist` (B, k), float32, ascending, and `ids` (B, k), int64, on the device of the queries. If fewer than
            k were found, the last ids are −1 and their distances inf.
        """

    def locate(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Search with k = 1 for queries that equal stored vectors. An index may override this with a faster search."""
        return self.search(queries, 1)

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move the index to `device`, or raise InputError if it does not support the device."""


def numbered(device: torch.device | str) -> torch.device:
    """Return the device with its number, so that devices can be compared: "cuda" becomes the current GPU."""
    return torch.empty(0, device=device).device
