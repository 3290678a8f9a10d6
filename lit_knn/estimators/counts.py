"""Options that count images or components. A number that the user gave is fixed; a small set reduces a default."""

import warnings
from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING

from lit_knn.common.distributed import rank_and_size
from lit_knn.common.errors import InputError
from lit_knn.reference import ReferenceSet

if TYPE_CHECKING:
    from lit_knn.estimators.hooks import Hooks

# k and n are the paper's (tab:hyperparams): "KNN search size 2048", "Estimator batch size 256". r is our choice: on
# CIFAR-10 at t >= 2, r = 256 would have 3 to 8 times the error and take 0.9 times as long.
DEFAULTS = {"k": 2048, "n": 256, "r": 512}

Limit = Callable[[int, int], tuple[int, str]]
"""(N, d) -> the largest count for N images of dimension d, and a text that describes it."""


def of_images(N: int, d: int) -> tuple[int, str]:
    """Limit a count by the number of images."""
    return N, f"the {N} images"


def of_components(N: int, d: int) -> tuple[int, str]:
    """Limit a count by the number of principal components."""
    return min(N, d), f"min(N, d) = min({N}, {d})"


class Default(int):
    """A count that the user left at null. Only such a count is reduced for a small set."""


def count(estimator: "Hooks", option: str, value: int | None) -> int:
    """Return the number that the user gave for an option, or the `Default` for None.

    Args:
        estimator: the error names its class.
        option: name of the option.
        value: what the user gave.
    """
    if value is None:
        return Default(DEFAULTS[option])
    return check_count(type(estimator).__name__, option, value)


def check_count(owner: str, option: str, value: int) -> int:
    """Return `value` if it is an integer of at least 1, or raise an InputError.

    Args:
        owner: name of the class that has the option.
        option: name of the option.
        value: what the user gave.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{owner}: {option} must be an integer, got {value!r}")
    if value < 1:
        raise InputError(f"{owner}: {option} must be at least 1, got {value}")
    return int(value)


def fitted_count(estimator: "Hooks", option: str, N: int, d: int, mirrored: bool = False) -> int:
    """Return the number of an option for N images of dimension d.

    A default is reduced to the limit of the option, `estimator.limits[option]`.

    Args:
        estimator: it has the option as an attribute.
        option: name of the option.
        N: number of images.
        d: dimension of an image.
        mirrored: whether half of the images are mirror images, for the message.

    Raises:
        InputError: a number that the user gave is above the limit.
    """
    number = getattr(estimator, option)
    most, limit = estimator.limits[option](N, d)

    if isinstance(number, Default):
        # Begin with the default again, because the set that was bound before may have been smaller.
        return Default(min(DEFAULTS[option], most))

    if number > most:
        where = "the reference set, mirror images counted" if mirrored else "the reference set"
        problem = f"{type(estimator).__name__}: {option}={number} is more than {limit} of {where}"
        raise InputError(
            f"{problem}: give {option} <= {most}, or null for the default, which is taken down"
        )
    return int(number)


def fit_counts(estimator: "Hooks", reference: ReferenceSet) -> None:
    """Set the counts of an estimator to their `fitted_count` for a set, and warn about each default that is reduced."""
    numbers = {}
    for option in estimator.limits:
        numbers[option] = fitted_count(estimator, option, reference.N, reference.d, reference.hflip)

    # All counts have been checked before the first one changes.
    for option, number in numbers.items():
        setattr(estimator, option, number)
        if isinstance(number, Default) and number < DEFAULTS[option]:
            _warn_of_reduced(
                type(estimator).__name__, option, number, estimator.limits[option], reference
            )


def _warn_of_reduced(
    name: str, option: str, number: int, limit: Limit, reference: ReferenceSet
) -> None:
    """Warn, on the first rank alone, that a default is reduced. All classes of a set share one warning."""
    where = "the reference set"
    if reference.hflip:
        where += ", mirror images counted"
    going_on = f"with {option}={number}"

    if reference.label is not None:
        if (name, option) in reference.warned:
            return
        reference.warned.add((name, option))
        where = f"class {reference.label}"
        going_on = "in each class with as many as it has"

    if rank_and_size()[0] == 0:
        problem = f"the default {option}={DEFAULTS[option]} is more than {limit(reference.N, reference.d)[1]}"
        # This stack level is the caller of `bind`.
        warnings.warn(f"{name}: {problem} of {where}; going on {going_on}", stacklevel=5)
