"""A reference set whose images are split over the ranks of a distributed run."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lit_knn.distributed import Exchange, in_every_process
from lit_knn.errors import InputError
from lit_knn.index import Index
from lit_knn.linalg.pca import PrincipalComponents, Projection
from lit_knn.reference.reference_set import ReferenceSet, expand_labels


def shard_rows(N: int, rank: int, size: int) -> slice:
    """The images of one rank, where N are split evenly over `size` ranks."""
    return slice(N * rank // size, N * (rank + 1) // size)


class ShardedReferenceSet(ReferenceSet):
    """A reference set of which each rank holds, and searches, its shard; to estimators it is the whole set.

    What exact search finds is what it finds in the whole set. An approximate index is built of each shard, with the
    same settings: lists of an inverted file are for so many fewer images, and `nprobe` are searched in each shard.

    Ids count through the shards in the order of the ranks. Of `search`, `gather` and every estimator all ranks must
    make the same number of calls, in the same order, with any number of rows, also none. To the other ranks a rank
    sends, with R ranks, B its own latents and m = min(k, N/R):

    - `search`: 4·d bytes (z) and 12·m bytes (what it found for a z of theirs), for each z and each other rank;
    - `fetch`, `gather`: 8 bytes for each different image that another rank holds, which sends it as it is stored: d
      bytes of uint8, 4·d of float32. An estimator fetches its n draws for all z at once, and holds them meanwhile: at
      most B·n images, much fewer at small t, where most draws are one image;
    - `Exact`: (4·d + 8) bytes (z and t) and 8·d + 8 bytes (the mean over the shard, and the logarithm of its
      normaliser) for each z and each other rank.

    Of `projection` every rank holds the coordinates of all images, N·r values.

    Args:
        images: those of this rank, see `ReferenceSet`.
        index: of this rank's images; see `ReferenceSet`.
        hflip: see `ReferenceSet`; the same on all ranks.
        labels: (N_rank,), those of this rank's images, or None. All of them are then held on each rank.
        sha256: of this rank's images, where it is known.

    Attributes:
        local: the reference set of this rank's images.
        exchange: what counts the bytes sent.

    Raises:
        InputError: see `ReferenceSet`; images whose shape or type, labels or mirroring differ between ranks.
    """

    sharded = True

    def __init__(
        self,
        images: Tensor | np.ndarray,
        index: Index | None = None,
        hflip: bool = False,
        labels: Tensor | np.ndarray | None = None,
        sha256: str | None = None,
    ) -> None:
        super().__init__(images, index, hflip, labels, sha256)
        self.exchange = Exchange()
        # What is asked of one shard alone is asked of this one, an ordinary set.
        self.local = ReferenceSet(self.images, self.index, hflip, labels, sha256)
        self.local._index_shared = False
        sizes = self._agree_on_shards(labels)
        self._stored = sum(sizes)
        self._largest = max(sizes) * (2 if hflip else 1)
        # Of the first image of each rank but the first, among the stored ones.
        self._bounds = torch.tensor(sizes, device=self.device).cumsum(0)
        self._offset = sum(sizes[: self.exchange.rank])
        self.N = self._stored * (2 if hflip else 1)

    def _of_all(self, rows: Tensor) -> Tensor:
        """Of a row for each image of the shard: a row for each image of the set."""
        return torch.cat([part for half in rows.split(len(self.images)) for part in self.exchange.all_gather(half)])

    def _agree_on_shards(self, labels: Tensor | np.ndarray | None) -> list[int]:
        """The number of images of each rank; takes the labels of all."""
        what = f"{self.shape} {self.images.dtype} hflip={self.hflip} labels={labels is not None}"
        own = None if labels is None else torch.as_tensor(labels).cpu().numpy()
        each = in_every_process(lambda: (what, len(self.images), own))
        for rank, (other, *_) in enumerate(each):
            if other != each[0][0]:
                raise InputError(f"the shards differ: rank 0 has images {each[0][0]}, rank {rank} {other}")
        sizes, parts = [size for _, size, _ in each], [part for *_, part in each if part is not None]
        self.labels = expand_labels(np.concatenate(parts), sum(sizes), self.hflip) if parts else None
        return sizes

    def _move_images(self, device: torch.device) -> None:
        self.images = self.local.to(device).images
        self._bounds = self._bounds.to(device)

    def fingerprint(self, mirrored: bool = True) -> str:
        """Of the images of all ranks, the same on each; every rank must call it. See `ReferenceSet.fingerprint`."""
        return hashlib.sha256(
            " ".join(in_every_process(partial(self.local.fingerprint, mirrored))).encode()
        ).hexdigest()

    def build_index(self, k: int = 1) -> None:
        """Build the index of this rank's shard; every rank must call it. See `ReferenceSet.build_index`.

        Raises:
            InputError: the index of this or of another rank refuses its settings.
        """
        if not self._index_built:
            in_every_process(lambda: self.local.build_index(k))
            self._index_built = True

    def search(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `ReferenceSet.search`: each rank searches its shard for all latents, and what is nearest is merged."""
        self._check_search(z, k)
        self.build_index()
        # A shard may have fewer than k; all shards give the same number of columns.
        width = min(k, self._largest)

        def found(part: ReferenceSet, queries: Tensor) -> tuple[Tensor, Tensor]:
            sq_dist, ids = part.search(queries, min(width, part.N))
            missing = (0, width - ids.shape[1])
            sq_dist = torch.nn.functional.pad(sq_dist, missing, value=torch.inf)
            return sq_dist, torch.nn.functional.pad(self._to_global(ids), missing, value=-1)

        sq_dist, ids = (answer.transpose(0, 1).flatten(1) for answer in self.over_shards(found, z.float()))
        sq_dist, order = sq_dist.topk(k, dim=1, largest=False, sorted=True)
        return sq_dist, ids.gather(1, order)

    def locate(self, x: Tensor) -> Tensor:
        """See `ReferenceSet.locate`; each rank looks in its shard, and the nearest is taken."""
        self._check_search(x, 1)
        self.build_index()

        def found(part: ReferenceSet, queries: Tensor) -> tuple[Tensor, Tensor]:
            sq_dist, ids = part._located(queries)
            return sq_dist[:, 0], self._to_global(ids[:, 0])

        sq_dist, ids = self.over_shards(found, x.float())
        return ids.gather(0, sq_dist.argmin(0, keepdim=True)).squeeze(0)

    def _to_global(self, ids: Tensor) -> Tensor:
        """Ids in the whole set of ids in this shard; −1 stays."""
        own = len(self.images)
        mirrored = ids >= own
        shifted = torch.where(mirrored, ids - own + self._stored, ids) + self._offset
        return torch.where(ids < 0, ids, shifted)

    def fetch(self, ids: Tensor) -> tuple[ReferenceSet, Tensor]:
        """See `ReferenceSet.fetch`; each image comes, as it is stored, from the rank that holds it, once for a call."""
        wanted, position = (ids % self._stored).unique(return_inverse=True)
        owner = torch.searchsorted(self._bounds, wanted, right=True)
        # Sorted by id, so by owner too.
        counts = torch.bincount(owner, minlength=self.exchange.size).tolist()
        asked = self.exchange.all_to_all(wanted.split(counts))
        given = self.exchange.all_to_all([self.images.index_select(0, rows - self._offset) for rows in asked])
        if len(wanted) == 0:  # a reference set has an image at least
            return self.local, ids
        fetched = ReferenceSet(torch.cat(given), hflip=self.hflip)
        return fetched, torch.where(ids < self._stored, position, position + len(wanted))

    def gather(self, ids: Tensor) -> Tensor:
        """See `ReferenceSet.gather`."""
        fetched, own_ids = self.fetch(ids)
        return fetched.gather(own_ids)

    def chunks(self, rows: int, mirrored: bool = True) -> Iterator[tuple[int, Tensor]]:
        """See `ReferenceSet.chunks`; every rank gets all images, `rows` at a time, which must be the same on all."""
        for ids in torch.arange(self.N if mirrored else self._stored, device=self.device).split(rows):
            yield int(ids[0]), self.gather(ids)

    def share(self, rank: int, ranks: int, rows: int, mirrored: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """See `ReferenceSet.share`; its own images, which nobody sends, so that no rank waits for another."""
        for start, x in self.local.chunks(rows, mirrored):
            yield self._to_global(torch.arange(start, start + len(x), device=self.device)), x

    def _sum(self) -> Tensor:
        return self.exchange.sum(self.local._sum())

    def principal_components(self, r: int) -> PrincipalComponents:
        """See `ReferenceSet.principal_components`; those of the first rank.

        A rank that rounds differently, on another kind of processor, may find some of them mirrored or turned.
        """
        if r not in self._components:
            own = super().principal_components(r)
            mean, basis, variances = map(self.exchange.of_first, own[:3])
            residual = torch.tensor([own.residual_variance], dtype=torch.float64, device=self.device)
            outside = self.exchange.of_first(residual).item()
            self._components[r] = PrincipalComponents(mean, basis, variances, outside)
        return self._components[r]

    def _project(self, components: PrincipalComponents, dtype: torch.dtype) -> Projection:
        """Each rank projects its shard; all of them hold the coordinates of all images."""
        own = self.local._project(components, dtype)
        return Projection(components, self._of_all(own.coordinates), self._of_all(own.half_sq_norms))

    def over_shards(self, function: Callable[..., Sequence[Tensor]], *queries: Tensor) -> list[Tensor]:
        """See `ReferenceSet.over_shards`: `function` sees the shard of its rank and the queries of all ranks.

        Its answers go back to the rank of the query: (ranks, B, ...).
        """
        gathered = [self.exchange.all_gather(query) for query in queries]
        counts = [len(rows) for rows in gathered[0]]
        answers = function(self.local, *(torch.cat(rows) for rows in gathered))
        return [torch.stack(self.exchange.all_to_all(answer.split(counts))) for answer in answers]

    def codes(self, rows: slice) -> Tensor:
        """Of one shard alone, `local.codes`."""
        raise InputError("a sharded reference set has no codes of all its images; its shards have, see `local`")
