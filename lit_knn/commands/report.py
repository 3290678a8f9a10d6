"""`lit-knn report RUN...` puts training runs side by side. The last folder of a resumed run stands for all."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_knn.commands.report_page import markdown
from lit_knn.commands.report_runs import read_run
from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.figures.figure4 import figure4, varied
from lit_knn.figures.style import save_figure
from lit_knn.figures.training_curves import TrainingCurve, run_comparison
from lit_knn.runs.record import RECORD_NAME


def trainings(folders: Sequence[str]) -> list[str]:
    """Return the folders of trainings among these folders, and print a line for each other one.

    The pattern `runs/NAME/*` also matches folders of `validate` and `predict`.
    """
    folders = list(dict.fromkeys(folders))
    recorded = [folder for folder in folders if (Path(folder) / RECORD_NAME).is_file()]
    if not recorded:
        # No folder is left out, so that reading the first one raises an error that says what is missing.
        return folders

    for folder in folders:
        if folder not in recorded:
            print(
                f"left out: {folder} has no {RECORD_NAME}, which every training writes",
                file=sys.stderr,
            )
    return recorded


def can_draw_figure4(curves: Sequence[TrainingCurve]) -> bool:
    """Return whether some of the measured runs differ only in k, or only in n, as in Figure 4."""
    measured = [curve for curve in curves if curve.distances]
    for option in ("k", "n"):
        counts = {(curve.k, curve.n) for curve in varied(measured, option)}
        if len(counts) > 1:
            return True
    return False


def check_other_report(page: Path, text: str, files: Sequence[Path]) -> None:
    """Raise InputError if files of another report would be replaced.

    Args:
        page: path of the report's page.
        text: text of the report to write.
        files: paths of all files to write.
    """
    existing = [path for path in files if path.exists()]
    if not existing:
        return

    # The page is written first. So if a report was interrupted, its page is there, and the same report may go on.
    if page not in existing or page.read_text(encoding="utf-8") != text:
        problem = f"report: {existing[0]} is of another report, and stays"
        raise InputError(f"{problem}; give another --output or --overwrite")


def main(args: Sequence[str] | None = None) -> None:
    """Run `lit-knn report` with the arguments of a command line: print the report, and write it with its pictures."""
    about = "Put training runs side by side: distances, speed, data, versions, and the settings that differ. "
    about += "Runs that differ in k or n are also drawn as in Figure 4."
    parser = argparse.ArgumentParser(prog="lit-knn report", description=about)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a training run, such as runs/demo/knn_0"
    )
    about_output = "path of the files; their names end in .md, .png and .pdf"
    parser.add_argument(
        "--output", default="report", type=lambda path: path.removesuffix(".md"), help=about_output
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files of an earlier report"
    )
    options = parser.parse_args(args)

    runs = [read_run(folder) for folder in trainings(options.runs)]
    curves = [run.curve for run in runs]
    text = markdown(runs)
    print(text)

    pictures = {options.output: run_comparison}
    if can_draw_figure4(curves):
        pictures[f"{options.output}_figure4"] = figure4

    page = Path(f"{options.output}.md")
    files = [page]
    for stem in pictures:
        files += [Path(f"{stem}.png"), Path(f"{stem}.pdf")]
    if not options.overwrite:
        check_other_report(page, text, files)

    with written_whole(page) as partial:
        partial.write_text(text, encoding="utf-8")
    for stem, draw in pictures.items():
        save_figure(draw(curves), stem)
    print(f"Written: {', '.join(str(path) for path in files)}")
