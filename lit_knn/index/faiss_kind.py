"""Reads a factory string of FAISS: its parts, its memory, and what GPUs can search.

FAISS ends the process if a call breaks a limit of its GPU kernels, so we check each limit first. The limits come from
the sources of FAISS 1.15. Files without a folder are in `faiss/gpu`:

- `GpuCloner.cpp` copies `Flat`, `IVF<c>,Flat` and `IVF<c>,SQ8`. A transform in front would stay on the CPU, so we apply
  principal components ourselves, in PyTorch.
- k and nprobe are at most 2,048 (`utils/DeviceDefs.cuh`, GPU_MAX_SELECTION_K).
- A kernel that searches lists (`impl/IVFInterleaved.cuh`) keeps the neighbours in shared memory: 12 bytes each, in
  four lists (two for k > 1,024) of the next larger width. Codes with a range for each dimension add 8·d bytes of
  ranges. FAISS never requests more than the default of 48 KiB, on any GPU, and calls `abort()` if the kernel does not
  start (issues 3207 and 4509). So with ranges, d = 3,072 allows k <= 512, and a smaller d does not allow more.
"""

import re
from typing import NamedTuple, Self

from lit_knn.common.errors import InputError

KIND = re.compile(r"(?:PCA([1-9][0-9]*),)?(?:IVF([1-9][0-9]*),)?(Flat|SQ8)")
TESTED = "Flat, SQ8, IVF<c>,Flat, IVF<c>,SQ8, PCA<r>,... of these"
# FAISS trains k-means on at most this many points per list, and discards the others.
TRAINING_POINTS_PER_LIST = 256
# FAISS trains quantisers and principal components on at most this many images.
TRAINING_POINTS = 50_000
# Maximum bytes of the training points in float32. Else the points of ImageNet would take more memory than the index.
TRAINING_BYTES = 2 * 2**30
# Approximate bytes of the vectors that are added to the index at a time.
CHUNK_BYTES = 64 * 2**20
# Limit of k and of nprobe on a GPU.
MAX_SELECTION = 2048
# Shared memory of a GPU kernel.
SHARED_BYTES = 48 * 1024
# FAISS has a kernel for each of these lengths of the list of neighbours.
WIDTHS = (1, 32, 64, 128, 256, 512, 1024, 2048)


class FaissKind(NamedTuple):
    """The parts of a factory string. N is the number of vectors, d their dimension."""

    components: int  # principal components that are searched, 0 for all dimensions
    lists: int  # lists of an inverted file, 0 without
    is_sq8: bool  # whether a dimension takes 8 bits, not 32
    lossless: bool  # whether the codes are the values of a pixel

    @classmethod
    def read(cls, factory: str, lossless: bool) -> Self:
        """Read a factory string. Raises InputError for a kind that is not tested."""
        parts = KIND.fullmatch(factory)
        if parts is None:
            raise InputError(
                f"FaissIndex: factory={factory!r} is not one of the tested kinds: {TESTED}"
            )
        components, lists, codes = parts.groups()
        return cls(int(components or 0), int(lists or 0), codes == "SQ8", lossless)

    @property
    def has_ranges(self) -> bool:
        """Whether the codes have a range for each dimension."""
        return self.is_sq8 and not self.lossless

    def searched_d(self, d: int) -> int:
        """Return the dimension of the vectors that FAISS searches."""
        return self.components or d

    def bytes_per_vector(self, d: int) -> int:
        """Return the bytes of the codes of one vector."""
        return self.searched_d(d) * (1 if self.is_sq8 else 4)

    def largest_k(self, d: int) -> int:
        """Return the most neighbours that fit a GPU's shared memory, beside the ranges; 0 if none fits.

        The beginning of this file explains the sizes.
        """
        free = SHARED_BYTES
        if self.has_ranges:
            free -= 8 * self.searched_d(d)

        largest = 0
        for width in WIDTHS:
            lists = 4 if width <= 1024 else 2
            if 12 * width * lists <= free:
                largest = width
        return largest

    def training_points(self, N: int, d: int) -> int:
        """Return how many of the vectors train the index."""
        useful = self.lists * TRAINING_POINTS_PER_LIST or TRAINING_POINTS
        affordable = TRAINING_BYTES // (4 * d)
        # FAISS needs at least one point for each list.
        return min(max(min(useful, affordable), self.lists), N)

    def nbytes(self, N: int, d: int) -> int:
        """Predict the bytes of the index."""
        held = N * self.bytes_per_vector(d)
        if self.lists:
            # The id of each vector, and the centre of each list in float32.
            held += 8 * N + 4 * self.searched_d(d) * self.lists

        if self.components:
            # FAISS also keeps the components that it does not use.
            held += 4 * d * (self.components + d)
        return held

    def build_bytes(self, N: int, d: int) -> int:
        """Predict the additional bytes that the build needs, for training or for adding vectors."""
        # Without lists, FAISS copies the codes each time it enlarges their array.
        growth = 0 if self.lists else N * self.bytes_per_vector(d)
        adding = CHUNK_BYTES + growth
        needs_training = self.components or self.lists or self.is_sq8
        if not needs_training:
            return adding

        # A value of the training points takes 4 bytes in float32, and 1 where it was stored as a pixel. With lists,
        # FAISS also copies the points, for 4 more bytes, to code their differences from the centres.
        bytes_per_value = 9 if self.lists and self.has_ranges else 5
        return max(bytes_per_value * d * self.training_points(N, d), adding)
