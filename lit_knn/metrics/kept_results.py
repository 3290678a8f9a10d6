"""Finished results of measurements in a folder, with the settings that each depends on."""

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError
from lit_knn.common.files import make_folder, written_whole
from lit_knn.common.settings import fingerprint
from lit_knn.common.tables import SAME_SETTINGS, ResultsTable, Row


class KeptResults:
    """Results that are kept for all runs, so that an interrupted measurement goes on and none is repeated.

    Each result is a row of the CSV file `path`. Its last column, `settings`, is a hash of everything that the result
    depends on, and `settings/HASH.json` beside the file lists it. A result is found again only with the same settings.
    All ranks make the object and call its methods, and the first one reads and writes.

    Args:
        path: the CSV file.
        columns: the type of each column, by name.
        key: names of the columns that identify a result.
        settings: the settings of results, in JSON types, by the first values of their keys as a tuple. With
            `{(): settings}` the same settings hold for all results.
    """

    def __init__(
        self,
        path: Path,
        columns: Mapping[str, type],
        key: tuple[str, ...],
        settings: Mapping[Any, Mapping[str, object]],
    ) -> None:
        self.path, self.key, self.settings = path, key, settings
        # The number of values of `key` on which the settings depend.
        self._depth = len(next(iter(settings)))
        self._table = ResultsTable(path, {**columns, "settings": str}, (*key, "settings"))
        self.rows: list[Row] = on_first_rank(self._open)  # all results in the file

    def _open(self) -> list[Row]:
        make_folder(self.path.parent)
        return self._table.load()

    def refuse_other_settings(self) -> None:
        """Refuse a file that has results of other settings, if the same settings hold for all results.

        The error names the first option that differs.
        """
        for row in self.rows:
            if row["settings"] != self.hash_of():
                self._refuse(str(row["settings"]))

    def _refuse(self, settings_hash: str) -> NoReturn:
        """Raise an error that names the first option that differs from the settings of this hash."""
        path = self._settings_path(settings_hash)
        now = self.settings[()]
        old = on_first_rank(lambda: json.loads(path.read_text()) if path.exists() else {})

        differing = [name for name in {**now, **old} if now.get(name) != old.get(name)]
        name = differing[0] if differing else "settings"
        results = f"results with {name}={old.get(name)}, not {now.get(name)}"
        raise InputError(f"{self.path} has {results}: {SAME_SETTINGS}")

    def hash_of(self, *key: str | int | float) -> str:
        """Return the hash of the settings of a result, given the values of its key."""
        return fingerprint(self.settings[key[: self._depth]])

    def find(self, *key: str | int | float) -> Row | None:
        """Return the kept result with these values of the columns `key`, or None."""
        values = dict(zip(self.key, key, strict=True))
        return self._table.find(self.rows, **values, settings=self.hash_of(*key))

    def add(self, row: Row) -> None:
        """Keep a finished result."""
        key = tuple(row[name] for name in self.key)
        result: Row = {**row, "settings": self.hash_of(*key)}
        self.rows.append(result)
        on_first_rank(lambda: self._write(result, self.settings[key[: self._depth]]))

    def _write(self, result: Row, settings: Mapping[str, object]) -> None:
        """Write the settings file, and then the row that names it."""
        with written_whole(self._settings_path(str(result["settings"]))) as partial:
            partial.write_text(json.dumps(settings, indent=2) + "\n")
        self._table.append(result)

    def _settings_path(self, settings_hash: str) -> Path:
        return self.path.parent / "settings" / f"{settings_hash}.json"


def save_tensors(path: Path, **tensors: Tensor | None) -> None:
    """Write tensors to an npz file completely or not at all; an existing file is replaced. None is left out."""
    arrays = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            arrays[name] = tensor.cpu().numpy()

    with written_whole(path) as partial:
        np.savez(partial, **arrays)  # type: ignore[arg-type]


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of `save_tensors`; return no tensors if it is absent or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error):
        return {}
