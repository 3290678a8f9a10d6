"""Measures bias and variance of Stable Velocity's target (arXiv 2602.05435) beside STF and the one-sample target.

    python -m benchmarks.stable_velocity [--output benchmarks/results/stable_velocity_digits_cpu]

It measures on the digits, against the exact mean over each latent's class, and once more over all images. The x that z
was made from is kept over the repeats ("fixed", as in Figure 3), or drawn from its posterior for each repeat
("resampled", as in training). STEM.csv has the rows of `lit_knn.metrics.ErrorCurve`, STEM.md a table of variances;
STEM_fixed.png and STEM_resampled.png show the curves with classes. docs/training_targets.md reads them.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import Output, Rows, cell, markdown
from lit_knn.common.errors import told_in_one_line
from lit_knn.data import Digits
from lit_knn.estimators import STF, Estimator, OneSample, Switched
from lit_knn.estimators.base import Holdings
from lit_knn.estimators.counts import Count
from lit_knn.estimators.draws import DrawingEstimator, Draws
from lit_knn.figures import figure3, save_figure
from lit_knn.metrics import ErrorCurve
from lit_knn.metrics.latents import noise_grid

# τ = 0.5 of the linear path z = (1 − τ)x + τε is the noise level τ/(1 − τ) = 1 of z/(1 − τ).
SWITCH = 1.0
SHOWN = (0.3, 0.9, 1.1, 2.0, 5.0, 80.0)


class DistinctBank(DrawingEstimator):
    """A bank of n different images that holds the source of z, weighted by likelihood: STF without repetitions.

    Stable Velocity's code keeps the last n images of a class that the data loader gave, so a bank has an image twice
    only around the end of an epoch. Over the possible sources of z there is no bias. If n is at least the size of the
    set, the bank is the whole set, and the mean is exact.

    Args:
        n: images in the bank; reduced to the size of the set.
    """

    uses_source = True
    n = Count(256)

    def __init__(self, n: int | None = None) -> None:
        self.n = n

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds nothing except the images."""
        return Holdings()

    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        order = torch.rand(len(z), self.reference.N, device=z.device, generator=generator)
        if x_source is not None:
            # The least number of a row puts the source into its bank.
            order.scatter_(1, self.reference.locate(x_source).unsqueeze(1), -1.0)
        ids = order.topk(min(self.n, self.reference.N), largest=False).indices
        return Draws(ids=ids, log_factor=torch.zeros_like(ids, dtype=torch.float64))


def estimators(n: int) -> dict[str, Callable[[], Estimator]]:
    """Return the targets by name, with banks of n images."""
    return {
        "Stable Velocity (Switched)": lambda: Switched(OneSample(), STF(n), SWITCH),
        "distinct bank (Switched)": lambda: Switched(OneSample(), DistinctBank(n), SWITCH),
        "STF": lambda: STF(n),
        "one sample": OneSample,
    }


def measure(n: int, levels: list[float], num_z: int, repeats: int) -> Rows:
    """Measure all targets with and without classes, with a fixed and with a resampled source."""
    data, rows = Digits(), []
    data.setup()
    assert data.reference is not None
    for classes in (True, False):
        for resampled in (False, True):
            made = {name: make() for name, make in estimators(n).items()}
            curve = ErrorCurve(made, levels, num_z, repeats, 128, resampled, classes)
            found = [row for level in curve.levels(data.reference) for row in level]
            about = {"classes": classes, "source": "resampled" if resampled else "fixed"}
            rows += [{**about, **row} for row in found]
    return rows


def chosen(rows: Rows, classes: bool, source: str) -> Rows:
    """Return the rows of one setting."""
    return [row for row in rows if row["classes"] == classes and row["source"] == source]


def table(rows: Rows, levels: list[float], quantity: str) -> str:
    """Return a quantity of the posterior mean near the noise levels `SHOWN`, as a table in Markdown."""
    shown = [min(levels, key=lambda level: abs(level / wanted - 1)) for wanted in SHOWN]
    lines = [["target", *(f"t = {t:.2g}" for t in shown)]]
    for name in dict.fromkeys(row["estimator"] for row in rows):
        own = {row["t"]: row for row in rows if row["estimator"] == name}
        lines.append([name, *(cell(own[t][f"mu_{quantity}"], own[t][f"mu_{quantity}_se"]) for t in shown)])
    return markdown(lines)


def main() -> None:
    """Measure, write the rows and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=64, help="images in a bank; a class of the digits has about 180")
    parser.add_argument("--num_z", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--levels", type=int, default=24, help="noise levels from 0.05 to 80")
    parser.add_argument("--output", type=Path, help="stem of the files")
    args = parser.parse_args()
    with told_in_one_line():
        output = Output(args.output, "csv", "md")
        levels = noise_grid(args.levels, 0.05, 80.0)
        rows = measure(args.n, levels, args.num_z, args.repeats)
    output.write_rows(rows)
    about = f"{args.num_z} z and {args.repeats} repeats at {args.levels} noise levels"
    parts = [f"`{' '.join(['python -m benchmarks.stable_velocity', *sys.argv[1:]])}`, {about}", ""]
    for classes in (True, False):
        whose = "over the images of the class" if classes else "over all images"
        for source, quantity in (("resampled", "variance"), ("fixed", "bias_sq_corrected")):
            parts += [
                f"{quantity} {whose}, {source} source, n = {args.n}:\n",
                table(chosen(rows, classes, source), levels, quantity),
                "",
            ]
    output.tell("\n".join(parts))
    for source in ("fixed", "resampled"):
        if args.output is not None:
            save_figure(figure3(chosen(rows, True, source)), args.output.with_name(f"{args.output.name}_{source}"))


if __name__ == "__main__":
    main()
