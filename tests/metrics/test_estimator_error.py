"""Squared bias, variance and MSE of Eq. 15 (eq:mse), and the run that measures them."""

import csv
import itertools
import math

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from scipy.stats import sem
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_knn.estimators import KNN, STF, MonteCarlo, OneSample, UniformSNIS
from lit_knn.metrics.estimator_error import LatentMeans, MeanAndError, bias_share, error_terms, share_and_error
from lit_knn.metrics.latents import NoisyLatents, noise_grid
from lit_knn.metrics.measure import fixed_source, measure, posterior_source
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import cross_sq_dist, log_posterior, posterior_mean
from main import main
from tests.ranks import run_main


def terms_of(estimates, mu):
    """The `error_terms` of R estimates at B latents, (R, B, d)."""
    error = torch.tensor(estimates - mu)
    return error_terms(error.sum(0), error.square().sum((0, 2)), len(error))


def test_terms_are_those_of_numpy():
    rng = np.random.default_rng(0)
    mu = rng.normal(size=(4, 5))
    estimates = mu + 0.3 + rng.normal(size=(7, 4, 5))
    terms = terms_of(estimates, mu)
    np.testing.assert_allclose(terms.mse, ((estimates - mu) ** 2).mean((0, 2)))
    np.testing.assert_allclose(terms.bias_sq, ((estimates.mean(0) - mu) ** 2).mean(1))
    np.testing.assert_allclose(terms.variance, estimates.var(0, ddof=1).mean(1))
    np.testing.assert_allclose(terms.bias_sq_corrected + terms.variance, terms.mse)


def test_the_corrected_bias_is_the_known_one_and_the_plain_one_is_too_large():
    rng = np.random.default_rng(0)
    bias, deviation, R, B, d = 0.1, 1.0, 5, 4000, 3
    terms = terms_of(bias + deviation * rng.normal(size=(R, B, d)), np.zeros((B, d)))
    for values, expected in (
        (terms.bias_sq_corrected, bias**2),
        (terms.bias_sq, bias**2 + deviation**2 / R),
        (terms.variance, deviation**2),
        (terms.mse, bias**2 + deviation**2),
    ):
        assert abs(values.mean() - expected) < 4 * sem(values)
    # In this example 95 % of the plain squared bias is variance.
    assert terms.bias_sq.mean() > 15 * terms.bias_sq_corrected.mean()


def test_means_and_standard_errors_add_up_over_batches_and_ranks():
    values = np.random.default_rng(0).normal(3, 2, size=(2, 101))
    ranks = [LatentMeans(("a", "b")), LatentMeans(("a", "b"))]
    for i, batch in enumerate(np.split(values, [40, 90], axis=1)):
        ranks[i % 2].update(b=torch.tensor(batch[1]), a=torch.tensor(batch[0]))
    for state in ("count", "total", "sq_total"):  # torchmetrics combines processes like this
        setattr(ranks[0], state, getattr(ranks[0], state) + getattr(ranks[1], state))
    for name, expected in zip("ab", values, strict=True):
        mean, error = ranks[0].compute()[name]
        assert mean == pytest.approx(expected.mean())
        assert error == pytest.approx(sem(expected))


def gaussian_terms(num_z, R=5, d=6, b=0.3, s=0.5, seed=0):
    """The terms of estimates with error N(b, s²) in each dimension, and their means over the latents."""
    errors = np.random.default_rng(seed).normal(b, s, size=(R, num_z, d))
    means = LatentMeans(("mse", "bias_sq_corrected", "variance"))
    terms = terms_of(errors, 0.0)
    means.update(mse=terms.mse, bias_sq_corrected=terms.bias_sq_corrected, variance=terms.variance)
    return means.compute()


def test_standard_errors_are_those_of_gaussian_errors():
    R, d, b, s, num_z = 5, 6, 0.3, 0.5, 40_000
    measured = gaussian_terms(num_z)
    # Textbook variances for Gaussian numbers: of a mean of squares, a sample variance and a squared mean.
    variances = {
        "mse": (2 * s**4 + 4 * b**2 * s**2) / (R * d),
        "variance": 2 * s**4 / ((R - 1) * d),
        "bias_sq_corrected": (2 * (s**2 / R) ** 2 + 4 * b**2 * s**2 / R + 2 * s**4 / (R - 1) / R**2) / d,
    }
    expected = {"mse": b**2 + s**2, "variance": s**2, "bias_sq_corrected": b**2}
    for name, variance in variances.items():
        mean, error = measured[name]
        assert error == pytest.approx((variance / num_z) ** 0.5, rel=0.03)
        assert abs(mean - expected[name]) < 4 * error


def test_the_share_of_the_bias_and_its_standard_error():
    shares = [bias_share(**gaussian_terms(200, seed=seed)) for seed in range(400)]
    values = np.array([share.mean for share in shares])
    assert abs(values.mean() - 0.09 / 0.34) < 4 * sem(values) + 1e-3  # a ratio of means has a bias, O(1/num_z)
    assert np.mean([share.standard_error for share in shares]) == pytest.approx(values.std(), rel=0.1)
    nothing = MeanAndError(0.0, 0.0)
    assert math.isnan(bias_share(nothing, nothing, nothing).mean)
    all_bias = bias_share(MeanAndError(2.0, 0.1), MeanAndError(2.0, 0.1), nothing)
    assert all_bias == MeanAndError(1.0, pytest.approx(0.0, abs=1e-8))


# Estimators on a small set, where everything is known


def small_set(t=1.0, B=200):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    source = x[torch.randint(40, (B,), generator=generator)]
    z = source + t * torch.randn(B, 3, generator=generator)
    p = log_posterior(cross_sq_dist(z, x), t).exp()
    variance = p @ x.double().square() - (p @ x.double()).square()  # variance of one posterior draw
    return ReferenceSet(x), z, source, posterior_mean(z, x, t), variance.mean(1)


def run_measure(estimator, repeats=30, resample=False, t=1.0):
    reference, z, source, mu, variance = small_set(t)
    if estimator.needs_reference:
        estimator.bind(reference)
    sources = posterior_source(reference, z, t, repeats, (0,)) if resample else fixed_source(source)
    return measure(estimator, repeats, z, t, mu, sources, (0, 0)), variance


def close(values, expected, sigmas=4.5):
    difference = values - expected
    return abs(difference.mean()) < sigmas * sem(difference)


def test_monte_carlo_has_the_variance_of_the_posterior_over_n_and_no_bias():
    values, variance = run_measure(MonteCarlo(n=8))
    assert close(values["variance"], variance / 8)
    assert close(values["bias_sq_corrected"], 0.0)
    assert close(values["bias_sq"], variance / 8 / 30)
    assert values["effective_sample_size"].tolist() == pytest.approx([8.0] * 200)
    assert values["largest_weight"].tolist() == pytest.approx([1 / 8] * 200)
    # For independent draws the error estimate is a sample variance and has no bias.
    assert values["certified_mse"].mean().item() == pytest.approx(values["variance"].mean().item(), rel=0.15)


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


def test_the_source_counts_as_bias_while_it_is_fixed_and_as_variance_once_it_is_drawn():
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


def test_stf_has_no_bias_over_the_sources_of_its_z(monkeypatch):
    # This enumerates all sources and all pairs of uniform draws from four images, with their probabilities.
    generator = torch.Generator().manual_seed(1)
    x, z = torch.randn(4, 2, generator=generator), torch.randn(1, 2, generator=generator)
    posterior = log_posterior(cross_sq_dist(z, x), 0.7).exp()[0]
    estimator = STF(3).bind(ReferenceSet(x))
    average, given_nearest = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for source in range(4):
        for pair in itertools.product(range(4), repeat=2):
            with monkeypatch.context() as patch:
                patch.setattr(torch, "randint", lambda *_, pair=pair, **__: torch.tensor([pair]))
                estimate = estimator.posterior_mean(z.double(), 0.7, x[None, source].double())[0]
            average += posterior[source] * estimate / 16
            given_nearest += (source == posterior.argmax()) * estimate / 16
    mu = posterior_mean(z, x, 0.7)[0]
    # float32 images round the estimates.
    torch.testing.assert_close(average, mu, rtol=0, atol=1e-6)
    assert (given_nearest - mu).abs().max() > 0.05


def test_weights_are_even_at_large_noise_and_one_at_small_noise():
    assert (run_measure(UniformSNIS(n=16), t=1e4)[0]["effective_sample_size"] > 15.99).all()
    values, _ = run_measure(STF(n=16), t=1e-3)
    # Only the source and draws of the same image have weight: one weight of 16, or m equal ones.
    assert ((values["effective_sample_size"] * values["largest_weight"] - 1).abs() < 1e-6).all()
    assert values["effective_sample_size"].mean() < 2


def test_latents_depend_neither_on_the_batch_nor_on_the_level():
    reference = ReferenceSet(torch.randn(20, 2))
    latents = NoisyLatents(reference, 12, seed=3)
    z, x = latents.batch(range(12), 2.0)
    for numbers in (range(0, 5), range(5, 12)):
        part_z, part_x = latents.batch(numbers, 2.0)
        assert torch.equal(part_z, z[numbers.start : numbers.stop])
        assert torch.equal(part_x, x[numbers.start : numbers.stop])
    torch.testing.assert_close((latents.batch(range(12), 8.0)[0] - x) / 8, (z - x) / 2)
    assert len(set(latents.ids.tolist())) == 12
    assert not torch.equal(NoisyLatents(reference, 12, seed=4).batch(range(12), 2.0)[0], z)


# The run

ESTIMATORS = {
    "KNN": {"class_path": "KNN", "init_args": {"k": 32, "n": 8}},
    "STF": {"class_path": "STF", "init_args": {"n": 8}},
    "exact": {"class_path": "Exact"},
}
SMALL = {"estimators": ESTIMATORS, "noise_levels": [0.5, 5.0], "num_z": 20, "repeats": 3, "batch_size": 8}


def command(folder, logger="TensorBoardLogger", **options):
    """Run `validate` on the digits with one callback."""
    callback = {"class_path": "lit_knn.callbacks.EstimatorError", "init_args": {**SMALL, **options}}
    config = folder / "error.yaml"
    trainer = {"accelerator": "cpu", "enable_progress_bar": False, "limit_val_batches": 1, "callbacks": [callback]}
    trainer["logger"] = {"class_path": logger, "init_args": {"save_dir": str(folder), "name": "run"}}
    config.write_text(yaml.safe_dump({"model": "LitEstimator", "data": "Digits", "trainer": trainer}))
    return ["validate", "-c", str(config)]


def read(folder):
    with (folder / "run" / "estimator_0" / "estimator_error.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with one process."""
    folder = tmp_path_factory.mktemp("one")
    main(command(folder, resample_source=True))
    return folder


def test_a_run_leaves_table_picture_and_tensorboard(finished):
    rows = read(finished)
    assert [(row["estimator"], float(row["t"])) for row in rows] == [(e, t) for t in (0.5, 5.0) for e in ESTIMATORS]
    by_name = {(row["estimator"], float(row["t"])): row for row in rows}
    for (name, t), row in by_name.items():
        assert float(row["score_mse"]) == pytest.approx(float(row["mu_mse"]) / t**4)
        assert (row["mu_variance"] == "") == (name == "exact")
        assert (row["effective_sample_size"] == "") == (name == "exact")
        assert (row["search_recall"] == "") == (name != "KNN")
        assert (row["bias_share"] == "") == (name == "exact")
        for error in ("mse", "bias_sq", "bias_sq_corrected"):
            assert float(row[f"score_{error}_se"]) == pytest.approx(float(row[f"mu_{error}_se"]) / t**4)
    assert float(by_name["exact", 5.0]["mu_mse"]) < 1e-9
    assert by_name["exact", 5.0]["repeats"] == "1"
    assert float(by_name["KNN", 5.0]["mu_mse"]) > 1e-4
    stf = by_name["STF", 5.0]
    assert float(stf["bias_share"]) == pytest.approx(float(stf["mu_bias_sq_corrected"]) / float(stf["mu_mse"]))
    assert 0 < float(stf["bias_share_se"]) < 1
    folder = finished / "run" / "estimator_0"
    assert Image.open(folder / "figure3.png").size[0] > 1000
    assert (folder / "figure3.pdf").read_bytes().startswith(b"%PDF")
    assert not list(folder.glob(".*"))
    events = EventAccumulator(str(folder))
    events.Reload()
    assert events.Tags()["images"] == ["estimator/figure3"]
    logged = {name: events.Scalars(name) for name in events.Tags()["scalars"] if name.startswith("estimator/")}
    parts = {f"{error}/{name}" for error in ("mse", "bias_sq", "variance") for name in ESTIMATORS} - {"variance/exact"}
    assert set(logged) == {f"estimator/peak_score_{part}" for part in parts}
    for name, (event,) in logged.items():
        _, peak, estimator = name.split("/")
        column = peak.removeprefix("peak_")
        highest = max(float(by_name[estimator, t][column]) for t in (0.5, 5.0))
        assert event.value == pytest.approx(highest, rel=1e-6)


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "ms_per_estimate"} for row in rows]


@pytest.mark.slow  # Two ranks share samples in test_fidelity_callback.py, too.
def test_two_processes_measure_what_one_does(finished, tmp_path):
    run_main(command(tmp_path, resample_source=True), ranks=2)
    for ours, theirs in zip(without_time(read(tmp_path)), without_time(read(finished)), strict=True):
        for column, value in ours.items():
            if column == "estimator" or value == "":
                assert value == theirs[column]
            else:
                assert float(value) == pytest.approx(float(theirs[column]), rel=1e-9, abs=1e-18), column


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_levels": [1.0, 0.0]}, "noise_levels must be finite and above 0, got 0.0"),
        ({"noise_levels": []}, "noise_levels is empty"),
        ({"noise_levels": 1}, "noise_levels=1, a number of levels, must be at least 2"),
        ({"noise_levels": 5, "t_min": 3.0, "t_max": 2.0}, "0 < t_min < t_max, got t_min=3.0 and t_max=2.0"),
        ({"num_z": 1798}, "num_z=1798 is more than the 1797 images"),
        ({"num_z": 0}, "num_z must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"repeats": 1}, "repeats must be at least 2 to tell the variance of KNN, got 1"),
        ({"estimators": {}}, "estimators is empty"),
        ({"estimators": {"a": {"class_path": "KNNN"}}}, "KNNN"),
        ({"estimators": {"a": {"class_path": "KNN", "init_args": {"k": 5000}}}}, "k=5000 is more than the 1797"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_said_in_one_line(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(command(tmp_path, **options))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert message in line


def test_results_of_an_earlier_run_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "run" / "version_0").mkdir(parents=True)
    earlier = tmp_path / "run" / "version_0" / "estimator_error.csv"
    earlier.write_text("estimator\n")
    with pytest.raises(SystemExit):
        main([*command(tmp_path), "--trainer.logger.version", "0"])
    assert "estimator_error.csv exists; nothing is overwritten" in capsys.readouterr().err
    assert earlier.read_text() == "estimator\n"


def test_the_standard_error_of_a_ratio_is_the_spread_of_ratios_of_other_latents():
    # Both errors are large at the same latents, so the ratio varies far less than either mean.
    generator = torch.Generator().manual_seed(0)
    of = torch.empty(2000, 400, dtype=torch.float64).exponential_(generator=generator)
    values = 0.5 * of + 0.02 * torch.randn(of.shape, generator=generator, dtype=torch.float64)
    found = [share_and_error(*rows) for rows in zip(values, of, strict=True)]
    spread = (values.mean(1) / of.mean(1)).std().item()
    # The spread of 2,000 ratios is known to 1/sqrt(4000), 1.6 per cent, and the formula is of first order in 1/400.
    assert np.mean([one.standard_error for one in found]) == pytest.approx(spread, rel=0.06)
    assert np.mean([one.mean for one in found]) == pytest.approx(0.5, abs=4 * spread / 2000**0.5)


def test_levels_are_equally_spaced_in_the_logarithm():
    np.testing.assert_allclose(noise_grid(5, 0.5, 80.0), np.geomspace(0.5, 80, 5))
    assert noise_grid([3, 1.5], 9, 1) == [3.0, 1.5]
