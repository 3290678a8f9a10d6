"""How an estimator behaves: randomness, side effects, sources, batches, small t and float16 input."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError, first_line
from lit_knn.common.rng import Stream, drawn_so_far, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.referee.cases import LoadedCase
from lit_knn.referee.cases.case import noisy
from lit_knn.referee.entry import OwnCallable

# Latents of these checks.
FEW = 8
SMALL_T_SHARE = 0.01
CPU = torch.device("cpu")


def generator_of(seed: int) -> torch.Generator:
    """Return a generator for the checks of behaviour."""
    return keyed_generator("cpu", seed, Stream.BEHAVIOUR)


def estimate_of(
    estimator: Estimator, z: Tensor, t: Tensor | float, x: Tensor, generator: torch.Generator, name: str
) -> Tensor:
    """Call an estimator, with the source `x` only if it uses one, and check its estimate.

    Raises:
        InputError: the estimator fails, or its estimate is not finite or not of the shape of z.
    """
    try:
        mean = estimator.posterior_mean(z, t, x if estimator.uses_source else None, generator)
    except (Exception, SystemExit) as error:
        told = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{name} cannot be measured: {told}") from error
    if not isinstance(mean, Tensor) or mean.shape != z.shape:
        got = tuple(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
        raise InputError(f"{name} cannot be measured: its estimate must be {tuple(z.shape)}, got {got}")
    if not mean.isfinite().all():
        raise InputError(f"{name} cannot be measured: its estimate is not finite")
    return mean


def check_conduct(estimator: Estimator, loaded: LoadedCase, name: str) -> None:
    """Try an estimator on a few latents at each noise level, before long work.

    Raises:
        InputError: it fails, returns another shape or NaN, changes z or t, or draws from global generators.
    """
    for t in loaded.case.levels:
        z, x = loaded.z(t)[:FEW], loaded.x[:FEW].float()
        kept, levels = z.clone(), torch.full((len(z),), t)
        before = _global_states()
        estimate_of(estimator, z, levels, x, generator_of(0), name)
        if isinstance(estimator, OwnCallable):
            # `posterior_mean` hands out copies. The user's own code must also leave the originals alone.
            estimator.call(z, levels, generator_of(0))
        if _global_states() != before:
            raise InputError(f"{name} draws from global random numbers: draw from the generator that it is given")
        if not torch.equal(z, kept) or not (levels == torch.tensor(t)).all():
            raise InputError(f"{name} changes its argument z or t: work on a copy")


def behaviour(estimator: Estimator, loaded: LoadedCase, batch: int, name: str) -> dict[str, Any]:
    """Return the columns on behaviour. The estimator has passed `check_conduct`."""
    levels = sorted(loaded.case.levels)
    t = levels[len(levels) // 2]
    z, x = loaded.z(t)[:FEW], loaded.x[:FEW].float()

    def mean(seed: int) -> Tensor:
        return estimate_of(estimator, z, t, x, generator_of(seed), name)

    first = mean(0)
    return {
        "repeats_itself": _word(torch.equal(first, mean(0))),
        "seeded": _word(not torch.equal(first, mean(1))),
        "global_random": "no",
        "mutates": "no",
        "needs_source": _needs_source(estimator, z, t),
        "batch_gap": _batch_gap(estimator, loaded, batch, name) if estimator.deterministic else "",
        "small_t": _or_error(lambda: _small_t(estimator, loaded, name)),
        "float16": _or_error(lambda: _float16(estimator, z, t, x, name)),
    }


def _global_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, np.asarray(keys).tobytes(), tuple(rest), drawn_so_far(CPU)


def _word(yes: bool) -> str:
    return "yes" if yes else "no"


def _needs_source(estimator: Estimator, z: Tensor, t: float) -> str:
    if not estimator.uses_source:
        return "no"
    try:
        estimator.posterior_mean(z, t, None, generator_of(0))
    except Exception:  # Any error says that it cannot do without.
        return "yes"
    return "uses it"


def _batch_gap(estimator: Estimator, loaded: LoadedCase, batch: int, name: str) -> str:
    """Compute the MSE between batches of one and of `batch`, at the noise level where it is largest."""
    gaps = []
    for t in loaded.case.levels:
        z, x = loaded.z(t)[:batch], loaded.x[:batch].float()
        whole = estimate_of(estimator, z, t, x, generator_of(0), name)[:FEW]
        rows = range(min(FEW, len(z)))
        ones = [estimate_of(estimator, z[i : i + 1], t, x[i : i + 1], generator_of(0), name) for i in rows]
        gaps.append((whole.double() - torch.cat(ones).double()).square().mean().item())
    return f"{max(gaps):.3g}"


def _small_t(estimator: Estimator, loaded: LoadedCase, name: str) -> str:
    """Compute the MSE to the nearest image at a hundredth of the smallest t, where it is the posterior mean."""
    t = min(loaded.case.levels) * SMALL_T_SHARE
    x = loaded.x[:FEW].float()
    z = noisy(loaded.x[:FEW], loaded.noise[:FEW], t)
    _, ids = loaded.reference.search(z, 1)
    nearest = loaded.reference.gather(ids[:, 0]).double()
    mean = estimate_of(estimator, z, t, x, generator_of(0), name)
    return f"{(mean.double() - nearest).square().mean().item():.3g}"


def _float16(estimator: Estimator, z: Tensor, t: float, x: Tensor, name: str) -> str:
    half = z.half()
    narrow = estimate_of(estimator, half, t, x, generator_of(0), name)
    wide = estimate_of(estimator, half.float(), t, x, generator_of(0), name)
    return f"{(narrow.double() - wide.double()).abs().max().item():.3g}"


def _or_error(measure: Callable[[], str]) -> str:
    try:
        return measure()
    except InputError as error:
        return " ".join(str(error).split())[:200]
