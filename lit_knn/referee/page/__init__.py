"""Pages of results for readers: Markdown and pictures, made from the table of results alone."""

from collections.abc import Sequence
from pathlib import Path

from lit_knn.common.files import written_whole
from lit_knn.referee.page.content import page
from lit_knn.referee.page.front import ranked
from lit_knn.referee.page.pictures import error_against_time, ratio_over_t
from lit_knn.referee.page.results import read_results

__all__ = ["write_page"]

DPI = 150


def write_page(results: Sequence[Path], stem: Path) -> list[Path]:
    """Write STEM.md, STEM.png and STEM_over_t.png from tables of results; return the paths.

    With several cases, each has pictures of its own, STEM_1.png and STEM_1_over_t.png for the first.
    """
    all_results = read_results(results)
    several = len(all_results) > 1
    parts = [(own, ranked(own), stem.name + f"_{n}" * several) for n, own in enumerate(all_results, start=1)]
    written = [stem.with_name(f"{stem.name}.md")]
    for own, entries, name in parts:
        for draw, ending in ((error_against_time, ".png"), (ratio_over_t, "_over_t.png")):
            written.append(stem.with_name(name + ending))
            with written_whole(written[-1]) as partial:
                draw(own, entries).savefig(partial, dpi=DPI)
    with written_whole(written[0]) as partial:
        partial.write_text(page(parts), encoding="utf-8")
    return written
