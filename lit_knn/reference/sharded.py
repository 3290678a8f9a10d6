"""A reference set whose images are split over the ranks of a distributed run."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.distributed import in_every_process
from lit_knn.common.exchange import Exchange, packed, unpacked
from lit_knn.index import Index
from lit_knn.reference.reference_set import ReferenceSet
from lit_knn.reference.row_view import RowView
from lit_knn.reference.shards import agree_on_shards, labels_of_all


class ShardedReferenceSet(ReferenceSet):
    """A reference set split over the ranks. Each rank holds and searches one shard; estimators see the whole set.

    Exact search finds the same images as in the whole set. Each shard builds an approximate index with the same
    settings: each list then holds fewer images, and every shard searches `nprobe` lists. If an estimator needs the
    coordinates of all images in principal components, N·r values, every rank holds them.

    Ids count through the shards in the order of the ranks. All ranks must call its methods (but `share`) and every
    estimator equally often and in the same order, with any number of rows, even none. `search`, `gather` and `Exact`
    run three collectives: the number of rows, the queries, and the answers. A rank sends, for each z and other rank,

    - in `search`: 4·d bytes (z), and 12·min(k, N/ranks) bytes (neighbours for a z of the other rank);
    - in `Exact`: 4·d + 8 bytes (z and t), and 8·d + 8 bytes (the mean over the shard and the log of the normaliser);
    - in `fetch` and `gather`, for each different image of another rank: 8 bytes, and gets the image as it is stored. An
      estimator fetches the n draws of all z at once; at small t most of them repeat one image.

    Args:
        images: the images of this rank, see `ReferenceSet`.
        index: index of this rank's images; see `ReferenceSet`.
        hflip: see `ReferenceSet`; the same on all ranks.
        labels: (N_rank,), the labels of this rank's images, or None. Each rank then holds the labels of all images.
        sha256: hash of this rank's images, if known.

    Attributes:
        exchange: sends data between ranks and counts the bytes.
    """

    sharded = True

    def __init__(
        self,
        images: Tensor | np.ndarray | RowView,
        index: Index | None = None,
        hflip: bool = False,
        labels: Tensor | np.ndarray | None = None,
        sha256: str | None = None,
    ) -> None:
        super().__init__(images, index, hflip, labels, sha256)
        # The shard is an ordinary set of the images of this rank only.
        self._local = ReferenceSet(self.images, index, hflip, labels, sha256)
        self._local._index_shared = False
        self.exchange = Exchange()

        shards = agree_on_shards(self._local)
        sizes = [shard.stored for shard in shards]
        self.labels = labels_of_all(shards, hflip)
        self.largest = max(shard.largest for shard in shards)

        copies = 2 if hflip else 1
        self._stored = sum(sizes)
        self.N = self._stored * copies
        # The most images of a shard, mirrored ones included.
        self._most = max(sizes) * copies
        # Cumulative shard sizes: where each shard ends.
        self._bounds = torch.tensor(sizes, device=self.device).cumsum(0)
        # The id of this shard's first image.
        self._offset = sum(sizes[: self.exchange.rank])

    @property
    def local(self) -> ReferenceSet:
        return self._local

    def of_all(self, rows: Tensor) -> Tensor:
        parts: list[Tensor] = []
        # The mirrored images of all shards come after all others.
        for half in rows.split(len(self.images)):
            parts += self.exchange.all_gather(half)
        return torch.cat(parts)

    def of_first(self, values: Tensor) -> Tensor:
        return self.exchange.of_first(values)

    def _move(self, device: torch.device) -> None:
        self.images = self.local.to(device).images
        self.index = self.local.index
        self.index_built = self.local.index_built
        self._bounds = self._bounds.to(device)

    def fingerprint(self, mirrored: bool = True) -> str:
        of_shard = partial(self.local.fingerprint, mirrored)
        parts = self.cached(("fingerprints", mirrored), lambda: in_every_process(of_shard))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def _build_index(self, k: int) -> None:
        in_every_process(lambda: self.local.build_index(k))
        self.index = self.local.index

    def _nearest(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search every shard, and merge the nearest images."""
        # A shard may have fewer than k images, but all must return as many columns, which are filled up.
        width = min(k, self._most)

        def nearest_of(part: ReferenceSet, queries: Tensor) -> tuple[Tensor, Tensor]:
            sq_dist, ids = part._nearest(queries, min(width, part.N))
            missing = (0, width - ids.shape[1])
            sq_dist = torch.nn.functional.pad(sq_dist, missing, value=torch.inf)
            ids = torch.nn.functional.pad(self._to_global(ids), missing, value=-1)
            return sq_dist, ids

        return self._merged(nearest_of, z, k)

    def _stored_image(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Search every shard, because any of them may hold the image, and keep the nearest."""

        def image_of(part: ReferenceSet, queries: Tensor) -> tuple[Tensor, Tensor]:
            sq_dist, ids = part._stored_image(queries)
            return sq_dist, self._to_global(ids)

        return self._merged(image_of, x, 1)

    def _merged(
        self, search: Callable[..., tuple[Tensor, Tensor]], z: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """Search the latents of all ranks in each shard, and merge the nearest.

        Args:
            search: (shard, queries) -> squared distances and ids in the whole set, (B, width) each.
            z: (B, *shape), the latents of this rank.
            k: number of neighbours.

        Returns:
            `sq_dist` (B, k), ascending, and `ids` (B, k).
        """
        sq_dist, ids = self.over_shards(search, z.float())
        # (ranks, B, width) -> (B, ranks · width)
        sq_dist = sq_dist.transpose(0, 1).flatten(1)
        ids = ids.transpose(0, 1).flatten(1)

        sq_dist, order = sq_dist.topk(k, dim=1, largest=False, sorted=True)
        return sq_dist, ids.gather(1, order)

    def _to_global(self, ids: Tensor) -> Tensor:
        """Convert ids in this shard to ids in the whole set. −1 stays −1."""
        stored = len(self.images)
        mirrored = ids >= stored
        shifted = torch.where(mirrored, ids - stored + self._stored, ids) + self._offset
        return torch.where(ids < 0, ids, shifted)

    def fetch(self, ids: Tensor) -> tuple[ReferenceSet, Tensor]:
        """Bring the images of `ids` to this rank. Returns a set of them, and their ids in that set."""
        # Each image is sent once per call, as it is stored. An image and its mirror image count as one.
        needed, position = (ids % self._stored).unique(return_inverse=True)

        # The ids are sorted, so they are also sorted by the rank that holds them. Count them for each rank.
        ends = torch.searchsorted(needed, self._bounds)
        counts = ends.diff(prepend=torch.zeros_like(ends[:1]))
        sent, received = self.exchange.agree_on_rows(counts)

        asked = self.exchange.move(needed, sent, received)
        answers = self.images.index_select(0, asked - self._offset)
        images = self.exchange.move(answers, received, sent)

        # A reference set cannot be empty, so any set stands for one without images.
        if len(needed) == 0:
            return self.local, ids
        fetched = ReferenceSet(images, hflip=self.hflip)
        return fetched, torch.where(ids < self._stored, position, position + len(needed))

    def take(self, ids: Tensor) -> Tensor:
        fetched, fetched_ids = self.fetch(ids)
        return fetched.take(fetched_ids)

    def chunks(self, rows: int, mirrored: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Stream all images to every rank, `rows` at a time. All ranks must give the same `rows`."""
        count = self.N if mirrored else self._stored
        for ids in torch.arange(count, device=self.device).split(rows):
            yield int(ids[0]), self.take(ids)

    def share(
        self, rank: int, ranks: int, rows: int, mirrored: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Stream the images that this rank holds, whatever its number is, so that no rank sends images or waits."""
        for start, x in self.local.chunks(rows, mirrored):
            yield self._to_global(torch.arange(start, start + len(x), device=self.device)), x

    def sum(self) -> Tensor:
        return self.exchange.sum(self.local.sum())

    def over_shards(
        self, function: Callable[..., Sequence[Tensor]], *queries: Tensor
    ) -> list[Tensor]:
        """Evaluate `function` on each rank's shard for the queries of all ranks. Returns (ranks, B, ...)."""
        ranks = self.exchange.size
        rows = len(queries[0])
        # Every rank gets all rows of this rank.
        counts = torch.full((ranks,), rows, device=queries[0].device)
        sent, received = self.exchange.agree_on_rows(counts)
        all_queries = self.exchange.move(packed(queries).repeat(ranks, 1), sent, received)

        answers = function(self.local, *unpacked(all_queries, queries))
        returned = unpacked(self.exchange.move(packed(answers), received, sent), answers)
        return [answer.reshape(ranks, rows, *answer.shape[1:]) for answer in returned]
