"""Power-function averages (arXiv 2312.02696) against numerical integrals in float64."""

import numpy as np
import pytest
from scipy.integrate import quad

from lit_knn.commands.power_profiles import Profile, fit, inner_product
from lit_knn.modules.power_averages import exponent

LENGTHS = [0.01, 0.05, 0.1, 0.2, 12**-0.5]
TRACKED = (0.05, 0.1)


def profile(t, of):
    """p(t), Eq. 121; 0 after the end."""
    t = np.asarray(t, np.float64)
    return np.where(t <= of.end, (of.gamma + 1) / of.end * (t / of.end) ** of.gamma, 0.0)


def integral(function, end):
    # Long powers are near the end, so the range is cut there.
    return sum(
        quad(function, a * end, b * end, epsabs=0, epsrel=1e-10)[0]
        for a, b in ((0, 0.5), (0.5, 0.9), (0.9, 1))
    )


def test_length_is_standard_deviation_and_products_are_integrals():
    # Sec. 3.1 names these two
    assert [round(exponent(length), 2) for length in TRACKED] == [16.97, 6.94]
    for length in LENGTHS:
        of = Profile(exponent(length), 30_000.0)
        mass, mean, square = (
            integral(lambda t, p=p, of=of: t**p * profile(t, of), of.end) for p in range(3)
        )
        assert mass == pytest.approx(1, rel=1e-9)
        assert (square - mean**2) ** 0.5 / of.end == pytest.approx(length, rel=1e-6)
    for a, b in ((Profile(3.0, 5.0), Profile(16.97, 8.0)), (Profile(0.5, 9.0), Profile(2.0, 4.0))):
        product = integral(lambda t, a=a, b=b: profile(t, a) * profile(t, b), min(a.end, b.end))
        assert inner_product(a, b) == inner_product(b, a) == pytest.approx(product, rel=1e-8)


# `tests/modules/test_power_averages.py` compares the averages of such fits with those of a training.
@pytest.mark.parametrize("length", [0.03, 0.07, 0.2])
def test_the_residual_of_a_fit_is_the_error_of_its_profile(length):
    stored = [Profile(exponent(each), t) for t in range(400, 6410, 400) for each in TRACKED]
    wanted, t = Profile(exponent(length), 6400), np.linspace(0, 6400, 400_001)
    found = fit(stored, wanted)
    error = profile(t, wanted) - sum(
        w * profile(t, p) for w, p in zip(found.weights, stored, strict=True)
    )
    norm, whole = (np.trapezoid(values**2, t) ** 0.5 for values in (error, profile(t, wanted)))
    assert found.residual == pytest.approx(norm / whole, rel=1e-3)
    assert found.residual < 0.05
    assert found.weights.sum() == pytest.approx(1)
