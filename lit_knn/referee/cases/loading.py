"""Loads a case: its images, latents and exact means, compared with what is recorded about them."""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.referee.cases import exact as exact_means
from lit_knn.referee.cases.case import Case, noisy
from lit_knn.referee.cases.exact import ExactMeans, hash_of
from lit_knn.reference import ReferenceSet

RECORDED = Path(__file__).parent / "recorded"
# Sums of float64 means differ by less between machines; a real change of a mean is larger.
TOLERANCE = 1e-8
# The recorded sums cover so many of the first latents, so that a run on few latents is checked, too.
RECORDED_LATENTS = 8


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
    fingerprint = reference.fingerprint()
    recorded = _recorded(case, fingerprint)
    x, noise = case.draw(reference, number)
    if recorded is not None and number >= RECORDED_LATENTS:
        _compare_latents(case, recorded, x, noise)
    key = hash_of(noisy(x, noise, t).numpy() for t in case.levels)
    key = hashlib.sha256(f"{fingerprint} {case.levels} {key}".encode()).hexdigest()
    path = (cache or default_cache()) / f"{case.name}-{number}-{key[:12]}.npz"
    exact = exact_means.cached(path, key, case.levels)
    if exact is None:
        exact = exact_means.compute(reference, x, noise, case.levels)
        exact_means.keep(path, key, exact)
    if recorded is not None and number >= RECORDED_LATENTS:
        _compare_means(case, recorded, exact)
    return LoadedCase(case, reference, x, noise, exact)


def record(loaded: LoadedCase) -> dict[str, Any]:
    """Describe a case by hashes of data and latents, and by sums of the exact means, which machines agree on."""
    case, first = loaded.case, slice(RECORDED_LATENTS)
    return {
        "data": loaded.reference.fingerprint(),
        "N": case.N,
        "d": loaded.reference.d,
        "latents": hash_of(noisy(loaded.x[first], loaded.noise[first], t).numpy() for t in case.levels),
        "means": {f"{t:g}": sums(mean[first]) for t, mean in loaded.exact.means.items()},
        "exact_error": {f"{t:g}": error for t, error in loaded.exact.errors.items()},
    }


def sums(means: Tensor) -> list[float]:
    """Return the mean square, and the mean with random signs, of means (B, *shape): any change of one shows."""
    flat = means.flatten(1)
    signs = 1.0 - 2.0 * ((torch.arange(flat.shape[1]) * 2_654_435_761 % 2**32) >> 31).double()
    return [flat.square().mean().item(), (flat * signs).mean().item()]


def recorded_data(case: Case) -> list[dict[str, Any]]:
    """Return what is recorded about each known copy of the case's data."""
    path = RECORDED / f"{case.name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _recorded(case: Case, fingerprint: str) -> dict[str, Any] | None:
    """Return the record of these data. Unknown copies of images are told on one line, other unknown data refused."""
    known = recorded_data(case)
    found = next((entry for entry in known if entry["data"] == fingerprint), None)
    if found is None and known:
        told = f"case {case.name}: the data have the hash {fingerprint[:12]}, recorded: "
        told += ", ".join(entry["data"][:12] for entry in known)
        if case.make is not None:
            raise InputError(told)
        print(f"{told}; rows of other data are not comparable", file=sys.stderr)
    return found


def _compare_latents(case: Case, recorded: dict[str, Any], x: Tensor, noise: Tensor) -> None:
    first = slice(RECORDED_LATENTS)
    found = hash_of(noisy(x[first], noise[first], t).numpy() for t in case.levels)
    if found != recorded["latents"]:
        raise InputError(f"case {case.name}: the latents have the hash {found[:12]}, not {recorded['latents'][:12]}")


def _compare_means(case: Case, recorded: dict[str, Any], exact: ExactMeans) -> None:
    for t, mean in exact.means.items():
        for found, known in zip(sums(mean[:RECORDED_LATENTS]), recorded["means"][f"{t:g}"], strict=True):
            if not abs(found - known) <= TOLERANCE:
                raise InputError(
                    f"case {case.name}: at t={t:g} the exact means sum to {found!r}, recorded is {known!r}"
                )
