"""Format numbers for a page: two digits, and limits in place of numbers that cannot be told from 0."""

import math

MISSING = "–"


def error(value: float) -> str:
    """Format an error with two digits, as in 2.9e-7."""
    if math.isnan(value):
        return MISSING
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def ratio(value: float) -> str:
    """Format a ratio with two digits, and without an exponent from 0.01 to 999."""
    rounded = float(f"{value:.1e}")
    if not 0.01 <= abs(rounded) < 1000:
        return error(value)
    return f"{rounded:.0f}" if abs(rounded) >= 10 else f"{rounded:#.2g}"


def seconds(value: float) -> str:
    """Format a duration."""
    return MISSING if math.isnan(value) else f"{value:.{0 if value >= 10 else 1}f} s"


def upper_limit(value: float, standard_error: float, sure: float = 1.0) -> float | None:
    """Return the upper limit of a mean that cannot be told from 0, or None if it can.

    Args:
        value: the mean; an estimate of a square may be negative.
        standard_error: of the mean; NaN if unknown.
        sure: the least number of standard errors between 0 and a mean that is told from it.
    """
    if math.isnan(standard_error) or value > sure * standard_error or (value == 0 == standard_error):
        return None
    return max(value, 0.0) + 2 * standard_error
