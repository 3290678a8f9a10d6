"""Loads a case: its images, latents and exact means, compared with what is recorded about them."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.referee.cases import exact as exact_means
from lit_knn.referee.cases.case import Case, noisy
from lit_knn.referee.cases.exact import ExactMeans, hash_of
from lit_knn.referee.cases.recording import (
    RECORDED_LATENTS,
    compare_latents,
    compare_means,
    record,
    record_of,
    write_record,
)
from lit_knn.reference import ReferenceSet


@dataclass
class LoadedCase:
    """A case that is ready.

    Attributes:
        case: its definition.
        reference: the images.
        x: (latents, *shape), float64, the images that the latents come from.
        noise: (latents, *shape), float64.
        exact: the exact means.
    """

    case: Case
    reference: ReferenceSet
    x: Tensor
    noise: Tensor
    exact: ExactMeans

    def z(self, t: float) -> Tensor:
        """Return the latents at noise level t, (latents, *shape), float32."""
        return noisy(self.x, self.noise, t)


def default_cache() -> Path:
    """Return the folder of exact means."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_knn" / "referee"


def load_case(case: Case, data: Path | None, latents: int | None, cache: Path | None) -> LoadedCase:
    """Load a case. Exact means come from the folder `cache`, or are computed and kept there.

    Args:
        case: the case.
        data: a copy of the images, for cases that need one.
        latents: use only the first so many latents.
        cache: folder; None for `default_cache()`.

    Raises:
        InputError: the data are missing or other than recorded; latents out of range; latents or means differ from the
            recorded ones.
    """
    number = case.latents if latents is None else latents
    if not 2 <= number <= case.latents:
        raise InputError(f"--latents {number}: case {case.name} has 2 to {case.latents}")
    reference = case.reference_set(data)
    known = record_of(case, reference.fingerprint())
    x, noise = case.draw(reference, number)
    # The record is of the first few latents; fewer than these are not compared.
    known = None if number < RECORDED_LATENTS else known
    if known is not None:
        compare_latents(case, known, x, noise)
    exact = _exact_means(case, reference, x, noise, cache)
    if known is not None:
        compare_means(case, known, exact)
    return LoadedCase(case, reference, x, noise, exact)


def record_case(case: Case, data: Path | None, cache: Path | None) -> Path:
    """Compute the exact means of a case, and record what later runs are compared with. Returns the file.

    Raises:
        InputError: the data are missing or of another shape.
    """
    reference = case.reference_set(data)
    x, noise = case.draw(reference, case.latents)
    exact = _exact_means(case, reference, x, noise, cache)
    return write_record(case, record(case, reference.fingerprint(), x, noise, exact))


def _exact_means(case: Case, reference: ReferenceSet, x: Tensor, noise: Tensor, cache: Path | None) -> ExactMeans:
    """Read the exact means from the folder `cache`, or compute and keep them."""
    latents = hash_of(noisy(x, noise, t).numpy() for t in case.levels)
    key = hashlib.sha256(f"{reference.fingerprint()} {case.levels} {latents}".encode()).hexdigest()
    path = (cache or default_cache()) / f"{case.name}-{len(x)}-{key[:12]}.npz"
    exact = exact_means.cached(path, key, case.levels)
    if exact is None:
        exact = exact_means.compute(reference, x, noise, case.levels)
        exact_means.keep(path, key, exact)
    return exact
