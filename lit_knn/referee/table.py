"""The table of results: its columns, and the version of the protocol."""

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_knn.common.errors import InputError
from lit_knn.common.files import locked
from lit_knn.common.memory import machine_bytes
from lit_knn.common.tables import read_rows, write_rows
from lit_knn.common.versions import package_versions, processor_name, revision

PROTOCOL = 1
"""Version of the protocol. Rows of different versions are not comparable."""

COLUMNS = (
    *("protocol", "case", "data", "N", "d", "name", "settings", "origin", "note"),
    *("t", "mse", "mse_se", "bias_sq", "bias_sq_se", "variance", "variance_se", "score_mse", "score_mse_se"),
    *("mse_ratio", "mse_ratio_se"),
    *("ms", "ms_low", "ms_high", "reference_ms", "time_ratio", "time_ratio_low", "time_ratio_high"),
    *("setup_seconds", "peak_mib", "certified_mse", "certified_share", "certified_spread"),
    *("repeats_itself", "needs_source", "batch_gap"),
    *("latents", "repeats", "batch", "threads", "python", "torch", "numpy", "faiss", "lit_knn"),
    *("cpu", "cores", "memory_gb", "date"),
)
MACHINE = ("cpu", "cores", "memory_gb")
IDENTITY = ("case", "name", "settings", "t", "latents", "repeats", "batch", "threads", *MACHINE)
"""Rows that agree in these columns are measurements of the same thing; the later ones replace the earlier ones."""

Rows = list[dict[str, Any]]


def surroundings() -> dict[str, Any]:
    """Return the columns about programs, machine and date."""
    packages, memory = package_versions(), machine_bytes()
    return {
        "python": platform.python_version(),
        "torch": packages.get("torch", ""),
        "numpy": packages.get("numpy", ""),
        "faiss": packages.get("faiss-gpu") or packages.get("faiss-cpu", ""),
        "lit_knn": revision() or packages.get("lit-knn", ""),
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "memory_gb": "" if memory is None else round(memory / 2**30),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def read_table(path: Path) -> list[dict[str, str]]:
    """Read a table of results; a file that does not exist has no rows. Refuse another version of the protocol."""
    if not path.exists():
        return []
    rows = read_rows(path)
    for row in rows:
        if (found := row.get("protocol")) != str(PROTOCOL):
            raise InputError(f"{path}: the protocol of its rows is {found!r}, this version's is '{PROTOCOL}'")
    return rows


def check_fits(path: Path, case: str, data: str) -> Rows:
    """Return the rows of a table; refuse one that has rows of the case with other data."""
    rows = read_table(path)
    for row in rows:
        if row["case"] == case and row["data"] != data:
            raise InputError(f"{path}: its rows of case {case} are of the data {row['data']}, these are {data}")
    return rows


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a table. It replaces a row of the same `IDENTITY`."""
    with locked(path):
        rows = check_fits(path, row["case"], row["data"])
        others = [old for old in rows if any(old[name] != str(row[name]) for name in IDENTITY)]
        write_rows(path, [{name: one[name] for name in COLUMNS} for one in (*others, row)])
