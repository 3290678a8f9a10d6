"""Records cases, by hashes of their data and latents and sums of their exact means, and compares with the records."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.referee.cases.case import Case, noisy
from lit_knn.referee.cases.exact import ExactMeans, hash_of

RECORDED = Path(__file__).parent / "recorded"
# Sums of float64 means differ by less between machines; a real change of a mean is larger.
TOLERANCE = 1e-8
# The recorded sums cover so many of the first latents, so that a run on few latents is checked, too.
RECORDED_LATENTS = 8


def record(case: Case, data: str, x: Tensor, noise: Tensor, exact: ExactMeans) -> dict[str, Any]:
    """Describe a case by hashes of data and latents, and by sums of the exact means, which machines agree on.

    Args:
        case: the case.
        data: fingerprint of the data.
        x: (latents, *shape), the images that the latents come from.
        noise: (latents, *shape).
        exact: the exact means.
    """
    return {
        "data": data,
        "N": case.N,
        "d": x[0].numel(),
        "latents": _latents_hash(case, x, noise),
        "means": {f"{t:g}": sums(mean[:RECORDED_LATENTS]) for t, mean in exact.means.items()},
        "exact_error": {f"{t:g}": error for t, error in exact.errors.items()},
    }


def write_record(case: Case, new: dict[str, Any]) -> Path:
    """Write a record into the package. It replaces the record of the same data; records of other copies stay."""
    path = RECORDED / f"{case.name}.json"
    others = [known for known in recorded_data(case) if known["data"] != new["data"]]
    # The data of a case that makes them are one set only.
    kept = [] if case.make is not None else others
    with written_whole(path) as partial:
        partial.write_text(json.dumps([*kept, new], indent=1) + "\n", encoding="utf-8")
    return path


def sums(means: Tensor) -> list[float]:
    """Return the mean square, and the mean with random signs, of means (B, *shape): any change of one shows."""
    flat = means.flatten(1)
    signs = 1.0 - 2.0 * ((torch.arange(flat.shape[1]) * 2_654_435_761 % 2**32) >> 31).double()
    return [flat.square().mean().item(), (flat * signs).mean().item()]


def recorded_data(case: Case) -> list[dict[str, Any]]:
    """Return what is recorded about each known copy of the case's data."""
    path = RECORDED / f"{case.name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def record_of(case: Case, fingerprint: str) -> dict[str, Any] | None:
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


def compare_latents(case: Case, recorded: dict[str, Any], x: Tensor, noise: Tensor) -> None:
    """Raise InputError if the first latents are other than recorded."""
    found = _latents_hash(case, x, noise)
    if found != recorded["latents"]:
        raise InputError(f"case {case.name}: the latents have the hash {found[:12]}, not {recorded['latents'][:12]}")


def compare_means(case: Case, recorded: dict[str, Any], exact: ExactMeans) -> None:
    """Raise InputError if the means of the first latents are other than recorded."""
    for t, mean in exact.means.items():
        for found, known in zip(sums(mean[:RECORDED_LATENTS]), recorded["means"][f"{t:g}"], strict=True):
            if not abs(found - known) <= TOLERANCE:
                raise InputError(
                    f"case {case.name}: at t={t:g} the exact means sum to {found!r}, recorded is {known!r}"
                )


def _latents_hash(case: Case, x: Tensor, noise: Tensor) -> str:
    first = slice(RECORDED_LATENTS)
    return hash_of(noisy(x[first], noise[first], t).numpy() for t in case.levels)
