"""Measures samples of analytic estimators, without any network, against digits that none of them has seen.

    python -m benchmarks.analytic_samples --output benchmarks/results/analytic_samples_digits_cpu

360 of the 1,797 digits are held out, and the estimators average over the other 1,437. Each method draws the same number
of samples from the same seeds by EDM's sampler, because a Fréchet distance falls with the number of samples. STEM.csv
has one row a method; a second run goes on where the first one stopped. STEM.md is its table. With `--pictures FOLDER`,
analytic_samples_digits.png shows samples, and analytic_over_t_switch.png the hybrids of `Exact` above t_switch.
docs/analytic.md reads them.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.common import markdown
from lit_knn.common.errors import told_in_one_line
from lit_knn.common.files import written_whole
from lit_knn.common.rng import keyed_generator
from lit_knn.common.tables import ResultsTable, Row
from lit_knn.data import Digits
from lit_knn.estimators import Estimator, Exact, PatchPosterior, PCALocality, Smoothed, Wiener
from lit_knn.figures import image_grid, save_figure
from lit_knn.figures.style import dress, look
from lit_knn.index import TorchIndex
from lit_knn.metrics import FidelityMeasure, Pixels, memorisation
from lit_knn.metrics.hybrid import HybridSamples
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.samplers import heun_sampler, seeded_noise
from lit_knn.sampling.schedules import NoiseGrid

HELD_OUT, STEPS, BATCH, SHOWN = 360, 18, 500, 24
T_SWITCH = (0.2, 0.3, 0.4, 0.5, 0.6, 1.0, 2.0)
BELOW: Mapping[str, Callable[[], Estimator]] = {
    "Wiener": lambda: Wiener(64),
    "PatchPosterior(3)": lambda: PatchPosterior(3),
    "PatchPosterior(4)": lambda: PatchPosterior(4),
    "PatchPosterior(5)": lambda: PatchPosterior(5),
}
ALONE: Mapping[str, Callable[[], Estimator]] = {
    "Exact": Exact,
    **BELOW,
    "PatchPosterior(6)": lambda: PatchPosterior(6),
    "PatchPosterior(7)": lambda: PatchPosterior(7),
    "Smoothed(Exact, 0.4)": lambda: Smoothed(Exact(), 0.4, 8),
    "Smoothed(Exact, 0.8)": lambda: Smoothed(Exact(), 0.8, 8),
    "PCALocality(0.05)": lambda: PCALocality(0.05),
}
IN_GRID = (
    "Exact",
    "Wiener",
    "Smoothed(Exact, 0.8)",
    *(f"PatchPosterior({size})" for size in (3, 4, 5)),
    "PCALocality(0.05)",
)
IN_GRID += ("Exact > 0.2 > Wiener", *(f"Exact > {t} > PatchPosterior(3)" for t in ("0.3", "0.4", "0.5", "0.6")))
COLUMNS = {"method": str, "t_switch": float, "below": str, "fd_held_out": float, "fd_training": float}
COLUMNS |= {"copied_fraction": float, "nearest_ratio": float, "precision": float, "recall": float}
COLUMNS |= {"num_samples": int, "seconds": float}
Draw = Callable[[Tensor], Tensor]


def alone(estimator: Estimator, reference: ReferenceSet, seeds: Tensor) -> Tensor:
    """Sample with one estimator at all noise levels."""
    mean = partial(estimator.posterior_mean, generator=keyed_generator("cpu", 0, int(seeds[0])))
    return heun_sampler(mean, seeded_noise(seeds, reference.shape), STEPS)


def copies(reference: ReferenceSet, seeds: Tensor) -> Tensor:
    """Draw training images with replacement: the samples of a perfect copier."""
    drawn = torch.randint(reference.N, (len(seeds),), generator=keyed_generator("cpu", 0, int(seeds[0])))
    return reference.gather(drawn)


def independent(reference: ReferenceSet, seeds: Tensor) -> Tensor:
    """Draw from the Gaussian with the training images' mean and variances, and no covariances."""
    x = reference.gather(torch.arange(reference.N))
    return x.mean(0) + x.std(0) * seeded_noise(seeds, reference.shape)


def methods(reference: ReferenceSet) -> dict[str, tuple[Draw, float, str]]:
    """Return what draws the samples of each method, its t_switch (NaN for none), and the estimator below."""
    nan = float("nan")
    found: dict[str, tuple[Draw, float, str]] = {
        "training digits": (partial(copies, reference), nan, ""),
        "diagonal Gaussian": (partial(independent, reference), nan, ""),
    }
    for name, make in ALONE.items():
        found[name] = (partial(alone, make().bind(reference), reference), nan, name)
    exact = Exact().bind(reference)
    for name, make in BELOW.items():
        samples = HybridSamples(make().bind(reference), reference, STEPS, NoiseGrid(), seed=0)
        for t in T_SWITCH:
            found[f"Exact > {t:g} > {name}"] = (partial(samples.draw, exact, t), t, name)
    return found


def measure(draw: Draw, data: Digits, num_samples: int) -> Row:
    """Draw samples and compare them with the held-out and the training digits."""
    training, held_out = data.reference, data.held_out_reference
    assert training is not None
    assert held_out is not None
    start = time.process_time()
    samples = torch.cat([draw(seeds) for seeds in torch.arange(num_samples).split(BATCH)])
    seconds = time.process_time() - start
    values: dict[str, float] = {}
    for kept in (False, True):
        distance = FidelityMeasure(Pixels(), extra_metrics=("precision", "recall"), held_out=kept)
        real = held_out if kept else training
        distance.prepare(real, num_samples)
        values |= distance(real, [(torch.arange(num_samples), samples)], num_samples)
    found = memorisation(samples, training)
    usual = memorisation(held_out.gather(torch.arange(held_out.N)), training)["mean_nearest_distance"]
    return {
        "fd_held_out": values["fd_pixels_held_out"],
        "fd_training": values["fd_pixels"],
        "copied_fraction": found["copied_fraction"],
        "nearest_ratio": found["mean_nearest_distance"] / usual,
        "precision": values["precision_held_out"],
        "recall": values["recall_held_out"],
        "num_samples": num_samples,
        "seconds": round(seconds, 1),
    }


def table(rows: list[Row], command: str) -> str:
    """Return the rows as a table in Markdown."""
    title = [
        "method",
        "held-out distance",
        "training distance",
        "copied",
        "nearest / held-out's",
        "precision",
        "recall",
    ]
    lines = [[*title, "seconds"]]
    for row in rows:
        numbers = [f"{row[name]:.2f}" for name in ("fd_held_out", "fd_training")]
        numbers += [f"{row['copied_fraction']:.1%}"]
        numbers += [f"{row[name]:.2f}" for name in ("nearest_ratio", "precision", "recall")]
        lines.append([str(row["method"]), *numbers, f"{row['seconds']:.0f}"])
    return f"`{command}`, {rows[0]['num_samples']} samples each, seconds of one core\n\n{markdown(lines)}\n"


def over_t_switch(rows: list[Row]) -> Figure:
    """Draw the distance, the copied fraction and the nearest distance of the hybrids over t_switch."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    columns = {"fd_held_out": "fd_pixels, held-out digits", "copied_fraction": "copied fraction"}
    columns |= {"nearest_ratio": "nearest distance / held-out digits'"}
    by_name = {str(row["method"]): row for row in rows}
    for axes, (column, label) in zip(figure.subplots(1, 3), columns.items(), strict=True):
        for number, name in enumerate(BELOW):
            points = [(t, row[column]) for t in T_SWITCH if (row := by_name.get(f"Exact > {t:g} > {name}"))]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, **look(number))
        floor = {
            "fd_held_out": by_name["training digits"]["fd_held_out"],
            "nearest_ratio": 1.0,
            "copied_fraction": 0.05,
        }
        axes.axhline(floor[column], color="black", linestyle="--", linewidth=1)
        dress(axes, "x", xlabel="$t_{\\mathrm{switch}}$", ylabel=label, ylim=(0, None))
        axes.set_xticks(T_SWITCH, [f"{t:g}" for t in T_SWITCH], fontsize=8)
    figure.axes[1].legend(title="below $t_{\\mathrm{switch}}$", fontsize=8)
    return figure


def grid(chosen: Mapping[str, tuple[Draw, float, str]], names: list[str], held_out: ReferenceSet) -> Figure:
    """Show samples from the same seeds, a row for each method, below a row of held-out digits."""
    rows = {"held-out digits": held_out.gather(torch.arange(SHOWN))}
    rows |= {name: chosen[name][0](torch.arange(SHOWN)) for name in names}
    figure = Figure(figsize=(11, 0.4 * len(rows)), layout="constrained")
    for axes, (name, images) in zip(figure.subplots(len(rows), 1), rows.items(), strict=True):
        axes.imshow(image_grid(images, SHOWN).permute(1, 2, 0))
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
        axes.spines[:].set_visible(False)
    return figure


def main() -> None:
    """Measure what is missing, and write table and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_samples", type=int, default=1000)
    parser.add_argument("--output", type=Path, required=True, help="stem of the files")
    parser.add_argument("--only", nargs="*", help="names of the methods to measure; by default all")
    parser.add_argument("--pictures", type=Path, help="folder of the pictures")
    args = parser.parse_args()
    with told_in_one_line():
        results = ResultsTable(args.output.with_name(f"{args.output.name}.csv"), COLUMNS, ("method", "num_samples"))
        data = Digits(held_out=HELD_OUT, index=TorchIndex())
        data.setup()
        assert data.reference is not None
        chosen = methods(data.reference)
        done = results.load()
        for name, (draw, t, below) in chosen.items():
            if (args.only and name not in args.only) or results.find(done, method=name, num_samples=args.num_samples):
                continue
            row = {"method": name, "t_switch": t, "below": below, **measure(draw, data, args.num_samples)}
            print({key: value if isinstance(value, str) else round(value, 3) for key, value in row.items()}, flush=True)
            results.append(row)
    by_name = {row["method"]: row for row in results.load() if row["num_samples"] == args.num_samples}
    rows = [by_name[name] for name in chosen if name in by_name]
    with written_whole(args.output.with_name(f"{args.output.name}.md")) as partly:
        partly.write_text(
            table(rows, "python -m benchmarks.analytic_samples --output benchmarks/results/" + args.output.name)
        )
    if args.pictures is not None:
        assert data.held_out_reference is not None
        save_figure(over_t_switch(rows), args.pictures / "analytic_over_t_switch")
        save_figure(
            grid(chosen, [name for name in IN_GRID if name in by_name], data.held_out_reference),
            args.pictures / "analytic_samples_digits",
        )


if __name__ == "__main__":
    main()
