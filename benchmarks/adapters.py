"""Measures other people's estimators by the size of the batches that their code sees.

    python -m benchmarks.adapters CHECKOUTS [--data images.npy] [--images 2000] [--latents 128] [--entries STF ...]

CHECKOUTS is the folder of the checkouts, with their names (see docs/referee.md). Each row of the table is an
estimator at a batch size, each column a noise level: the squared error per dimension of the posterior mean against
`Exact`, with its standard error over the latents. A failure is written in the row. The data are scikit-learn's
digits, or the first images of a file.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.common import cell, load, markdown
from lit_knn.common.errors import InputError, told_in_one_line
from lit_knn.common.rng import keyed_generator
from lit_knn.data import Digits
from lit_knn.estimators import KNN, STF, Estimator, Exact, UniformSNIS, Wiener
from lit_knn.referee.adapters import (
    GoldDiff,
    KNNScore,
    KNNScoreSTF,
    PSPCEmpirical,
    STFTarget,
    StudioOptimal,
    StudioPCALocality,
    StudioWiener,
)
from lit_knn.reference import ReferenceSet

BATCHES = (1, 16, 128)
ALL_AT_ONCE = (2**20,)
MESSAGE = 70


class Subject(NamedTuple):
    """An estimator and the batch sizes to measure it at."""

    make: Callable[[], Estimator]
    batches: Sequence[int] = BATCHES


def subjects(folder: Path, N: int, d: int) -> dict[str, dict[str, Subject]]:
    """Return the estimators by group and name, for N images of dimension d."""
    k, n = min(2048, N // 4), 256
    score, stf, studio = (str(folder / name) for name in ("knn-score", "stf", "analytic-diffusion-studio"))
    golddiff, pspc = str(folder / "GoldDiff"), str(folder / "pspc")
    pca = {b: Subject(partial(StudioPCALocality, studio, b), ALL_AT_ONCE) for b in (1, 16, 128, 512, N)}
    return {
        "KNN": {
            f"knn-score KNNDenoiser, k={k}": Subject(lambda: KNNScore(score, k, n)),
            f"knn-score KNNDenoiser, k={k}, SQ8": Subject(lambda: KNNScore(score, k, n, quantize=True), ALL_AT_ONCE),
            "knn-score KNNDenoiser, k=1": Subject(lambda: KNNScore(score, 1, n), ALL_AT_ONCE),
            f"lit_knn KNN, k={k}": Subject(lambda: KNN(k, n)),
        },
        "STF": {
            "knn-score STFDenoiser": Subject(lambda: KNNScoreSTF(score, n), (*BATCHES, 240, 256, 257)),
            "knn-score STFDenoiser, shared=false": Subject(lambda: KNNScoreSTF(score, n, shared=False)),
            "stf stf_targets": Subject(lambda: STFTarget(stf, n), (*BATCHES, 240, 256, 257)),
            "lit_knn STF": Subject(lambda: STF(n)),
            "lit_knn UniformSNIS": Subject(lambda: UniformSNIS(n), ALL_AT_ONCE),
        },
        "Studio": {
            "optimal, 2000 images": Subject(lambda: StudioOptimal(studio, min(2000, N))),
            "optimal, 256 images": Subject(lambda: StudioOptimal(studio, 256), ALL_AT_ONCE),
            "wiener": Subject(lambda: StudioWiener(studio), ALL_AT_ONCE),
            "lit_knn Wiener": Subject(lambda: Wiener(min(N, d)), ALL_AT_ONCE),
        },
        "PCA": {f"pca_locality, loader batch {b}": subject for b, subject in pca.items() if b > 1},
        "PCA, loader batch 1": {"pca_locality, loader batch 1": pca[1]},
        "GoldDiff": {"GoldDiff": Subject(lambda: GoldDiff(golddiff))},
        "PSPC": {"PSPC empirical": Subject(lambda: PSPCEmpirical(pspc))},
    }


class Latents(NamedTuple):
    """Sources, latents and exact means, (L, *shape) each, at one noise level."""

    t: float
    x: Tensor
    z: Tensor
    exact: Tensor


def draw(reference: ReferenceSet, t: float, count: int) -> Latents:
    """Draw latents from the forward process and compute their exact means."""
    generator = keyed_generator("cpu", 0)
    x = reference.take(torch.randint(reference.N, (count,), generator=generator))
    z = x + t * torch.randn(x.shape, generator=generator)
    return Latents(t, x, z, Exact().bind(reference).posterior_mean(z.double(), t))


def error(estimator: Estimator, latents: Latents, batch: int) -> str:
    """Return the mean squared error in batches of `batch` with its standard error, or what failed."""
    generator = keyed_generator("cpu", 1)
    errors = []
    try:
        for x, z, exact in zip(*(part.split(batch) for part in latents[1:]), strict=True):
            mean = estimator.posterior_mean(z, latents.t, x_source=x, generator=generator)
            errors.append((mean.double() - exact).square().flatten(1).mean(1))
    except InputError as failure:
        return (str(failure).partition(" fails: ")[2] or str(failure))[:MESSAGE]
    each = torch.cat(errors)
    return cell(each.mean().item(), each.std().item() / math.sqrt(len(each)))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--data", type=Path, help="images; default: scikit-learn's digits")
    parser.add_argument("--images", type=int, help="use so many of the images; default: all")
    parser.add_argument("--latents", type=int, default=128)
    parser.add_argument("--levels", type=float, nargs="+", default=[0.5, 1.0, 2.0, 5.0, 80.0])
    parser.add_argument("--entries", nargs="+", help="groups of the table; default: all")
    args = parser.parse_args(argv)
    images = torch.as_tensor(Digits().load()[0]) if args.data is None else load(args.data)
    reference = ReferenceSet(images[: args.images])
    groups = subjects(args.checkouts, reference.N, reference.d)
    for name in args.entries or groups:
        if name not in groups:
            raise InputError(f"--entries: {name} is none of {', '.join(groups)}")
    levels = [draw(reference, t, args.latents) for t in args.levels]
    print(f"N={reference.N}, d={reference.d}, {args.latents} latents")
    header = ["estimator", "batch", *(f"t={t:g}" for t in args.levels)]
    print(markdown([header]))
    for name, subject in ((n, s) for group in args.entries or groups for n, s in groups[group].items()):
        estimator = subject.make().bind(reference)
        for batch in subject.batches:
            told = str(min(batch, args.latents)) if batch in ALL_AT_ONCE else str(batch)
            if batch <= args.latents or batch in ALL_AT_ONCE:
                row = [name, told, *(error(estimator, latents, batch) for latents in levels)]
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    with told_in_one_line():
        main()
