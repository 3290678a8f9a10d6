"""Runs the referee from Python: loads the case, measures the estimator, and adds the rows to a table."""

import os
from pathlib import Path

from lit_knn.estimators import Estimator
from lit_knn.index import Index
from lit_knn.referee.cases import case_named, load_case
from lit_knn.referee.entry import Entry, Mean, entry_of
from lit_knn.referee.protocol import Options, run
from lit_knn.referee.table import Rows, add_rows, check_fits, check_writable

Place = str | os.PathLike[str]


def referee(
    estimator: Estimator | Mean | type,
    case: str,
    name: str | None = None,
    index: Index | None = None,
    data: Place | None = None,
    output: Place | None = None,
    latents: int | None = None,
    options: Options | None = None,
) -> Rows:
    """Measure an estimator on a case.

    Args:
        estimator: an estimator that is not bound, a callable `(z, t, generator) -> mean`, or a class that is made from
            the `ReferenceSet` and then called so.
        case: name of the case, such as "digits".
        name: name in the table; by default class and arguments.
        index: the index for the estimator's search; by default FAISS Flat.
        data: a copy of the images, for cases that need one.
        output: a CSV file that the rows are added to.
        latents: use only the first so many latents, for a quick look.
        options: batch, repeats, threads, memory.

    Returns:
        One row for each noise level, with the columns of `table.COLUMNS`.

    Raises:
        InputError: the estimator breaks a rule; data, case, or output do not fit.
    """
    return measure(entry_of(estimator, index, name), case, data, output, latents, options or Options())


def measure(
    entry: Entry,
    case: str,
    data: Place | None,
    output: Place | None,
    latents: int | None,
    options: Options,
    cache: Path | None = None,
) -> Rows:
    """Measure an entry; see `referee`. `cache` is the folder of exact means."""
    path = None if data is None else Path(data)
    if output is not None:
        check_writable(Path(output))
    loaded = load_case(case_named(case), path, latents, cache)
    if output is not None:
        check_fits(Path(output), case, loaded.reference.fingerprint()[:12])
    keep = (lambda row: None) if output is None else (lambda row: add_rows(Path(output), [row]))
    return run(entry, loaded, path, options, keep)
