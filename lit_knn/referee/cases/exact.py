"""The exact posterior means of a case: computed once in float64, checked by a second method, and kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.progress import progress_bar
from lit_knn.estimators.exact import float_sums
from lit_knn.metrics.kept_results import load_tensors, save_tensors
from lit_knn.referee.cases import noisy
from lit_knn.reference import ReferenceSet, to_model_space

# The second method reads about so many numbers at each noise level, and does so for at least one latent.
CHECKED_NUMBERS, MOST_CHECKED = 10**9, 16
BATCH = 128
CHUNK = 2**17


class ExactMeans(NamedTuple):
    """Exact posterior means at the latents of a case."""

    means: dict[float, Tensor]  # t -> (latents, *shape), float64
    errors: dict[float, float]  # t -> squared error per dimension: the difference from the second method


def compute(reference: ReferenceSet, x: Tensor, noise: Tensor, levels: tuple[float, ...]) -> ExactMeans:
    """Compute the exact means by `float_sums`, and compare the first few with the second method."""
    checked = min(max(CHECKED_NUMBERS // (reference.N * reference.d), 1), MOST_CHECKED, len(x))
    means, errors = {}, {}
    with progress_bar(len(levels) * len(x), "exact means", " z") as bar:
        for t in levels:
            z = noisy(x, noise, t)
            parts = []
            for part in z.double().split(BATCH):
                parts.append(float_sums(reference, part, torch.full((len(part),), t, dtype=torch.float64))[0])
                bar.update(len(part))
            means[t] = torch.cat(parts)
            difference = means[t][:checked] - second_method(reference, z[:checked], t)
            errors[t] = difference.flatten(1).square().mean(1).max().item()
    return ExactMeans(means, errors)


def second_method(reference: ReferenceSet, z: Tensor, t: float) -> Tensor:
    """Compute E[x|z,t], Eq. 8, (B, *shape), from differences z − x and NumPy's sums, all in float64.

    It shares no code with `float_sums`, which multiplies matrices for the distances.
    """
    latents = z.double().flatten(1).numpy()
    sq_dist = np.concatenate([[np.square(one - x).sum(1) for one in latents] for x in _chunks(reference)], axis=1)
    weights = np.exp((sq_dist.min(1, keepdims=True) - sq_dist) / (2 * t * t))
    means, start = np.zeros_like(latents), 0
    for x in _chunks(reference):
        means += weights[:, start : start + len(x)] @ x
        start += len(x)
    return torch.from_numpy(means / weights.sum(1, keepdims=True)).reshape(z.shape)


def _chunks(reference: ReferenceSet) -> Iterator[np.ndarray]:
    """Yield all images, mirrored ones included, (rows, d), float64. A chunk fits into a processor's cache."""
    for stored in reference.images.split(max(CHUNK // reference.d, 1)):
        x = to_model_space(stored).double()
        yield x.flatten(1).numpy()
        if reference.hflip:
            yield x.flip(-1).flatten(1).numpy()


def kept(path: Path, levels: tuple[float, ...]) -> ExactMeans | None:
    """Read means that `keep` wrote; None if there are none, or the file is damaged."""
    if not (found := load_tensors(path)):
        return None
    means = {t: found[f"mean{i}"] for i, t in enumerate(levels)}
    return ExactMeans(means, dict(zip(levels, found["errors"].tolist(), strict=True)))


def keep(path: Path, exact: ExactMeans) -> None:
    """Write the means and their errors."""
    means = {f"mean{i}": mean for i, mean in enumerate(exact.means.values())}
    save_tensors(path, errors=torch.tensor(list(exact.errors.values()), dtype=torch.float64), **means)
