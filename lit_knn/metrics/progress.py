"""Progress bars of what takes long."""

import sys
from collections.abc import Callable

from tqdm import tqdm

from lit_knn.distributed import rank_and_size

# A bar that is written to a file adds a line at each refresh.
SECONDS_BETWEEN_LINES_IN_A_FILE = 10.0

Bar = Callable[[int | None, str, str], tqdm]
"""(total, description, unit) -> a bar, as `progress_bar`."""


def progress_bar(
    total: int | None, description: str, unit: str, leave: bool = False, shown: bool | None = None
) -> tqdm:
    """A bar with the time left, on the first rank.

    Args:
        total: what it counts to; None for no bar.
        description: what goes on.
        unit: what is counted, with a space before it.
        leave: whether it stays when all is done.
        shown: whether there is one; by default on a terminal.
    """
    shown = sys.stderr.isatty() if shown is None else shown
    shown = shown and rank_and_size()[0] == 0 and total is not None
    between = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES_IN_A_FILE
    options = {"desc": description, "unit": unit, "unit_scale": True, "mininterval": between, "leave": leave}
    return tqdm(total=total, disable=not shown, **options)
