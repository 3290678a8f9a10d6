"""Squared bias, variance and MSE of Eq. 15 (eq:mse), the diagnoses of searches, and the latents of both."""

import numpy as np
import pytest
import torch
from scipy.stats import sem

from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import KNN, STF, Estimator, MonteCarlo, OneSample
from lit_knn.index.torch_index import FlatIndex
from lit_knn.metrics import error_curve, nearest_images
from lit_knn.metrics.diagnostics import search_diagnostics
from lit_knn.metrics.error_columns import COLUMNS
from lit_knn.metrics.estimator_error import LatentMeans, bias_share, error_terms, share_and_error
from lit_knn.metrics.latents import NoisyLatents, levels_of
from lit_knn.metrics.measure import (
    CERTIFIED,
    TIME,
    fixed_source,
    measure_estimator,
    posterior_source,
)
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import cross_sq_dist, log_posterior, posterior_mean
from tests.image_files import refusal


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_error_terms_and_bias_share_are_those_of_numpy():
    errors = 0.3 + np.random.default_rng(0).normal(size=(7, 40, 5))
    tensor = torch.tensor(errors)
    terms = error_terms(tensor.sum(0), tensor.square().sum((0, 2)), len(errors))
    np.testing.assert_allclose(terms.mse, (errors**2).mean((0, 2)))
    np.testing.assert_allclose(terms.bias_sq, (errors.mean(0) ** 2).mean(1))
    np.testing.assert_allclose(terms.variance, errors.var(0, ddof=1).mean(1))
    np.testing.assert_allclose(terms.bias_sq_corrected + terms.variance, terms.mse)
    alike = error_terms(sum([tensor[0]] * 7), sum([tensor[0].square().sum(1)] * 7), 7)
    # In float64 the difference of equal numbers may be rounding.
    assert torch.equal(alike.variance, torch.zeros(40))
    means = LatentMeans(("mse", "bias_sq_corrected", "variance"))
    means.update(**terms._asdict())
    assert bias_share(**means.compute()) == pytest.approx(
        share_and_error(terms.bias_sq_corrected, terms.mse)
    )


def test_means_and_standard_errors_add_up_over_batches_and_ranks():
    values = np.random.default_rng(0).normal(3, 2, size=(2, 101))
    ranks = [LatentMeans(("a", "b")), LatentMeans(("a", "b"))]
    for i, batch in enumerate(np.split(values, [40, 90], axis=1)):
        ranks[i % 2].update(b=torch.tensor(batch[1]), a=torch.tensor(batch[0]))
    for state in ("count", "total", "sq_total"):  # torchmetrics combines processes like this
        setattr(ranks[0], state, getattr(ranks[0], state) + getattr(ranks[1], state))
    for name, expected in zip("ab", values, strict=True):
        assert ranks[0].compute()[name] == pytest.approx((expected.mean(), sem(expected)))


def test_standard_error_of_ratio_is_spread_over_latents():
    # Both errors are large at the same latents, so the ratio varies far less than either mean.
    generator = torch.Generator().manual_seed(0)
    of = torch.empty(2000, 400, dtype=torch.float64).exponential_(generator=generator)
    values = 0.5 * of + 0.02 * torch.randn(of.shape, generator=generator, dtype=torch.float64)
    found = [share_and_error(*rows) for rows in zip(values, of, strict=True)]
    spread = (values.mean(1) / of.mean(1)).std().item()
    # The spread of 2,000 ratios is known to 1/sqrt(4000), 1.6 per cent, and the formula is of first order in 1/400.
    assert np.mean([one.standard_error for one in found]) == pytest.approx(spread, rel=0.06)
    assert np.mean([one.mean for one in found]) == pytest.approx(0.5, abs=4 * spread / 2000**0.5)


# Estimators on a small set, where everything is known


def run_measure(estimator, repeats=30, resample=False, t=1.0, B=200):
    """Measure at B latents; also give the variance of one draw from the posterior at each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    source = x[torch.randint(40, (B,), generator=generator)]
    z = source + t * torch.randn(B, 3, generator=generator)
    p = log_posterior(cross_sq_dist(z, x), t).exp()
    variance = p @ x.double().square() - (p @ x.double()).square()
    reference = ReferenceSet(x)
    if estimator.needs_reference:
        estimator.bind(reference)
    sources = posterior_source(reference, z, t, repeats, (0,)) if resample else fixed_source(source)
    return measure_estimator(
        estimator, repeats, z, t, posterior_mean(z, x, t), sources, (0, 0)
    ), variance.mean(1)


def close(values, expected, sigmas=4.5):
    difference = values - expected
    return abs(difference.mean()) < sigmas * sem(difference)


def test_monte_carlo_has_posterior_variance_over_n_and_no_bias():
    values, variance = run_measure(MonteCarlo(n=8))
    assert close(values["variance"], variance / 8)
    assert close(values["bias_sq_corrected"], 0.0)
    assert close(values["bias_sq"], variance / 8 / 30)
    assert values["effective_sample_size"].tolist() == pytest.approx([8.0] * 200)
    assert values["largest_weight"].tolist() == pytest.approx([1 / 8] * 200)
    # For independent draws the error estimate is a sample variance and has no bias.
    assert values["certified_mse"].mean().item() == pytest.approx(
        values["variance"].mean().item(), rel=0.15
    )


def test_knn_has_the_variance_of_eq_12_within_both_bounds():
    values, _ = run_measure(KNN(k=5, n=64))
    assert close(values["variance"], values["eq12_variance"], sigmas=6)  # Eq. 12 is right as n → ∞
    assert (values["eq12_variance"] <= values["bound_4_1"] * (1 + 1e-9)).all()
    assert (values["eq12_variance"] <= values["bound_4_2"] * (1 + 1e-9)).all()
    assert (values["recall"] == 1).all()
    # The certificate is Eq. 12 with weights of the draws themselves.
    assert 0.7 < values["certified_mse"].mean() / values["variance"].mean() < 1.4
    # If every image is a neighbour, KNN is Monte Carlo.
    values, variance = run_measure(KNN(k=40, n=8))
    assert close(values["variance"], variance / 8)
    assert values["effective_sample_size"].tolist() == pytest.approx([8.0] * 200, rel=1e-4)


@pytest.mark.parametrize(
    ("estimator", "least", "most"),
    [
        (KNN(k=5, n=4), 0.1, 0.6),
        (KNN(k=5, n=8), 0.4, 0.8),
        (KNN(k=5, n=32), 0.85, 1.15),
        (KNN(k=5, n=256), 0.85, 1.15),
        (MonteCarlo(n=2), 0.85, 1.15),
    ],
    ids=["knn-4", "knn-8", "knn-32", "knn-256", "monte-carlo-2"],
)
def test_a_certificate_holds_from_an_effective_size_of_20(estimator, least, most):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    z = x + 0.4 * torch.randn(40, 3, generator=generator)
    many = z.repeat(100, 1)
    certificate = estimator.bind(ReferenceSet(x)).certified_mean(many, 0.4, generator=generator)
    error = (certificate.mean.double() - posterior_mean(many, x, 0.4)).square().mean(1)
    # 4,000 errors with heavy tails: their mean is known to about 5 per cent.
    assert least < certificate.sq_error.mean() / error.mean() < most
    if isinstance(estimator, KNN):
        assert (certificate.effective_sample_size.mean() > 15) == (estimator.n >= 32)


def test_fixed_source_is_bias_and_drawn_source_is_variance():
    fixed, variance = run_measure(OneSample(), repeats=1)
    torch.testing.assert_close(fixed["bias_sq"], fixed["mse"])
    assert close(fixed["mse"], variance)
    drawn, _ = run_measure(OneSample(), resample=True)
    assert close(drawn["variance"], variance)
    assert close(drawn["bias_sq_corrected"], 0.0)
    # The expected MSE of STF is the same, but its split differs: the bias exists only for a given source.
    fixed, _ = run_measure(STF(n=4), repeats=60)
    drawn, _ = run_measure(STF(n=4), repeats=60, resample=True)
    assert close(fixed["mse"], drawn["mse"])
    assert fixed["bias_sq_corrected"].mean() > 0.3 * fixed["mse"].mean()
    assert close(drawn["bias_sq_corrected"], 0.0)


class Slow(Estimator):
    """Moves a clock by half a second in each call."""

    needs_reference = deterministic = False
    clock = 0.0

    def _posterior_mean(self, z, t, x_source, generator):
        self.clock += 0.5
        return torch.randn(z.shape, generator=generator)


def test_time_is_milliseconds_of_one_estimate_at_one_latent(monkeypatch):
    slow, z = Slow(), normal(10, 3)
    monkeypatch.setattr("time.perf_counter", lambda: slow.clock)
    values = measure_estimator(slow, 4, z, 1.0, z.double(), fixed_source(z), (0, 0))
    assert values[TIME].tolist() == pytest.approx([1000 * 0.5 / 10] * 10)


def test_latents_depend_neither_on_the_batch_nor_on_the_level():
    reference = ReferenceSet(torch.randn(20, 2))
    latents = NoisyLatents(reference, 12, seed=3)
    z, x = latents.batch(range(12), 2.0)
    part_z, part_x = latents.batch(range(5, 12), 2.0)
    assert torch.equal(part_z, z[5:])
    assert torch.equal(part_x, x[5:])
    torch.testing.assert_close((latents.batch(range(12), 8.0)[0] - x) / 8, (z - x) / 2)
    assert len(set(latents.ids.tolist())) == 12
    assert set(latents.ids.tolist()) != set(NoisyLatents(reference, 12, seed=4).ids.tolist())
    assert not torch.equal(NoisyLatents(reference, 12, seed=4).batch(range(12), 2.0)[0], z)
    # Levels are equally spaced in the logarithm.
    levels = torch.tensor(levels_of(5, 0.5, 80.0))
    torch.testing.assert_close(levels[1:] / levels[:-1], torch.full((4,), 160**0.25))
    for number in (0, 1):
        message = f"noise_levels must be at least 2, got {number}"
        assert message in refusal(levels_of, number, 0.5, 80.0)


# Searches


class FindsFew(FlatIndex):
    """Finds at most `most` neighbours and leaves the other places empty, but finds every image of the set."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def search(self, queries, k):
        sq_dist, ids = super().search(queries, k)
        empty = torch.arange(k) >= self.most
        return sq_dist.masked_fill(empty, torch.inf), ids.masked_fill(empty, -1)

    def locate(self, queries):
        return super().search(queries, 1)


def test_search_columns_are_means_of_their_diagnoses():
    x, t, k, n = normal(30, 3), 0.8, 8, 16
    reference, other = ReferenceSet(x, index=FindsFew(5)), ReferenceSet(normal(40, 3))
    knn = KNN(k=k, n=n).bind(other)
    (row,) = error_curve({"KNN": knn}, reference, [t], num_z=30, repeats=4, batch_size=8)
    assert knn.reference is other
    knn.bind(reference)
    assert all(isinstance(row[column], float) for column in COLUMNS.values())
    # Image 0 is among the neighbours of some latents, and not of others.
    z, _ = NoisyLatents(reference, 30, 0).batch(range(30), t)
    found = search_diagnostics(knn, z, t, posterior_mean(z, x.double(), t))
    names = ["search_recall", "posterior_mass_found", "Zq_over_pt", "eq12_variance"]
    names += ["theorem_4_1_bound", "theorem_4_2_bound"]
    means = [value.mean().item() for value in found]
    assert [row[name] for name in names] == pytest.approx(means)
    assert len(set(means)) == 6
    assert row["score_mse"] == pytest.approx(row["mu_mse"] / t**4)


def test_an_empty_place_is_no_neighbour_of_a_sample():
    # Image 0 is near the sample but was not found; all that was found are copies of one image.
    x = torch.tensor([[9.0, 0.0], [1.0, 0.0], [1.0, 0.0], [50.0, 0.0], [60.0, 0.0]])
    found = nearest_images(torch.tensor([[1.5, 0.0]]), ReferenceSet(x, index=FindsFew(2)))
    assert (found.distance.item(), found.second_distance.item(), found.ratio.item()) == (
        0.5,
        0.5,
        1.0,
    )


def test_the_certificate_is_of_the_source_of_the_latents():
    x, t = normal(30, 3), 3.0
    # A search that finds all neighbours would find the source, too.
    knn = KNN(k=2, n=16, include_source=True).bind(ReferenceSet(x, FindsFew(0)))
    z = x[:5] + t * normal(5, 3, seed=2)
    values = measure_estimator(
        knn, 2, z, t, posterior_mean(z, x.double(), t), fixed_source(x[:5]), (3, 4)
    )
    expected = knn.certified_mean(z, t, x[:5], keyed_generator(z.device, 3, 4, 0, Stream.ESTIMATOR))
    for name, value in zip(CERTIFIED, expected[1:], strict=True):
        torch.testing.assert_close(values[name].double(), value.double())
