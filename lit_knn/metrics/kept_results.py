"""Finished results of measurements in a folder, with the settings that each depends on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.common.settings import fingerprint
from lit_knn.common.tables import ResultsTable, Row


class KeptResults:
    """Results that are kept for all runs, so that an interrupted measurement goes on and none is repeated.

    Each result is a row of a CSV file. Its last column, `settings`, is a hash of everything that the result depends on,
    and `settings/HASH.json` beside the file lists it. A result is found again only with the same settings.

    Args:
        path: the CSV file, in the folder of the results; both need not exist.
        columns: name and type of each column but `settings`.
        key: the columns that identify a result among those of the same settings.

    Raises:
        InputError: the folder cannot be made, or the file cannot be read. All ranks must make the object.
    """

    def __init__(self, path: Path, columns: Mapping[str, type], key: tuple[str, ...]) -> None:
        self.path = path
        self._table = ResultsTable(path, {**columns, "settings": str}, (*key, "settings"))
        self._rows = on_first_rank(self._open)

    def find(self, settings: Any, **key: str | int | float) -> Row | None:
        """Return the result of these settings with this key, or None."""
        return self._table.find(self._rows, settings=fingerprint(settings), **key)

    def add(self, row: Mapping[str, Any], settings: Any) -> None:
        """Keep a new result; only the first rank may call this.

        Args:
            row: the columns but `settings`.
            settings: everything that the result depends on, in JSON types.
        """
        kept: Row = {**row, "settings": fingerprint(settings)}
        with written_whole(self.path.parent / "settings" / f"{kept['settings']}.json") as partial:
            partial.write_text(json.dumps(settings, indent=2) + "\n")
        self._table.append(kept)
        self._rows.append(kept)

    def _open(self) -> list[Row]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"folder={self.path.parent} cannot be made: {error.strerror}") from error
        return self._table.load()
