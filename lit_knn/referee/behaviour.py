"""How an estimator behaves: errors of its code, randomness, side effects, sources and batches."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError, first_line
from lit_knn.common.rng import Stream, drawn_so_far, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.referee.cases.loading import LoadedCase
from lit_knn.referee.entry import OwnCallable
from lit_knn.reference import ReferenceSet

# Latents of these checks.
FEW = 8


@dataclass(frozen=True)
class Contestant:
    """A bound estimator that is measured. An error of its code becomes one line that begins with its name."""

    name: str
    estimator: Estimator

    @classmethod
    def bound(cls, name: str, estimator: Estimator, images: ReferenceSet) -> Self:
        """Bind an estimator, if it needs images; raise InputError if its code fails."""
        with _in_one_line(f"{name} cannot be made from the images"):
            return cls(name, estimator.bind(images) if estimator.needs_reference else estimator)

    def mean(self, z: Tensor, t: Tensor | float, x: Tensor, generator: torch.Generator) -> Tensor:
        """Call the estimator, with the source `x` only if it uses one; raise InputError if it fails."""
        with _in_one_line(f"{self.name} cannot be measured"):
            return self.estimator.posterior_mean(z, t, x if self.estimator.uses_source else None, generator)


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        told = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{what}: {told}") from error


def check_conduct(own: Contestant, loaded: LoadedCase) -> None:
    """Refuse an estimator that fails, changes z or t, or draws from global generators, before long work."""
    for t in loaded.case.levels:
        z, x = loaded.z(t)[:FEW], loaded.x[:FEW].float()
        kept, levels = z.clone(), torch.full((len(z),), float(t))
        before = _global_states()
        own.mean(z, levels, x, _generator())
        if isinstance(own.estimator, OwnCallable):
            # `posterior_mean` hands out copies. The user's own code must also leave the originals alone.
            own.estimator.call(z, levels, _generator())
        if _global_states() != before:
            raise InputError(f"{own.name} draws from global random numbers: draw from the generator that it is given")
        if not torch.equal(z, kept) or not (levels == torch.tensor(t)).all():
            raise InputError(f"{own.name} changes its argument z or t: work on a copy")


def behaviour(own: Contestant, loaded: LoadedCase, batch: int) -> dict[str, Any]:
    """Return the columns on behaviour. The estimator has passed `check_conduct`."""
    t = sorted(loaded.case.levels)[len(loaded.case.levels) // 2]
    z, x = loaded.z(t)[:FEW], loaded.x[:FEW].float()
    first, again = (own.mean(z, t, x, _generator()) for _ in range(2))
    return {
        "repeats_itself": "yes" if torch.equal(first, again) else "no",
        "needs_source": _needs_source(own.estimator, z, t),
        "batch_gap": f"{_batch_gap(own, loaded, batch):.3g}" if own.estimator.deterministic else "",
    }


def _generator() -> torch.Generator:
    return keyed_generator("cpu", 0, Stream.BEHAVIOUR)


def _global_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, np.asarray(keys).tobytes(), tuple(rest), drawn_so_far(torch.device("cpu"))


def _needs_source(estimator: Estimator, z: Tensor, t: float) -> str:
    if not estimator.uses_source:
        return "no"
    try:
        estimator.posterior_mean(z, t, None, _generator())
    except Exception:  # Any error says that it cannot do without.
        return "yes"
    return "uses it"


def _batch_gap(own: Contestant, loaded: LoadedCase, batch: int) -> float:
    """Compute the MSE between batches of one and of `batch`, at the noise level where it is largest."""
    gaps = []
    for t in loaded.case.levels:
        z, x = loaded.z(t)[:batch], loaded.x[:batch].float()
        ones = [own.mean(z[i : i + 1], t, x[i : i + 1], _generator()) for i in range(min(FEW, len(z)))]
        gap = own.mean(z, t, x, _generator())[:FEW].double() - torch.cat(ones).double()
        gaps.append(gap.square().mean().item())
    return max(gaps)
