"""Stored pixels as the 8-bit integers that processors multiply."""

from torch import Tensor

from lit_knn.linalg.int8 import HALF_SQ_NORM_ROWS, half_sq_norms, pixel_codes
from lit_knn.reference.reference_set import ReferenceSet


def codes_of(reference: ReferenceSet, rows: slice) -> Tensor:
    """Return stored pixels p of uint8 images as p − 128: (c, d), int8."""
    return pixel_codes(reference.rows(rows)).flatten(1)


def half_sq_norms_of(reference: ReferenceSet) -> Tensor:
    """Return ‖code‖²/2 of each stored image, float32, (N,) or with hflip (N/2,). It is computed once and kept."""
    pieces = (slice(i, i + HALF_SQ_NORM_ROWS) for i in range(0, len(reference.images), HALF_SQ_NORM_ROWS))
    return reference.cached("half_sq_norms", lambda: half_sq_norms(codes_of(reference, rows) for rows in pieces))
