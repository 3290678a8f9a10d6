"""The table of all runs: finished runs are never repeated, and rows of other settings are refused."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.learning_curves.grid import Run
from lit_knn.common.errors import InputError
from lit_knn.common.files import locked
from lit_knn.common.tables import ResultsTable, Row, write_rows

COLUMNS: Mapping[str, type] = {
    "set": str,
    "module": str,
    "estimator": str,
    "seed": int,
    "step": int,
    "images": int,
    "images_before": int,
    "cpu_seconds": float,
    "seconds": float,
    "estimator_seconds": float,
    "val_loss": float,
    "val_error": float,
    "held_out_loss": float,
    "fd_pixels": float,
    "fd_pixels_two_steps": float,
    "fd_features": float,
    "precision": float,
    "recall": float,
    "copied_fraction": float,
    "nearest_features": float,
    "gradient_variance": float,
    "gradient_variance_se": float,
    "gradient_norm_sq": float,
    "one_sample_variance": float,
    "gradient_bias_sq": float,
    "one_sample_bias_sq": float,
    "distance_to_exact": float,
    "distance_to_patches": float,
    "distance_to_smoothed": float,
    "settings": str,
    "hardware": str,
}


class CurveTable(ResultsTable):
    """Rows of runs, several for each. Several processes may add runs to one file at the same time.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, COLUMNS, (*Run._fields, "step"))
        path.parent.mkdir(parents=True, exist_ok=True)

    def runs(self) -> dict[Run, list[Row]]:
        """Return the rows of each run."""
        runs: dict[Run, list[Row]] = {}
        for row in self.load():
            runs.setdefault(Run._make(row[name] for name in Run._fields), []).append(row)
        return runs

    def finished(self) -> dict[Run, str]:
        """Return the finished runs with the fingerprint of their settings. Here their rows are written together."""
        return {run: str(rows[0]["settings"]) for run, rows in self.runs().items()}

    def check(self, settings: Mapping[Run, str]) -> None:
        """Raise InputError if a run in the file has other settings than this command would give it."""
        for run, rows in self.runs().items():
            known = str(rows[0]["settings"])
            if settings.get(run, known) != known:
                raise InputError(
                    f"--output {self.path}: {run} has the settings {known}, this command's are {settings[run]}: give "
                    "another file, or the options of that run"
                )

    def add(self, run: Run, rows: Iterable[Row]) -> None:
        """Add the rows of a finished run, if the file does not have them."""
        complete = [{name: row[name] for name in self.columns} for row in rows]
        with locked(self.path):
            if run not in self.finished():
                write_rows(self.path, [*self.load(), *complete])

    def pictures(self, run: Run) -> Path:
        """Return the file for the first samples of a run, beside the table."""
        return self.path.with_suffix("") / f"{run}.npy"
