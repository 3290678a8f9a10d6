"""Builds an index of FAISS: trains its components, lists and codes on a subset, and adds all vectors."""

import warnings

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.progress import with_progress
from lit_knn.index.base import Vectors
from lit_knn.index.faiss_kind import FaissKind
from lit_knn.index.faiss_library import Searcher, import_faiss

# Number of vectors that are checked, or coded, at a time. The results for so few stay in the processor's cache.
CHECKED_ROWS = 64
# Tolerance in grey levels. It is above the largest rounding error of a pixel in float32.
PIXEL_TOLERANCE = 1e-3
# FAISS decodes p to minimum + range · (p + 1/2) / 255. With these values, code p stands for p / 127.5 − 1. FAISS's own
# pixel codes, `SQ8_direct`, do not work in lists, where FAISS codes differences from the centre.
PIXEL_MINIMUM, PIXEL_RANGE = -1 - 0.5 / 127.5, 2.0


def build_faiss(factory: str, kind: FaissKind, vectors: Vectors) -> Searcher:
    """Train an index of FAISS on a subset, and add all vectors.

    Args:
        factory: FAISS's description of the index.
        kind: the parts of `factory`.
        vectors: the vectors; with `kind.lossless` they must be pixels.

    Raises:
        InputError: a value is no pixel.
    """
    faiss = import_faiss()
    # A few vectors show the dimension, and most wrong values before the training.
    sample = vectors.sample(min(vectors.N, 16))
    if kind.lossless:
        check_pixels(sample)
    d = sample.shape[1]
    index = faiss.index_factory(d, factory)

    if kind.lists:
        lists = faiss.extract_index_ivf(index)
        warn_of_few_vectors(factory, kind.lists, vectors.N, lists.cp.min_points_per_centroid)
        lists.cp.min_points_per_centroid = 1  # Otherwise FAISS itself warns at each clustering.
        # Codes of pixels stand for the vectors themselves, not for differences from the centre of a list.
        lists.by_residual = lists.by_residual and not kind.lossless

    if kind.lossless:
        # All dimensions share one range, so that GPU kernels need no shared memory for ranges.
        index.sq.qtype = faiss.ScalarQuantizer.QT_8bit_uniform
        index.sq.set_derived_sizes()
    if not index.is_trained:
        index.train(vectors.sample(kind.training_points(vectors.N, d)))
    if kind.lossless:
        ranges = torch.tensor([PIXEL_MINIMUM, PIXEL_RANGE], dtype=torch.float32)
        faiss.copy_array_to_vector(ranges.numpy(), index.sq.trained)

    for chunk in with_progress(vectors.chunks(), vectors.N, f"building FAISS index {factory}"):
        on_cpu = chunk.cpu().contiguous()
        if kind.lossless:
            check_pixels(on_cpu)
        index.add(on_cpu)
    return index


def warn_of_few_vectors(factory: str, lists: int, N: int, enough: int) -> None:
    """Warn if the lists have on average fewer vectors than FAISS advises.

    Args:
        factory: FAISS's description of the index.
        lists: number of lists.
        N: number of vectors.
        enough: how many vectors FAISS advises for each list.
    """
    if enough * lists <= N:
        return
    advice = f"FAISS advises {enough} or more for each list"
    most = f"so at most {max(N // enough, 1)} lists"
    warnings.warn(f"{N} images are few for factory={factory!r}: {advice}, {most}", stacklevel=3)


def check_pixels(vectors: Tensor) -> None:
    """Raise InputError if a value of the vectors (c, d) is no pixel, because its code would be another value."""
    for rows in vectors.split(CHECKED_ROWS):
        pixels = (rows + 1) * 127.5
        strange = (pixels - pixels.round().clamp(0, 255)).abs() > PIXEL_TOLERANCE
        if strange.any():
            value = f"the float {rows[strange][0].item():.6g}"
            raise InputError(
                f"FaissIndex: lossless=True needs uint8 images, the data holds {value}"
            )
