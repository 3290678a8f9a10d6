"""Saving figures."""

from os import PathLike
from pathlib import Path

from matplotlib.figure import Figure

from lit_knn.atomic_files import written_whole

PNG_DPI = 200


def save_figure(figure: Figure, path: str | PathLike[str]) -> list[Path]:
    """Save as `path`.png and `path`.pdf, each at once or not at all; the paths written."""
    path = Path(path)
    # Laid out once, not at each drawing, of which a figure sees several.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    written = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "pdf")]
    for target in written:
        with written_whole(target) as partial:
            figure.savefig(partial, dpi=PNG_DPI)
    return written
