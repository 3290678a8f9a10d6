"""The curves of Figure 4, read from the folders of training runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_knn import estimators
from lit_knn.common.errors import InputError
from lit_knn.common.tables import CHECKPOINTS_PREFIX, FIDELITY_CSV, read_rows
from lit_knn.estimators.counts import Count

HIGHER_IS_BETTER = {"inception_score", "precision", "recall"}


@dataclass
class Curve:
    """The metric over the training of one estimator; a resumed run's folders make one curve.

    Attributes:
        estimator: class name.
        k: neighbours searched, or None.
        n: samples drawn, or None.
        metric: name of the metric.
        points: (images seen, value), ascending.
    """

    estimator: str
    k: int | None
    n: int | None
    metric: str
    points: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The best value of the metric."""
        return max(map(self._quality, self.points))[1]

    def passes(self, other: "Curve") -> int | None:
        """Return the images seen when this curve is first better than the best of `other`; None if it never is."""
        best = self._quality((0, other.best))[0]
        return next((point[0] for point in self.points if self._quality(point)[0] > best), None)

    def _quality(self, point: tuple[int, float]) -> tuple[float, float]:
        value = point[1]
        return (value if self.metric in HIGHER_IS_BETTER else -value), value


def read_curves(folders: Sequence[str | Path], metric: str) -> list[Curve]:
    """Read the config.yaml of each run folder, and the table of its kept checkpoints or, without it, fidelity.csv.

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
    """Read class name, k and n of the estimator from the config.yaml of a run, for the command `owner`.

    Raises:
        InputError: the file does not exist or has no estimator.
    """
    if not path.is_file():
        raise InputError(f"{owner}: {path}: no such file; give the folders of training runs, such as runs/x/knn_0")
    try:
        estimator = yaml.safe_load(path.read_text())["model"]["init_args"]["estimator"]
        options = estimator.get("init_args") or {}
        name = estimator["class_path"].rpartition(".")[2]
        return name, _number(name, options, "k"), _number(name, options, "n")
    except (KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{owner}: {path} tells no model.init_args.estimator") from error


def _number(estimator: str, options: dict[str, Any], option: str) -> int | None:
    """Read an option of an estimator: None if it is not given, and the default of its class if it is null."""
    count = getattr(getattr(estimators, estimator, None), option, None)
    given = options.get(option)
    return count.default if given is None and option in options and isinstance(count, Count) else given


def _read_points(folder: Path, metric: str) -> dict[int, float]:
    tables = [*sorted(folder.glob(f"{CHECKPOINTS_PREFIX}*.csv")), folder / FIDELITY_CSV]
    tables = [path for path in tables if path.is_file()]
    if not tables:
        raise InputError(
            f"figure4: {folder / FIDELITY_CSV}: no such file; the run must have "
            f"lit_knn.callbacks.Fidelity, or what it kept be measured: lit-knn best --run {folder}"
        )
    for path in tables:
        try:
            points = {int(row["images_seen"]): float(row[metric]) for row in read_rows(path) if row.get(metric)}
        except (KeyError, ValueError) as error:
            raise InputError(f"figure4: {path}: {error}") from error
        if points:
            return points
    raise InputError(f"figure4: {tables[-1]} has no values of --metric {metric}")
