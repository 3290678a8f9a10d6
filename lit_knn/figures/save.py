"""Save figures to files."""

from os import PathLike
from pathlib import Path

from matplotlib.figure import Figure

from lit_knn.common.files import written_whole

PNG_DPI = 200


def save_figure(figure: Figure, path: str | PathLike[str]) -> list[Path]:
    """Save `path`.png and `path`.pdf, each completely or not at all; return the paths."""
    path = Path(path)
    # The layout is computed once here. With any layout engine, "none" too, each saving would draw the figure twice.
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    written = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "pdf")]
    for target in written:
        with written_whole(target) as partial:
            figure.savefig(partial, dpi=PNG_DPI)
    return written
