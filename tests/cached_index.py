"""A reference set whose index is kept in a folder."""

import torch

from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet

# An index of 20,000 images that takes a moment to build.
LARGE = "IVF64,SQ8"


def images(n=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 1, 4, 6), dtype=torch.uint8, generator=generator)


def queries(seed=1):
    return torch.randn(7, 1, 4, 6, generator=torch.Generator().manual_seed(seed))


def started(folder, factory="IVF4,SQ8", pictures=None, **options):
    """Make the reference set as a new process does; its index is built or found."""
    index = FaissIndex(factory, cache_dir=str(folder), **options)
    reference = ReferenceSet(images() if pictures is None else pictures, index)
    reference.build_index()
    return reference


def started_large(folder):
    """Build the index that takes a moment; the test kills this process."""
    started(folder, LARGE, images(20_000))
