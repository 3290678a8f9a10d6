"""Reads the parts of a FAISS index: lists, transforms, codes, sizes. Only this file imports faiss."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_knn.errors import InputError


def import_faiss() -> Any:
    """Import faiss, so that every index takes and returns torch tensors.

    Raises:
        InputError: faiss, or a library that it needs, is not installed.
    """
    try:
        import faiss
        import faiss.contrib.torch_utils  # Every index then takes and returns torch tensors, on their device.
    except (ImportError, RuntimeError) as error:  # faiss-gpu-cuvs raises the latter where it misses a library.
        raise InputError(f"FaissIndex needs faiss ({error}): pip install 'lit_knn[faiss]'") from error
    return faiss


def use_threads(number: int) -> None:
    """Set the number of threads of searches. FAISS has a pool of its own, so PyTorch's setting does not reach it."""
    import_faiss().omp_set_num_threads(number)


def reason(error: RuntimeError) -> str:
    """Return FAISS's message without the C++ signature in front of it."""
    return str(error).rsplit(": ", 1)[-1].strip()


def inverted_lists(index: Any) -> Any:
    """Return the IVF part of an index, or None."""
    faiss = import_faiss()
    try:
        return faiss.extract_index_ivf(index)
    except RuntimeError:
        return None


def transforms(index: Any) -> list[Any]:
    """Return the transforms that an index applies to vectors first."""
    faiss = import_faiss()
    if not isinstance(index, faiss.IndexPreTransform):
        return []
    return [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]


def after_transforms(index: Any) -> Any:
    """Return the index behind the transforms, which is the index itself if it has none."""
    faiss = import_faiss()
    return faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index


def projections(index: Any) -> list[tuple[Tensor, Tensor]]:
    """Return centre (d,) and orthonormal rows (r, d) of each projection before the search, as in `PCA256,…`."""
    faiss = import_faiss()
    found = []
    for step in transforms(index):
        if not isinstance(step, faiss.LinearTransform) or not step.is_orthonormal:
            return []  # A step that stretches changes the distances anyway.
        rows = torch.from_numpy(faiss.vector_to_array(step.A).reshape(step.d_out, step.d_in))
        is_pca = isinstance(step, faiss.PCAMatrix)
        centre = torch.from_numpy(faiss.vector_to_array(step.mean)) if is_pca else torch.zeros(step.d_in)
        found.append((centre, rows))
    return found


def put_projections_before(index: Any, steps: list[tuple[Tensor, Tensor]]) -> Any:
    """Put the `projections` of an index before it again. Returns the index itself if there are none."""
    faiss = import_faiss()
    if not steps:
        return index
    whole = faiss.IndexPreTransform(index)
    for centre, rows in reversed(steps):
        step = faiss.LinearTransform(rows.shape[1], rows.shape[0], True)
        faiss.copy_array_to_vector(rows.cpu().numpy().ravel(), step.A)
        faiss.copy_array_to_vector(-(rows @ centre).cpu().numpy(), step.b)
        step.is_trained = step.is_orthonormal = True
        whole.prepend_transform(step)
    return whole


def held_bytes(index: Any, N: int) -> int | None:
    """Predict the bytes of an empty index after N vectors are added. Returns None if unknown."""
    faiss = import_faiss()
    if isinstance(index, faiss.IndexPreTransform):
        held = held_bytes(after_transforms(index), N)
        # FAISS's PCA also keeps the components that it does not use.
        steps = sum(4 * s.d_in * (s.d_out + s.d_in * isinstance(s, faiss.PCAMatrix)) for s in transforms(index))
        return None if held is None else held + steps
    if isinstance(index, faiss.IndexIVF):
        centres = held_bytes(faiss.downcast_index(index.quantizer), index.nlist)
        return None if centres is None else N * (index.code_size + 8) + centres
    return N * index.code_size if hasattr(index, "code_size") else None


def most_components(index: Any) -> int:
    """Return the most PCA components before an index, 0 without a PCA. FAISS refuses too many only after minutes."""
    steps, pca = transforms(index), import_faiss().PCAMatrix
    return max((step.d_out for step in steps if isinstance(step, pca)), default=0)


def not_l2(index: Any) -> str:
    """Return why the distances of an empty index are not L2 distances of the vectors; empty if they are."""
    faiss = import_faiss()
    if isinstance(index, faiss.IndexRefine):
        # Only the distances of the second index are returned.
        return not_l2(faiss.downcast_index(index.refine_index))
    keeping = (faiss.OPQMatrix, faiss.RandomRotationMatrix, faiss.RemapDimensionsTransform, faiss.CenteringTransform)
    for step in transforms(index):
        projects = isinstance(step, faiss.PCAMatrix) and step.eigen_power == 0
        if not projects and not isinstance(step, keeping):
            return f"{type(step).__name__} changes lengths"
    for part in ("index", "storage"):
        if inner := getattr(index, part, None):
            return not_l2(faiss.downcast_index(inner))
    if index.metric_type != faiss.METRIC_L2 or isinstance(index, (faiss.IndexLSH, faiss.IndexIVFSpectralHash)):
        return f"{type(index).__name__} has another distance"
    sq = faiss.ScalarQuantizer
    if getattr(getattr(index, "sq", None), "qtype", None) in (sq.QT_8bit_direct, sq.QT_8bit_direct_signed):
        return "its codes are the whole numbers 0 to 255, and images are in [-1, 1]; use SQ8 with lossless=True"
    return ""


def is_plain_sq8(index: Any) -> bool:
    """Tells whether an index holds 8-bit codes, with or without lists and without transforms."""
    faiss = import_faiss()
    plain = isinstance(index, (faiss.IndexScalarQuantizer, faiss.IndexIVFScalarQuantizer))
    return plain and index.sq.qtype == faiss.ScalarQuantizer.QT_8bit


def code_vectors_themselves(index: Any) -> None:
    """Make lists code the vectors themselves, not their differences from the centre of the list."""
    if isinstance(index, import_faiss().IndexIVFScalarQuantizer):
        index.by_residual = False


# FAISS decodes p to minimum + range · (p + 1/2) / 255. FAISS's own pixel codes, `SQ8_direct`, do not work in lists:
# there FAISS codes differences from the centre, which are no pixels.
PIXEL_MINIMUM, PIXEL_RANGE = -1 - 0.5 / 127.5, 2.0


def let_codes_be_pixels(index: Any) -> None:
    """Make code p of an 8-bit index stand for p / 127.5 − 1, exactly."""
    _set_ranges(index, import_faiss().ScalarQuantizer.QT_8bit, copies=index.d)


def let_codes_share_their_range(index: Any) -> None:
    """Replace the equal ranges that `let_codes_be_pixels` gives the dimensions by one. The codes mean the same.

    With one range, FAISS's kernels for GPUs need no shared memory for ranges; see `faiss_gpu`. On a CPU it would only
    change the rounding of distances.
    """
    _set_ranges(index, import_faiss().ScalarQuantizer.QT_8bit_uniform, copies=1)


def _set_ranges(index: Any, kind: int, copies: int) -> None:
    index.sq.qtype = kind
    index.sq.set_derived_sizes()
    ranges = np.repeat([PIXEL_MINIMUM, PIXEL_RANGE], copies).astype(np.float32)
    import_faiss().copy_array_to_vector(ranges, index.sq.trained)
