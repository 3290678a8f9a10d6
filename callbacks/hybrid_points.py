"""The points of Figure 5, each of which is a method and a t_switch, and the table that keeps them."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lit_knn.common.errors import InputError
from lit_knn.common.settings import describe
from lit_knn.estimators import Estimator
from lit_knn.metrics.kept_results import KeptResults

# The baseline method, which starts the network from noisy data.
FORWARD = "forward"


def check_names(names: Iterable[object]) -> None:
    """Raise InputError for a name of an estimator that cannot be part of a file's name, or is the baseline's."""
    for name in names:
        # YAML reads a name such as 1 as a number.
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
            raise InputError(
                f"a name must be a text of letters, digits and _.+- only, got {name!r}"
            )
        if name == FORWARD:
            raise InputError(f"an estimator cannot be called {FORWARD!r}, which is the baseline")


def open_points(
    folder: Path,
    metric: str,
    estimators: Mapping[str, Estimator],
    shared: Mapping[str, object],
) -> KeptResults:
    """Open the table of finished points.

    Args:
        folder: folder of the table.
        metric: name of the distance to the data.
        estimators: the estimators by the names of their methods.
        shared: everything that the points of all methods depend on, as plain values.
    """
    columns = {
        "method": str,
        "t_switch": float,
        metric: float,
        "copied_fraction": float,
        "mean_nearest_distance": float,
        "num_samples": int,
        "num_steps": int,
        "seed": int,
        "seconds": float,
    }
    by_method: dict[tuple[str], dict[str, object]] = {}
    for name, estimator in estimators.items():
        by_method[(name,)] = {"estimator": describe(estimator), **shared}
    by_method[(FORWARD,)] = {"estimator": None, **shared}

    # Each distance has its own file, because a file with other columns would be refused.
    path = folder / f"hybrid_sampling_{metric}.csv"
    return KeptResults(path, columns, ("method", "t_switch"), by_method)
