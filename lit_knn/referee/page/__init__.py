"""Pages of results for readers: Markdown and pictures, made from the table of results alone."""

from collections.abc import Sequence
from pathlib import Path

from lit_knn.common.files import written_whole
from lit_knn.referee.page.content import page
from lit_knn.referee.page.front import ranked
from lit_knn.referee.page.pictures import error_against_time
from lit_knn.referee.page.results import read_results

__all__ = ["write_page"]

DPI = 150


def write_page(results: Sequence[Path], stem: Path) -> list[Path]:
    """Write STEM.md and STEM.png from tables of results; return the paths.

    With several cases, each has a picture of its own, STEM_1.png for the first.
    """
    all_results = read_results(results)
    several = len(all_results) > 1
    parts = [(own, ranked(own), stem.name + f"_{n}" * several) for n, own in enumerate(all_results, start=1)]
    written = [stem.with_name(f"{stem.name}.md")]
    for own, entries, name in parts:
        written.append(stem.with_name(f"{name}.png"))
        with written_whole(written[-1]) as partial:
            error_against_time(own, entries).savefig(partial, dpi=DPI)
    with written_whole(written[0]) as partial:
        partial.write_text(page(parts), encoding="utf-8")
    return written
