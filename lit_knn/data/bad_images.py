"""Errors of image files that no option can make an image of a set."""

from collections.abc import Sequence

from lit_knn.common.errors import InputError

# Number of bad files that a message names.
NAMED = 10


class BadImageError(InputError):
    """A file that no option can make an image of this set, such as a damaged one."""


class UnreadFileError(BadImageError):
    """A file that the system could not read this time, such as one without permission."""


def bad_images(problems: Sequence[str], number: int, advice: str) -> InputError:
    """Return the error that names bad image files: ten, and their count.

    Args:
        problems: one line for each bad file.
        number: number of all image files.
        advice: what the user can do.
    """
    if len(problems) == 1:
        return InputError(f"{problems[0]}; {advice}")

    named = "; ".join(problems[:NAMED])
    rest = len(problems) - NAMED
    more = f"; and {rest:,} more" if rest > 0 else ""
    count = f"{len(problems):,} of {number:,} image files are bad"
    return InputError(f"{count}: {named}{more}; {advice}")
