"""The files of `lit-knn probe`: the table, and the settings for `fit -c`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from torch import Tensor

from lit_knn.common.files import written_whole
from lit_knn.common.tables import as_texts, text_table, write_rows
from lit_knn.metrics.estimator_error import mean_and_error
from lit_knn.metrics.probe import TARGETS
from lit_knn.metrics.probe_shares import share_left


def table_rows(t: Sequence[float], table: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Return a row for each noise level, with means and standard errors of the measured values.

    Of a target, it has the share of the error that the target leaves, with its standard error.

    Args:
        t: the noise levels.
        table: result of `lit_knn.metrics.probe.measure_levels` at these levels.
    """
    rows = []
    for number, level in enumerate(t):
        irreducible = table["irreducible"][number]
        row: dict[str, float] = {"t": level, "latents": len(irreducible)}

        for name, values in table.items():
            if name in TARGETS:
                result = share_left(name, values[number], irreducible)
            else:
                result = mean_and_error(values[number])
            row[name], row[f"{name}_se"] = result
        rows.append(row)
    return rows


def write_table(path: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Write probe.csv with the rows of `table_rows`."""
    write_rows(path, [as_texts(row, "") for row in rows])


def shown_table(rows: Sequence[Mapping[str, float]]) -> str:
    """Return the rows as a table for a terminal, without standard errors and times."""
    names = [name for name in rows[0] if not name.endswith(("_se", "_ms"))]
    return text_table([as_texts(row, ".3g") for row in rows], names)


def write_settings(
    path: Path,
    lines: Sequence[str],
    options: Mapping[str, float | list[float]],
) -> None:
    """Write probe.yaml: the sentences as comments, and the options for `fit -c`.

    Args:
        path: the file.
        lines: the sentences.
        options: options of the model.
    """
    text = yaml.safe_dump({"model": {"init_args": dict(options)}}, sort_keys=False)
    comments = "".join(f"# {line}\n" for line in lines)
    with written_whole(path) as partial:
        partial.write_text(comments + text, encoding="utf-8")
