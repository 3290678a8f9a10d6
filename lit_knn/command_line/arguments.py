"""Rewrites of the arguments before the parser sees them."""

from collections.abc import Sequence

from lit_knn.errors import InputError

DEBUG = "--debug"


def without_debug(args: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without `--debug`, and whether it was there."""
    return [arg for arg in args if arg != DEBUG], DEBUG in args


def with_joined_negatives(args: Sequence[str]) -> list[str]:
    """Write `--model.lr -1e-3` as `--model.lr=-1e-3`, because the parser takes only `-1` or `-.5` for a number."""
    joined: list[str] = []
    for arg in args:
        waits = bool(joined) and joined[-1].startswith("--") and "=" not in joined[-1]
        if waits and arg.startswith("-") and _is_number(arg):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def check_linked(args: Sequence[str]) -> None:
    """Refuse a seed of one part, which the common seed would replace without a word."""
    for arg in args:
        option = arg.partition("=")[0].replace(".init_args", "")
        if option in ("--model.seed", "--data.seed"):
            raise InputError(f"{option} is set by --seed_everything: give that option")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
