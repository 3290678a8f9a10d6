"""Figure 4 (fig:ablation): FID against images seen, from the tables of training runs.

`python -m lit_knn.figures.figure4 RUN_FOLDER... [--metric fid] [--output figure4]` draws figure4.png and figure4.pdf.
A training run need not have measured anything: `lit-knn best --run RUN_FOLDER` measures its kept checkpoints.
Folders of `validate` runs, one for each checkpoint, also work.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_knn.common.errors import InputError, told_in_one_line
from lit_knn.figures.figure4 import figure4
from lit_knn.figures.figure4.curves import read_curves
from lit_knn.figures.save import save_figure


def check_absent(stem: str) -> None:
    """Raise InputError if `stem`.png or `stem`.pdf exists already."""
    for path in (Path(f"{stem}.png"), Path(f"{stem}.pdf")):
        if path.exists():
            raise InputError(f"figure4: --output {stem}: {path} is there already; nothing is overwritten")


def main(args: Sequence[str] | None = None) -> None:
    """Draw the figure of the runs on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_knn.figures.figure4", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "folders", nargs="+", metavar="RUN_FOLDER", help="holds config.yaml and the table of a measurement"
    )
    parser.add_argument("--metric", default="fid", help="column of the table")
    parser.add_argument("--output", default="figure4", help="path of the pictures, without .png and .pdf")
    options = parser.parse_args(args)
    with told_in_one_line():
        check_absent(options.output)
        paths = save_figure(figure4(read_curves(options.folders, options.metric), options.metric), Path(options.output))
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    main()
