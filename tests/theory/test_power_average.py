"""Power-function averages (arXiv 2312.02696) against numerical integrals and explicit sums in float64."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import nn

from lit_knn.commands.average import Profile, fit, inner_product
from lit_knn.modules.averaging import TrackedAverages, exponent, relative_length

LENGTHS = [0.01, 0.05, 0.1, 0.2, 12**-0.5]
TRACKED = (0.05, 0.1)


def profile(t, of):
    """p(t), Eq. 121; 0 after the end."""
    t = np.asarray(t, np.float64)
    return np.where(t <= of.end, (of.gamma + 1) / of.end * (t / of.end) ** of.gamma, 0.0)


def integral(function, end):
    # Long powers are near the end, so the range is cut there.
    return sum(quad(function, a * end, b * end, epsabs=0, epsrel=1e-10)[0] for a, b in ((0, 0.5), (0.5, 0.9), (0.9, 1)))


def test_the_length_is_the_standard_deviation_of_the_profile_and_products_are_integrals():
    assert [round(exponent(length), 2) for length in TRACKED] == [16.97, 6.94]  # Sec. 3.1 names these two
    for length in LENGTHS:
        of = Profile(exponent(length), 30_000.0)
        mass, mean, square = (integral(lambda t, p=p, of=of: t**p * profile(t, of), of.end) for p in range(3))
        assert mass == pytest.approx(1, rel=1e-9)
        assert (square - mean**2) ** 0.5 / of.end == pytest.approx(length, rel=1e-6)
        assert relative_length(exponent(length)) == pytest.approx(length, rel=1e-12)
    for a, b in ((Profile(3.0, 5.0), Profile(16.97, 8.0)), (Profile(0.5, 9.0), Profile(2.0, 4.0))):
        product = integral(lambda t, a=a, b=b: profile(t, a) * profile(t, b), min(a.end, b.end))
        assert inner_product(a, b) == inner_product(b, a) == pytest.approx(product, rel=1e-8)


class Weight(nn.Module):
    """Three weights in float64, a count and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(0))


def walk(times, lengths, keep):
    """Track averages over a random walk; return the values (steps, 3), and the averages after the steps `keep`."""
    model = Weight()
    values = np.cumsum(np.random.default_rng(0).normal(size=(len(times), 3)), 0)
    tracked, kept, before = TrackedAverages(model, torch.device("cpu"), lengths), {}, 0
    for t, value in zip(times, values, strict=True):
        model.weight.data, model.mean, model.count = torch.tensor(value), torch.tensor(2 * value), torch.tensor(t)
        tracked.update(model, before, t)
        before = t
        if t in keep:
            kept[t] = [{name: tensor.clone() for name, tensor in each.items()} for each in tracked.weights()]
    return values, kept


def explicit(times, values, length):
    """Sum θ(t_i) times the mass of the profile between t_{i−1} and t_i."""
    return np.diff((np.array([0, *times]) / times[-1]) ** (exponent(length) + 1)) @ values


def test_the_updates_give_the_power_profile_also_with_uneven_steps():
    times = np.cumsum(np.random.default_rng(1).integers(1, 50, size=400)).tolist()
    values, kept = walk(times, LENGTHS, keep=times[-1:])
    for length, average in zip(LENGTHS, kept[times[-1]], strict=True):
        expected = explicit(times, values, length)
        np.testing.assert_allclose(average["weight"], expected, rtol=1e-10)
        np.testing.assert_allclose(average["mean"], 2 * expected, rtol=1e-10)
        assert average["count"] == times[-1]


@pytest.mark.parametrize("length", [0.03, 0.07, 0.2])
def test_a_third_length_is_as_near_as_the_error_of_its_profile_allows(length):
    times = list(range(10, 6410, 10))
    values, kept = walk(times, TRACKED, keep=range(400, 6410, 400))
    stored, wanted = (
        [Profile(exponent(each), t) for t in kept for each in TRACKED],
        Profile(exponent(length), times[-1]),
    )
    found = fit(stored, wanted)
    # The error of the profile, on a fine grid.
    t = np.linspace(0, times[-1], 400_001)
    error = profile(t, wanted) - sum(w * profile(t, p) for w, p in zip(found.weights, stored, strict=True))
    norm = np.trapezoid(error**2, t) ** 0.5
    assert found.residual == pytest.approx(norm / np.trapezoid(profile(t, wanted) ** 2, t) ** 0.5, rel=1e-3)
    assert found.residual < 0.05
    # The error of the average is the integral of that error times θ − c, for any c: Cauchy-Schwarz bounds it.
    combined = found.weights @ np.array([each["weight"].numpy() for averages in kept.values() for each in averages])
    bound = norm * (10 * ((values - values.mean(0)) ** 2).sum(0)) ** 0.5
    assert (abs(combined - explicit(times, values, length)) <= bound).all()
