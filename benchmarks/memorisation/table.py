"""The table of the runs: each measurement adds a row at once, so that the table also tells of unfinished runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.learning_curves.table import RunTable
from benchmarks.memorisation.runs import Run
from lit_knn.common.files import locked
from lit_knn.common.tables import Row, write_rows

COLUMNS: Mapping[str, type] = {
    "estimator": str,
    "N": int,
    "seed": int,
    "step": int,
    "cpu_seconds": float,
    "copied_fraction": float,
    "mean_nearest_distance": float,
    "fd_pixels": float,
    "train_error": float,
    "held_error": float,
    "exact_error": float,
    "settings": str,
    "hardware": str,
}


class MemorisationTable(RunTable[Run]):
    """Rows of the runs.

    Args:
        path: the file.
        last_step: step of the last measurement of a run that never memorises.
        enough: copied fraction at which a run ends.
    """

    def __init__(self, path: Path, last_step: int, enough: float) -> None:
        super().__init__(path, Run, COLUMNS)
        self.last_step, self.enough = last_step, enough

    def ended(self, row: Row) -> bool:
        """Tell whether a run is finished with this row."""
        return int(row["step"]) >= self.last_step or float(row["copied_fraction"]) >= self.enough

    def finished(self) -> dict[Run, str]:
        """See `RunTable.finished`."""
        return {run: str(rows[0]["settings"]) for run, rows in self.runs().items() if self.ended(rows[-1])}

    def put(self, run: Run, rows: Sequence[Row]) -> None:
        """Replace the rows of a run."""
        with locked(self.path):
            runs = self.runs() | {run: [{name: row[name] for name in COLUMNS} for row in rows]}
            write_rows(self.path, [row for run in sorted(runs) for row in runs[run]])
