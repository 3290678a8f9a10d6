"""Errors about image files that cannot become images of a set, whatever the options."""

from collections.abc import Sequence

from lit_knn.common.errors import InputError

# A message names at most this number of bad files.
MOST_NAMED = 10


class BadImageError(InputError):
    """A file, such as a damaged one, that cannot become an image of this set, whatever the options."""


class UnreadFileError(BadImageError):
    """A file that the system could not read this time, such as one without permission."""


def bad_images(problems: Sequence[str], number: int, advice: str) -> InputError:
    """Return the error that names the first ten bad image files and says how many there are.

    Args:
        problems: one line for each bad file.
        number: number of all image files.
        advice: what the user can do.
    """
    if len(problems) == 1:
        return InputError(f"{problems[0]}; {advice}")

    named = "; ".join(problems[:MOST_NAMED])
    rest = len(problems) - MOST_NAMED
    more = f"; and {rest:,} more" if rest > 0 else ""
    count = f"{len(problems):,} of {number:,} image files are bad"
    return InputError(f"{count}: {named}{more}; {advice}")
