"""Loads a case: images, latents and exact means, compared with what is recorded. The means are kept."""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.files import make_folder
from lit_knn.common.progress import progress_bar
from lit_knn.estimators.exact import float_sums
from lit_knn.metrics.kept_results import load_tensors, save_tensors
from lit_knn.referee.cases import Case, noisy
from lit_knn.reference import ReferenceSet

# A file for each case: a list with the `record_of` of each known copy of its data.
RECORDED = Path(__file__).parent / "recorded"
# Sums of float64 means differ by less between machines; a real change of a mean is larger.
TOLERANCE = 1e-8
# A record covers the first few latents, so that a run on few latents is checked, too.
RECORDED_LATENTS = 8
BATCH = 128


@dataclass
class LoadedCase:
    """A case that is ready."""

    case: Case
    reference: ReferenceSet
    x: Tensor  # (latents, *shape), float64, the images that the latents come from
    noise: Tensor  # (latents, *shape), float64
    means: dict[float, Tensor]  # exact posterior means by noise level, (latents, *shape), float64

    def z(self, t: float) -> Tensor:
        """Return the latents at noise level t, (latents, *shape), float32."""
        return noisy(self.x, self.noise, t)


def load_case(case: Case, data: Path | None, latents: int | None, cache: Path | None) -> LoadedCase:
    """Load a case; refuse it if data, latents or means are other than recorded. See `referee` for the arguments."""
    number = case.latents if latents is None else latents
    if not 2 <= number <= case.latents:
        raise InputError(f"--latents {number}: case {case.name} has 2 to {case.latents}")
    reference = case.reference_set(data)
    known = _record_of(case, reference.fingerprint())
    loaded = _with_means(case, reference, number, cache)
    if known is None or number < RECORDED_LATENTS:
        return loaded
    found = record_of(loaded)
    if found["latents"] != known["latents"]:
        raise InputError(f"case {case.name}: the latents are not those that are recorded")
    for t, sums in found["means"].items():
        if not np.allclose(sums, known["means"][t], rtol=0, atol=TOLERANCE):
            told = f"the exact means sum to {sums}, recorded is {known['means'][t]}"
            raise InputError(f"case {case.name}: at t={t} {told}")
    return loaded


def recorded(case: Case) -> list[dict[str, Any]]:
    """Return the records of a case, one for each known copy of its data."""
    path = RECORDED / f"{case.name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def record_of(loaded: LoadedCase) -> dict[str, Any]:
    """Describe a case by hashes of data and latents, and by sums of the exact means, which machines agree on."""
    first = slice(RECORDED_LATENTS)
    return {
        "data": loaded.reference.fingerprint(),
        "latents": _hash_of_latents(loaded.case, loaded.x[first], loaded.noise[first]),
        "means": {f"{t:g}": _sums(mean[first]) for t, mean in loaded.means.items()},
    }


def _record_of(case: Case, data: str) -> dict[str, Any] | None:
    """Return the record of data with this hash. For an unknown copy of the user, print a line."""
    records = {known["data"]: known for known in recorded(case)}
    if records and data not in records:
        hashes = ", ".join(known[:12] for known in records)
        told = f"case {case.name}: the data have the hash {data[:12]}, recorded: {hashes}"
        if case.recipe is None:
            raise InputError(told)
        print(f"{told}; rows of other data are not comparable", file=sys.stderr)
    return records.get(data)


def _with_means(case: Case, reference: ReferenceSet, number: int, cache: Path | None) -> LoadedCase:
    """Draw the latents of a case. Read their exact means from the folder `cache`, or compute and keep them there."""
    x, noise = case.draw(reference, number)
    words = f"{reference.fingerprint()} {case.levels} {_hash_of_latents(case, x, noise)}"
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_knn" / "referee"
    path = folder / f"{case.name}-{number}-{hashlib.sha256(words.encode()).hexdigest()[:12]}.npz"
    if not (kept := load_tensors(path)):
        make_folder(folder)
        kept = {f"mean{i}": mean for i, mean in enumerate(exact_means(reference, x, noise, case.levels))}
        save_tensors(path, **kept)
    return LoadedCase(case, reference, x, noise, {t: kept[f"mean{i}"] for i, t in enumerate(case.levels)})


def exact_means(reference: ReferenceSet, x: Tensor, noise: Tensor, levels: tuple[float, ...]) -> list[Tensor]:
    """Compute the exact means at each noise level, (latents, *shape), in float64."""
    means = []
    with progress_bar(len(levels) * len(x), "exact means", " z") as bar:
        for t in levels:
            parts = []
            for part in noisy(x, noise, t).double().split(BATCH):
                parts.append(float_sums(reference, part, torch.full((len(part),), t, dtype=torch.float64))[0])
                bar.update(len(part))
            means.append(torch.cat(parts))
    return means


def _hash_of_latents(case: Case, x: Tensor, noise: Tensor) -> str:
    digest = hashlib.sha256()
    for t in case.levels:
        digest.update(noisy(x, noise, t).numpy().data)
    return digest.hexdigest()


def _sums(means: Tensor) -> list[float]:
    """Return the mean square, and the mean with random signs, of means (B, *shape): any change of one shows."""
    flat = means.flatten(1)
    signs = 1.0 - 2.0 * ((torch.arange(flat.shape[1]) * 2_654_435_761 % 2**32) >> 31).double()
    return [flat.square().mean().item(), (flat * signs).mean().item()]
