"""The reference set: the data set D an estimator averages over, in memory or mapped, with its neighbour index."""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.index import Index, exact_index
from lit_knn.index.base import Vectors
from lit_knn.linalg.precision import full_float32
from lit_knn.reference.base import Reference
from lit_knn.rng import keyed_generator

CHUNK_BYTES = 64 * 2**20
# float32 could not hold the squared distances of larger values.
LARGEST_VALUE = 1e15


class ReferenceSet(Reference):
    """Images (or any vectors), stored once in their own type and gathered as float32 in model space.

    Args:
        images: uint8 (N, C, H, W), whose pixel p becomes p / 127.5 − 1; or float (N, *shape), which is stored as
            float32 and not rescaled (latents, toys). A tensor or a NumPy array. uint8 images are not copied, so they
            may be a file mapped by `read_prepared`.
        index: neighbour index; built at the first search or by `build_index`. Default: exact search,
            by FAISS where it is installed, else by PyTorch; see `exact_index`.
        hflip: also count the mirror image (last axis flipped) of every image, without storing it: id i + N/2 is the
            mirror of image i, and a search queries z and its mirror.
        labels: (N,) integer class labels, or None.
        sha256: hash of the bytes of `images`, if known; `fingerprint` then need not read them all.

    Raises:
        InputError: an empty set, another dtype, float values that are not finite, uint8 images that are not
            (N, C, H, W), hflip on vectors, or a number of labels other than N.
    """

    def __init__(
        self,
        images: Tensor | np.ndarray,
        index: Index | None = None,
        hflip: bool = False,
        labels: Tensor | np.ndarray | None = None,
        sha256: str | None = None,
    ) -> None:
        super().__init__()
        images = torch.as_tensor(images)
        self.largest = _check_images(images, hflip)
        self.images = images if images.dtype == torch.uint8 else images.float()
        self.hflip = hflip
        self.index = exact_index() if index is None else index
        self.shape = tuple(images.shape[1:])
        self.d = images[0].numel()
        self.N = len(images) * (2 if hflip else 1)
        self.labels = expand_labels(labels, len(images), hflip)
        self.given_sha256 = self._sha256 = sha256
        self._check_file: Callable[[], None] | None = None
        # Whether all processes of a distributed run hold these images.
        self._index_shared = True
        self._unbuilt_index = copy.copy(self.index)

    @property
    def local(self) -> "ReferenceSet":
        """See `Reference`."""
        return self

    def watch(self, check_file: Callable[[], None] | None) -> None:
        """Call `check_file` before images are read, as long as they are mapped from a file; see `read_prepared`."""
        self._check_file = check_file

    def rows(self, rows: slice) -> Tensor:
        """Return some stored images, in their stored type; raise InputError if their file was cut."""
        if self._check_file is not None:
            self._check_file()
        return self.images[rows]

    def _move(self, device: torch.device) -> None:
        if device.type != self.device.type:
            self._check_file = None  # The images are copied, so that the file is not needed any more.
        if self.index_built:
            self.index.to(device)
        self.images = self.images.to(device)

    def fingerprint(self, mirrored: bool = True) -> str:
        """See `Reference.fingerprint`."""
        if self._sha256 is None:
            digest = hashlib.sha256()
            for rows in self.images.split(4096):
                digest.update(rows.cpu().contiguous().numpy())
            self._sha256 = digest.hexdigest()
        what = f"{tuple(self.images.shape)} {self.images.dtype} hflip={self.hflip and mirrored} {self._sha256}"
        return hashlib.sha256(what.encode()).hexdigest()

    def subset(self, rows: Tensor | slice, label: int, sha256: str | None = None) -> "ReferenceSet":
        """Make a set of some stored images of one class, with its own index in the same settings.

        `rows` are on the CPU; a slice makes a view; `sha256` is a hash that only the images of these rows have.
        """
        images = self.images[rows]
        labels = torch.full((len(images),), label, device=self.device)
        part = ReferenceSet(images, copy.copy(self._unbuilt_index), self.hflip, labels, sha256)
        part.label = label
        part.watch(self._check_file if isinstance(rows, slice) else None)
        # Processes of a distributed run use classes at different times, and must not wait for each other.
        part._index_shared = False
        return part

    def picked(self, ids: Tensor) -> "ReferenceSet":
        """Make a set of the images of `ids` (n,), in their stored type. A mirrored image becomes one of its own."""
        if self._check_file is not None:
            self._check_file()
        images = self.images.index_select(0, ids % len(self.images))
        if self.hflip:
            mirrored = (ids >= len(self.images)).reshape(-1, *[1] * len(self.shape))
            images = torch.where(mirrored, images.flip(-1), images)
        labels = None if self.labels is None else self.labels[ids.cpu()]
        part = ReferenceSet(images, copy.copy(self._unbuilt_index), labels=labels)
        # The processes of a distributed run pick different images.
        part.label, part._index_shared = self.label, False
        return part

    def _build_index(self, k: int) -> None:
        # An index holds the vectors of one set. Building it anew would change what another set finds.
        if self.index.in_use:
            self.index = copy.copy(self._unbuilt_index)
        self.index.in_use = True
        self.index.check(len(self.images), self.d, self.device, min(k, len(self.images)))
        sources = (self._stored_chunks, self._training_sample, len(self.images), self.fingerprint, self._index_shared)
        self.index.build(Vectors(*sources))
        self.index.to(self.device)

    def _search(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self._nearest(z, k, lambda queries: self.index.search(queries, min(k, len(self.images))))

    def _locate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sq_dist, ids = self._nearest(x, 1, self.index.locate)
        return sq_dist[:, 0], ids[:, 0]

    @full_float32()
    def _nearest(self, z: Tensor, k: int, find: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Find the k nearest by `find` among the stored images and, with hflip, their mirror images."""
        if not self.hflip:
            return find(z.flatten(1).float())
        # ‖z − mirror(x)‖ = ‖mirror(z) − x‖, so the mirrored images are searched with the mirrored query.
        queries = z.flatten(1).float(), z.flip(-1).flatten(1).float()
        if z.is_cuda:
            # One search reads the vectors once.
            (sq_dist, mirrored_sq_dist), (ids, mirrored_ids) = (part.chunk(2) for part in find(torch.cat(queries)))
        else:
            (sq_dist, ids), (mirrored_sq_dist, mirrored_ids) = map(find, queries)
        mirrored_ids = torch.where(mirrored_ids < 0, mirrored_ids, mirrored_ids + len(self.images))
        sq_dist, order = torch.cat([sq_dist, mirrored_sq_dist], 1).topk(k, dim=1, largest=False, sorted=True)
        return sq_dist, torch.cat([ids, mirrored_ids], 1).gather(1, order)

    def take(self, ids: Tensor) -> Tensor:
        """See `Reference.take`."""
        if self._check_file is not None:
            self._check_file()
        return images_of(self.images, self.hflip, ids)

    def chunks(self, rows: int, mirrored: bool = True) -> Iterator[tuple[int, Tensor]]:
        """See `Reference.chunks`."""
        stored = len(self.images)
        for mirror in range(2 if self.hflip and mirrored else 1):
            for start in range(0, stored, rows):
                x = to_model_space(self.rows(slice(start, start + rows)))
                yield mirror * stored + start, x.flip(-1) if mirror else x

    def share(self, rank: int, ranks: int, rows: int, mirrored: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Reference.share`. The ranks take turns in chunks."""
        for number, (start, x) in enumerate(self.chunks(rows, mirrored)):
            if number % ranks == rank:
                yield torch.arange(start, start + len(x), device=self.device), x

    def _sum(self) -> Tensor:
        total = torch.zeros(self.d, dtype=torch.float64, device=self.device)
        for _, x in self.chunks(chunk_rows(self.d)):
            total += x.flatten(1).sum(0, dtype=torch.float64)
        return total

    def over_shards(self, function: Callable[..., Sequence[Tensor]], *queries: Tensor) -> list[Tensor]:
        """See `Reference.over_shards`. This set is the only part."""
        return [answer.unsqueeze(0) for answer in function(self, *queries)]

    def fetch(self, ids: Tensor) -> tuple["ReferenceSet", Tensor]:
        """See `Reference.fetch`. Returns this set."""
        return self, ids

    def _stored_chunks(self) -> Iterator[Tensor]:
        rows = chunk_rows(self.d)
        for start in range(0, len(self.images), rows):
            yield to_model_space(self.rows(slice(start, start + rows))).flatten(1)

    def _training_sample(self, size: int) -> Tensor:
        ids = torch.randperm(len(self.images), generator=keyed_generator("cpu", 0))[:size]
        return to_model_space(self.images[ids.to(self.device)].cpu()).flatten(1)


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


def _check_images(images: Tensor, hflip: bool) -> float:
    """Refuse images that cannot be used. Returns their largest absolute value in model space, at most."""
    largest = 1.0
    if images.ndim < 2 or len(images) == 0 or images[0].numel() == 0:
        raise InputError(f"images must be (N, *shape) with N >= 1, got shape {tuple(images.shape)}")
    if images.dtype == torch.uint8:
        if images.ndim != 4:
            raise InputError(f"uint8 images must be (N, C, H, W), got shape {tuple(images.shape)}")
    elif not images.is_floating_point():
        raise InputError(f"images must be uint8 or float, got {images.dtype}")
    else:
        largest = _largest_float(images)
    if hflip and images.ndim != 4:
        raise InputError(f"hflip=True needs images (N, C, H, W), got shape {tuple(images.shape)}")
    return largest


def _largest_float(images: Tensor) -> float:
    """Return the largest absolute value of images; refuse values that are not finite or too large."""
    largest = 0.0
    for start in range(0, len(images), 4096):
        # The check uses float32, the stored type, because a float64 value may be too large for float32.
        rows = images[start : start + 4096].float().abs().flatten(1).amax(1)
        if not math.isfinite(most := rows.max().item()):
            row = start + int((~rows.isfinite()).int().argmax())
            raise InputError(f"images hold a value that is not finite (first in item {row})")
        largest = max(largest, most)
    if largest > LARGEST_VALUE:
        raise InputError(f"images hold the value {largest:.3g}, float32 can square sums up to {LARGEST_VALUE:g}")
    return largest


def expand_labels(labels: Tensor | np.ndarray | None, stored: int, hflip: bool) -> Tensor | None:
    """Expand the labels of the `stored` images to all images, mirrored ones included: (N,) int64, or None."""
    if labels is None:
        return None
    labels = torch.as_tensor(labels).cpu()
    if labels.shape != (stored,):
        raise InputError(f"labels must have shape ({stored},), one for each image, got {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"labels must be integers, got {labels.dtype}")
    # int64 holds the labels, so that a larger uint64 would become negative.
    labels = labels.long()
    if (labels < 0).any():
        raise InputError(f"labels must be from 0 to 2^63 - 1, got {labels[labels < 0][0].item()} as int64")
    return torch.cat([labels, labels]) if hflip else labels
