"""Measures the error and cost of two targets for warped items (EDM's augmentation): posterior mean and item itself.

    python -m benchmarks.warped --data PATH [--t 0.5 2 3 5 10 20] [--items 16] [--batch 128] [--output STEM]

The first table has the mean squared error per dimension of each estimator's `warped_mean` at each noise level, ± its
standard error over items, against the mean over the warped set in float64 (`Exact`). All items are warped, as EDM does
with p = 0.12. The second table has the time of the targets of one training batch with EDM's own noise levels; 40 % of
the items are warped. It is the ratio of `warped: posterior`, which estimates all items, to `warped: source`, where only
unwarped items use the estimator. `--output` also writes STEM.md.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import Output, cell, load, markdown
from lit_knn.common.errors import told_in_one_line
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import KNN, STF, Estimator, Exact, OneSample, SubspaceKNN
from lit_knn.index import TorchIndex
from lit_knn.metrics.estimator_error import mean_and_error
from lit_knn.modules.augmentation import Augmented, GeometricAugmentation
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.schedules import log_normal_sigmas
from lit_knn.theory.noise import forward_noise
from lit_knn.theory.warp import flip

# EDM's values for CIFAR-10 (Karras et al. 2022, table 1 and appendix F.2): augmentation, mean and deviation of ln σ.
AUGMENTATION, P_MEAN, P_STD = 0.12, -1.2, 1.2


def estimators(k: int, n: int) -> dict[str, Estimator]:
    """Return the measured estimators by name."""
    return {
        "OneSample, the item itself": OneSample(),
        f"STF, n={n}": STF(n),
        "STF, n=1024": STF(1024),
        f"KNN, k={k}, n={n}": KNN(k, n),
        f"SubspaceKNN, n={n}": SubspaceKNN(n=n),
    }


def warped_items(reference: ReferenceSet, count: int, seed: int) -> tuple[Tensor, Augmented]:
    """Return images of the set (count, C, H, W), and their augmentation; it warps every image."""
    generator = keyed_generator("cpu", seed)
    x = reference.gather(torch.randint(reference.N, (10 * count,), generator=generator))
    augmented = GeometricAugmentation(AUGMENTATION)(x, generator)
    rows = augmented.warped.nonzero()[:count, 0]
    chosen = augmented.images[rows], augmented.labels[rows], augmented.warped[rows], augmented.warp.rows(rows)
    return x[rows], Augmented(*chosen)


def errors(reference: ReferenceSet, chosen: dict[str, Estimator], t: float, items: int) -> list[str]:
    """Measure each estimator's squared error per dimension at noise level t; return texts with the standard error."""
    x, augmented = warped_items(reference, items, 1)
    z = forward_noise(augmented.images, torch.full((items,), t), _noise(x, 2))
    exact = Exact().bind(reference).warped_mean(z, t, augmented.warp, x)
    cells = []
    for estimator in chosen.values():
        mean = estimator.warped_mean(z, t, augmented.warp, x, keyed_generator("cpu", 3))
        cells.append(cell(*mean_and_error((mean - exact).double().square().flatten(1).mean(1))))
    return cells


def step_times(reference: ReferenceSet, estimator: Estimator, batch: int, repeats: int) -> tuple[float, float]:
    """Measure how many seconds the estimator takes in a step with `warped: source` and with `warped: posterior`."""
    generator = keyed_generator("cpu", 4)
    x = reference.gather(torch.randint(reference.N, (batch,), generator=generator))
    augmented = GeometricAugmentation(AUGMENTATION)(x, generator)
    sigma = log_normal_sigmas(batch, P_MEAN, P_STD, generator=generator)
    z = forward_noise(augmented.images, sigma, _noise(x, 5))
    plain, rows = ((augmented.warped == value).nonzero()[:, 0] for value in (False, True))
    mirrored, warp = flip(z[plain], augmented.warp.flips[plain]), augmented.warp.rows(rows)

    def source() -> None:
        estimator.posterior_mean(mirrored, sigma[plain], x[plain], generator)

    def posterior() -> None:
        source()
        estimator.warped_mean(z[rows], sigma[rows], warp, x[rows], generator)

    return _seconds(source, repeats), _seconds(posterior, repeats)


def _noise(x: Tensor, seed: int) -> Tensor:
    return torch.randn(x.shape, generator=keyed_generator("cpu", seed))


def _seconds(call: Callable[[], None], repeats: int) -> float:
    call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


@told_in_one_line()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure errors and times, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="zip or folder of images, or an array file")
    parser.add_argument("--t", type=float, nargs="+", default=[0.5, 2, 3, 5, 10, 20], help="noise levels")
    parser.add_argument("--items", type=int, default=16, help="warped items at each noise level")
    parser.add_argument("--batch", type=int, default=128, help="items of the batch whose targets are timed")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--k", type=int, default=2048, help="neighbours of KNN")
    parser.add_argument("--n", type=int, default=256, help="images gathered for each item")
    parser.add_argument("--output", type=Path, help="write STEM.md as well")
    args = parser.parse_args(arguments)
    output = Output(args.output, "md")
    reference = ReferenceSet(load(args.data), index=TorchIndex())
    chosen = estimators(args.k, args.n)
    for estimator in chosen.values():
        if estimator.needs_reference:
            estimator.bind(reference)
    found, times = [["t", *chosen]], [["estimator", "`source`, s", "`posterior`, s", "ratio"]]
    for t in args.t:
        found.append([f"{t:g}", *errors(reference, chosen, t, args.items)])
        print(f"t={t:g} measured", file=sys.stderr, flush=True)
    for name, estimator in chosen.items():
        if estimator.needs_reference:
            source, posterior = step_times(reference, estimator, args.batch, args.repeats)
            times.append([name, f"{source:.3f}", f"{posterior:.3f}", f"{posterior / source:.2f}"])
    head = (
        f"{reference.N} images of {reference.shape}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}"
    )
    output.tell(f"{head}\n\n{markdown(found)}\n\nTargets of {args.batch} items:\n\n{markdown(times)}")


if __name__ == "__main__":
    main()
