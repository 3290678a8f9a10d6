"""Figure 4 (fig:ablation): FID against images seen, from the tables that training runs left.

`python -m lit_knn.figures.figure4 RUN_FOLDER... [--metric fid] [--output figure4]` draws figure4.png and figure4.pdf.
A training run need not have measured as it went: `python main.py best --run RUN_FOLDER` measures what it kept, and
folders of `validate` runs, one for each checkpoint, do as well.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_knn import estimators
from lit_knn.errors import InputError
from lit_knn.estimators.counts import Count
from lit_knn.figures.checkpoint_curve import image_unit, log_axis
from lit_knn.figures.save import save_figure
from lit_knn.results import CHECKPOINTS_PREFIX, FIDELITY_CSV, TITLES, read_rows

HIGHER_IS_BETTER = {"inception_score", "precision", "recall"}


@dataclass
class Curve:
    """The metric over the training of one estimator; a resumed run's folders make one curve.

    Attributes:
        estimator: class name.
        k: neighbours searched, or None.
        n: samples drawn, or None.
        metric: what is drawn.
        points: images seen and value, ascending.
    """

    estimator: str
    k: int | None
    n: int | None
    metric: str
    points: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The best value."""
        return max(map(self._quality, self.points))[1]

    def passes(self, other: "Curve") -> int | None:
        """Images seen where it is first better than the other's best, or None."""
        best = self._quality((0, other.best))[0]
        return next((point[0] for point in self.points if self._quality(point)[0] > best), None)

    def _quality(self, point: tuple[int, float]) -> tuple[float, float]:
        value = point[1]
        return (value if self.metric in HIGHER_IS_BETTER else -value), value


def read_curves(folders: Sequence[str | Path], metric: str) -> list[Curve]:
    """Read config.yaml of each run folder, and the table of its kept checkpoints or else fidelity.csv.

    Raises:
        InputError: a file is missing or damaged, or has no values of `metric`.
    """
    curves: dict[tuple[str, int | None, int | None], Curve] = {}
    for folder in map(Path, folders):
        key = read_estimator(folder / "config.yaml", "figure4")
        curve = curves.setdefault(key, Curve(*key, metric))
        known, new = dict(curve.points), _read_points(folder, metric)
        other = next((seen for seen, value in new.items() if known.get(seen, value) != value), None)
        if other is not None:
            raise InputError(
                f"figure4: {folder} has another {metric} at {other} images than a folder before it of the same "
                f"estimator, {' '.join(map(str, key))}: give the folders of one run for each estimator"
            )
        curve.points = sorted({**known, **new}.items())
    return list(curves.values())


def read_estimator(path: Path, owner: str) -> tuple[str, int | None, int | None]:
    """Class name, k and n of the estimator in the config.yaml of a run, for the command `owner`.

    Raises:
        InputError: no such file, or no estimator in it.
    """
    if not path.is_file():
        raise InputError(f"{owner}: {path}: no such file; give the folders of training runs, such as runs/x/version_0")
    try:
        estimator = yaml.safe_load(path.read_text())["model"]["init_args"]["estimator"]
        options = estimator.get("init_args") or {}
        name = estimator["class_path"].rpartition(".")[2]
        return name, _number(name, options, "k"), _number(name, options, "n")
    except (KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{owner}: {path} tells no model.init_args.estimator") from error


def _number(estimator: str, options: dict[str, Any], option: str) -> int | None:
    """An option of an estimator; null is the default of its class, which a run on fewer images than that takes down."""
    count = getattr(getattr(estimators, estimator, None), option, None)
    given = options.get(option)
    return count.default if given is None and option in options and isinstance(count, Count) else given


def _read_points(folder: Path, metric: str) -> dict[int, float]:
    tables = [*sorted(folder.glob(f"{CHECKPOINTS_PREFIX}*.csv")), folder / FIDELITY_CSV]
    tables = [path for path in tables if path.is_file()]
    if not tables:
        raise InputError(
            f"figure4: {folder / FIDELITY_CSV}: no such file; the run must have callbacks.Fidelity, or what it kept be "
            f"measured: python main.py best --run {folder}"
        )
    for path in tables:
        try:
            points = {int(row["images_seen"]): float(row[metric]) for row in read_rows(path) if row.get(metric)}
        except (KeyError, ValueError) as error:
            raise InputError(f"figure4: {path}: {error}") from error
        if points:
            return points
    raise InputError(f"figure4: {tables[-1]} has no values of --metric {metric}")


def draw(curves: Sequence[Curve], metric: str) -> Figure:
    """Two panels, k above and n below, each against the baseline, the one-sample estimator where there is a run of it.

    Dotted lines are the best value of each curve; dashed ones where a curve passes the baseline's best.
    """
    knn = [curve for curve in curves if curve.k is not None]
    baselines = [curve for curve in curves if curve.k is None]
    panels = [(_vary(knn, "k"), "search size k"), (_vary(knn, "n"), "sample size n")]
    unit, divisor = image_unit(max(seen for curve in curves for seen, _ in curve.points))
    figure = Figure(figsize=(6, 7), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for ax, (varied, title) in zip(axes, panels, strict=True):
        _panel(ax, [*baselines, *varied], divisor)
        ax.set_title(f"Effect of the {title}", fontsize=10)
        ax.set_ylabel(TITLES.get(metric, metric))
    axes[-1].set_xlabel(f"Training images seen ({unit})")
    return figure


def _vary(curves: Sequence[Curve], name: str) -> list[Curve]:
    """The curves that differ in this option alone: those with the most common value of the other, the larger first."""
    other = "n" if name == "k" else "k"
    values = Counter(getattr(curve, other) for curve in curves)
    if not values:
        return []
    common = max(values, key=lambda value: (values[value], value))
    return sorted((c for c in curves if getattr(c, other) == common), key=lambda curve: getattr(curve, name))


def _panel(ax: Axes, curves: Sequence[Curve], divisor: float) -> None:
    baseline = next((curve for curve in curves if curve.estimator == "OneSample"), None)
    for number, curve in enumerate(curves):
        color = "black" if curve is baseline else f"C{number}"
        label = curve.estimator if curve.k is None else f"{curve.estimator} k={curve.k}, n={curve.n}"
        images = [seen / divisor for seen, _ in curve.points]
        ax.plot(images, [value for _, value in curve.points], color=color, marker=".", label=label)
        ax.axhline(curve.best, color=color, linestyle=":", linewidth=1)
        if baseline is not None and curve is not baseline:
            passed = curve.passes(baseline)
            if passed is not None:
                ax.axvline(passed / divisor, color=color, linestyle="--", linewidth=1)
    log_axis(ax)
    ax.grid(alpha=0.3, which="both")
    ax.legend(fontsize=8)


def check_absent(stem: str) -> None:
    """Raise InputError if `stem`.png or `stem`.pdf is there already."""
    for path in (Path(f"{stem}.png"), Path(f"{stem}.pdf")):
        if path.exists():
            raise InputError(f"figure4: --output {stem}: {path} is there already; nothing is overwritten")


def main(args: Sequence[str] | None = None) -> None:
    """Draw the figure of the runs on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_knn.figures.figure4", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "folders", nargs="+", metavar="RUN_FOLDER", help="holds config.yaml and the table of a measurement"
    )
    parser.add_argument("--metric", default="fid", help="column of the table")
    parser.add_argument("--output", default="figure4", help="path of the pictures, without .png and .pdf")
    options = parser.parse_args(args)
    try:
        check_absent(options.output)
        paths = save_figure(draw(read_curves(options.folders, options.metric), options.metric), Path(options.output))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    main()
