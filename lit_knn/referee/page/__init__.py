"""Pages of results for readers: Markdown and pictures, made from the table of results alone."""

import re
from collections.abc import Sequence
from pathlib import Path

from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.referee.page.content import page
from lit_knn.referee.page.front import ranked
from lit_knn.referee.page.pictures import error_against_time, ratio_over_t
from lit_knn.referee.page.results import Results, read_results

__all__ = ["write_page"]

DPI = 150


def write_page(results: Sequence[Path], stem: Path) -> list[Path]:
    """Write STEM.md, STEM.png and STEM_over_t.png; return the paths. Earlier files are replaced.

    With several cases, each has pictures of its own, STEM_<case>.png and STEM_<case>_over_t.png.

    Args:
        results: tables of results, merged into one page.
        stem: path of the files without their endings.

    Raises:
        InputError: a table is none of the referee's, or of another version of its protocol.
        OSError: a file cannot be read or written.
    """
    if not stem.name:
        raise InputError(f"--output {str(stem)!r} is no name of a file")
    all_results = read_results(results)
    names = _picture_names(all_results, stem.name)
    parts = [(own, ranked(own), name) for own, name in zip(all_results, names, strict=True)]
    written = [stem.with_name(f"{stem.name}.md")]
    for own, entries, name in parts:
        for draw, ending in ((error_against_time, ".png"), (ratio_over_t, "_over_t.png")):
            written.append(stem.with_name(name + ending))
            with written_whole(written[-1]) as partial:
                draw(own, entries).savefig(partial, dpi=DPI)
    with written_whole(written[0]) as partial:
        partial.write_text(page(parts), encoding="utf-8")
    return written


def _picture_names(all_results: Sequence[Results], stem: str) -> list[str]:
    if len(all_results) == 1:
        return [stem]
    cases = [re.sub(r"\W+", "_", results.case) for results in all_results]
    # Two data sets of a case, and cases whose names differ only in a sign, get numbers.
    return [f"{stem}_{case}" + (f"_{n + 1}" if cases.count(case) > 1 else "") for n, case in enumerate(cases)]
