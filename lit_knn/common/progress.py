"""The progress bar of long work."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

# `import lit_knn` needs only torch and NumPy, and preparing images does not need torch.
if TYPE_CHECKING:
    from torch import Tensor
    from tqdm import tqdm

# In a log file, each refresh of the progress bar adds a line, so the bar is refreshed rarely.
SECONDS_BETWEEN_LINES_IN_A_FILE = 10.0

Bar = Callable[[int | None, str, str], "tqdm"]
"""(total, description, unit) -> a bar, like `progress_bar`."""


def progress_bar(
    total: int | None,
    description: str,
    unit: str,
    leave: bool = False,
    shown: bool | None = None,
    delay: float = 0.0,
    initial: int = 0,
) -> "tqdm":
    """Make a progress bar, which only the first rank shows, and by default only on a terminal.

    Args:
        total: number of units of the work; None shows no bar.
        description: what the work is.
        unit: name of the units, which starts with a space.
        leave: whether the bar stays after the work.
        shown: whether to show the bar; None asks whether the output is a terminal.
        delay: seconds before the bar appears.
        initial: number of units that were done before.
    """
    from tqdm import tqdm

    on_terminal = sys.stderr.isatty()
    if shown is None:
        shown = on_terminal
    shown = shown and _is_first_rank() and total is not None

    between = 0.1 if on_terminal else SECONDS_BETWEEN_LINES_IN_A_FILE
    options = {
        "desc": description,
        "unit": unit,
        "unit_scale": True,
        "mininterval": between,
        "leave": leave,
    }
    return tqdm(total=total, initial=initial, disable=not shown, delay=delay, **options)


def _is_first_rank() -> bool:
    """Return whether this is the first rank; preparing images, which has no ranks, does not import torch for it."""
    if "torch" not in sys.modules:
        return True
    from lit_knn.common.distributed import rank_and_size

    return rank_and_size()[0] == 0


def with_progress(pieces: "Iterable[Tensor]", total: int, description: str) -> "Iterator[Tensor]":
    """Yield pieces of images while a bar on a terminal counts them. Without tqdm there is no bar.

    Args:
        pieces: tensors whose rows are images.
        total: number of images.
        description: what the work is.
    """
    try:
        bar = progress_bar(total, description, " images", delay=1.0)
    except ModuleNotFoundError:
        yield from pieces
        return
    with bar:
        for piece in pieces:
            yield piece
            bar.update(len(piece))
