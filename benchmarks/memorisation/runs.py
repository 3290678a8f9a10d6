"""The runs: estimator × number of images × seed, with their images and their lengths."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from lit_knn.common.errors import InputError
from lit_knn.common.rng import keyed_generator
from lit_knn.data import Digits
from lit_knn.estimators import Estimator, Exact, OneSample
from lit_knn.index import FaissIndex
from lit_knn.nets import UNet
from lit_knn.reference import ReferenceSet

ESTIMATORS: Mapping[str, Callable[[], Estimator]] = {"OneSample": OneSample, "Exact": Exact}
# These streams are the last parts of keys, beside those of benchmarks/learning_curves/kinds.py.
HELD_OUT, SUBSETS = 34, 35


class Run(NamedTuple):
    """One training."""

    estimator: str
    N: int
    seed: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


class Lengths(NamedTuple):
    """How the runs are measured; all of it is part of a row's fingerprint.

    Attributes:
        held_out: images that no run trains on.
        first: step of the first measurement.
        per_doubling: measurements per doubling of the step.
        batch_size: images per step.
        samples: samples of each measurement.
        held: latents of each error.
    """

    held_out: int = 360
    first: int = 100
    per_doubling: int = 2
    batch_size: int = 64
    samples: int = 512
    held: int = 512

    def checked(self) -> "Lengths":
        """Return self.

        Raises:
            InputError: a number that is too small.
        """
        for name, value in self._asdict().items():
            least = 2 if name in ("held_out", "samples") else 1
            if value < least:
                raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        return self

    def steps(self, last: int) -> list[int]:
        """Return the steps of the measurements up to `last`, evenly spaced in their logarithm."""
        steps: list[int] = []
        while (step := round(self.first * 2 ** (len(steps) / self.per_doubling))) <= last:
            steps.append(step)
        return sorted(set(steps))


def network() -> UNet:
    """Make the network of all runs: the compact U-Net with a quarter of the weights of configs/table2/digits.yaml."""
    return UNet(in_channels=1, channels=16, multipliers=(1, 2), blocks=1)


def image_sets(N: int, seed: int, held_out: int) -> tuple[ReferenceSet, ReferenceSet]:
    """Draw N digits for training by the seed, and the held-out digits, which are the same for all runs.

    The N images of a seed are among its 2N, so that runs differ as little as possible but for N.

    Raises:
        InputError: fewer digits than that.
    """
    images = torch.as_tensor(Digits().load()[0])
    if N + held_out > len(images):
        raise InputError(f"--images {N} and --held-out {held_out} are more than the {len(images)} digits")
    order = torch.randperm(len(images), generator=keyed_generator("cpu", HELD_OUT))
    held, rest = order[:held_out], order[held_out:]
    chosen = rest[torch.randperm(len(rest), generator=keyed_generator("cpu", seed, SUBSETS))[:N]]
    return ReferenceSet(images[chosen], FaissIndex()), ReferenceSet(images[held])


def runs_of(estimators: Sequence[str], images: Sequence[int], seeds: int, lengths: Lengths) -> list[Run]:
    """List the runs, all of seed 0 first, and of each seed the small sets first, which memorise soonest.

    Raises:
        InputError: an unknown estimator, fewer images than a batch, or no seed.
    """
    unknown = next((each for each in estimators if each not in ESTIMATORS), None)
    if unknown is not None:
        raise InputError(f"--estimators {unknown}: there are {', '.join(ESTIMATORS)}")
    if min(images) < lengths.batch_size:
        raise InputError(f"--images {min(images)} is less than --batch-size {lengths.batch_size}")
    if seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {seeds}")
    return [Run(name, N, seed) for seed in range(seeds) for N in sorted(images) for name in estimators]
