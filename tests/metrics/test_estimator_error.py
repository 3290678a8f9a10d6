"""Squared bias, variance and MSE of Eq. 15 (eq:mse), and the run that measures them."""

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from scipy.stats import sem
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_knn.common.tables import read_rows
from lit_knn.estimators import KNN, STF, MonteCarlo, OneSample
from lit_knn.metrics.estimator_error import LatentMeans, bias_share, error_terms, share_and_error
from lit_knn.metrics.latents import NoisyLatents, noise_grid
from lit_knn.metrics.measure import fixed_source, measure, posterior_source
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import cross_sq_dist, log_posterior, posterior_mean
from main import main
from tests.command_lines import refusal_of
from tests.ranks import run_main


def terms_of(errors):
    """The `error_terms` of the errors of R estimates at B latents, (R, B, d)."""
    error = torch.tensor(errors)
    return error_terms(error.sum(0), error.square().sum((0, 2)), len(error))


def test_terms_are_those_of_numpy():
    errors = 0.3 + np.random.default_rng(0).normal(size=(7, 4, 5))
    terms = terms_of(errors)
    np.testing.assert_allclose(terms.mse, (errors**2).mean((0, 2)))
    np.testing.assert_allclose(terms.bias_sq, (errors.mean(0) ** 2).mean(1))
    np.testing.assert_allclose(terms.variance, errors.var(0, ddof=1).mean(1))
    np.testing.assert_allclose(terms.bias_sq_corrected + terms.variance, terms.mse)


def test_means_and_standard_errors_add_up_over_batches_and_ranks():
    values = np.random.default_rng(0).normal(3, 2, size=(2, 101))
    ranks = [LatentMeans(("a", "b")), LatentMeans(("a", "b"))]
    for i, batch in enumerate(np.split(values, [40, 90], axis=1)):
        ranks[i % 2].update(b=torch.tensor(batch[1]), a=torch.tensor(batch[0]))
    for state in ("count", "total", "sq_total"):  # torchmetrics combines processes like this
        setattr(ranks[0], state, getattr(ranks[0], state) + getattr(ranks[1], state))
    for name, expected in zip("ab", values, strict=True):
        assert ranks[0].compute()[name] == pytest.approx((expected.mean(), sem(expected)))


def gaussian_terms(num_z, R=5, d=6, b=0.3, s=0.5, seed=0):
    """The terms of estimates with error N(b, s²) in each dimension, and their means over the latents."""
    terms = terms_of(np.random.default_rng(seed).normal(b, s, size=(R, num_z, d)))
    means = LatentMeans(terms._fields)
    means.update(**terms._asdict())
    return means.compute()


def test_standard_errors_are_those_of_gaussian_errors():
    R, d, b, s, num_z = 5, 6, 0.3, 0.5, 40_000
    measured = gaussian_terms(num_z)
    # Textbook variances for Gaussian numbers: of a mean of squares, a sample variance and a squared mean.
    of_mean = (2 * (s**2 / R) ** 2 + 4 * b**2 * s**2 / R) / d
    expected = {
        "mse": (b**2 + s**2, (2 * s**4 + 4 * b**2 * s**2) / (R * d)),
        "variance": (s**2, 2 * s**4 / ((R - 1) * d)),
        "bias_sq": (b**2 + s**2 / R, of_mean),
        "bias_sq_corrected": (b**2, of_mean + 2 * s**4 / (R - 1) / R**2 / d),
    }
    for name, (value, variance) in expected.items():
        mean, error = measured[name]
        assert error == pytest.approx((variance / num_z) ** 0.5, rel=0.03)
        assert abs(mean - value) < 4 * error


def test_the_share_of_the_bias_and_its_standard_error():
    names = ("mse", "bias_sq_corrected", "variance")
    many = [gaussian_terms(200, seed=seed) for seed in range(400)]
    shares = [bias_share(**{name: terms[name] for name in names}) for terms in many]
    values = np.array([share.mean for share in shares])
    assert abs(values.mean() - 0.09 / 0.34) < 4 * sem(values) + 1e-3  # a ratio of means has a bias, O(1/num_z)
    assert np.mean([share.standard_error for share in shares]) == pytest.approx(values.std(), rel=0.1)


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
    return measure(estimator, repeats, z, t, posterior_mean(z, x, t), sources, (0, 0)), variance.mean(1)


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


def test_latents_depend_neither_on_the_batch_nor_on_the_level():
    reference = ReferenceSet(torch.randn(20, 2))
    latents = NoisyLatents(reference, 12, seed=3)
    z, x = latents.batch(range(12), 2.0)
    part_z, part_x = latents.batch(range(5, 12), 2.0)
    assert torch.equal(part_z, z[5:])
    assert torch.equal(part_x, x[5:])
    torch.testing.assert_close((latents.batch(range(12), 8.0)[0] - x) / 8, (z - x) / 2)
    assert len(set(latents.ids.tolist())) == 12
    assert not torch.equal(NoisyLatents(reference, 12, seed=4).batch(range(12), 2.0)[0], z)
    # Levels are equally spaced in the logarithm.
    np.testing.assert_allclose(noise_grid(5, 0.5, 80.0), np.geomspace(0.5, 80, 5))


# The run

ESTIMATORS = {
    "KNN": {"class_path": "KNN", "init_args": {"k": 32, "n": 8}},
    "STF": {"class_path": "STF", "init_args": {"n": 8}},
    "exact": {"class_path": "Exact"},
}
SMALL = {"estimators": ESTIMATORS, "noise_levels": [0.5, 5.0], "num_z": 20, "repeats": 3, "batch_size": 8}
TABLE = "run/estimator_0/estimator_error.csv"


def command(folder, **options):
    """Run `validate` on the digits with one callback."""
    callback = {"class_path": "lit_knn.callbacks.EstimatorError", "init_args": {**SMALL, **options}}
    trainer = {"accelerator": "cpu", "enable_progress_bar": False, "limit_val_batches": 1, "callbacks": [callback]}
    trainer["logger"] = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": str(folder), "name": "run"}}
    config = folder / "error.yaml"
    config.write_text(yaml.safe_dump({"model": "LitEstimator", "data": "Digits", "trainer": trainer}))
    return ["validate", "-c", str(config)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with one process."""
    folder = tmp_path_factory.mktemp("one")
    main(command(folder, resample_source=True))
    return folder


def test_a_run_leaves_table_picture_and_tensorboard(finished):
    rows = {(row["estimator"], float(row["t"])): row for row in read_rows(finished / TABLE)}
    assert list(rows) == [(name, t) for t in (0.5, 5.0) for name in ESTIMATORS]
    for (name, t), row in rows.items():
        for error in ("mse", "mse_se", "bias_sq_se", "bias_sq_corrected_se"):
            assert float(row[f"score_{error}"]) == pytest.approx(float(row[f"mu_{error}"]) / t**4)
        for column in ("mu_variance", "effective_sample_size", "bias_share"):
            assert (row[column] == "") == (name == "exact")
        assert (row["search_recall"] == "") == (name != "KNN")
    assert float(rows["exact", 5.0]["mu_mse"]) < 1e-9
    assert rows["exact", 5.0]["repeats"] == "1"
    assert float(rows["KNN", 5.0]["mu_mse"]) > 1e-4
    stf = rows["STF", 5.0]
    assert float(stf["bias_share"]) == pytest.approx(float(stf["mu_bias_sq_corrected"]) / float(stf["mu_mse"]))
    assert 0 < float(stf["bias_share_se"]) < 1
    folder = (finished / TABLE).parent
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
        highest = max(float(rows[estimator, t][peak.removeprefix("peak_")]) for t in (0.5, 5.0))
        assert event.value == pytest.approx(highest, rel=1e-6)


@pytest.mark.slow  # Two ranks share samples in test_fidelity_callback.py, too.
def test_two_processes_measure_what_one_does(finished, tmp_path):
    run_main(command(tmp_path, resample_source=True), ranks=2)
    for ours, theirs in zip(read_rows(tmp_path / TABLE), read_rows(finished / TABLE), strict=True):
        for column, value in ours.items():
            if column == "estimator" or value == "":
                assert value == theirs[column]
            elif column != "ms_per_estimate":
                assert float(value) == pytest.approx(float(theirs[column]), rel=1e-9, abs=1e-18), column


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_levels": [1.0, 0.0]}, "noise_levels must be finite and above 0, got 0.0"),
        ({"noise_levels": []}, "noise_levels is empty"),
        ({"noise_levels": 5, "t_min": 3.0, "t_max": 2.0}, "0 < t_min < t_max, got t_min=3.0 and t_max=2.0"),
        ({"num_z": 1798}, "num_z=1798 is more than the 1797 images"),
        ({"repeats": 1}, "repeats must be at least 2 to tell the variance of KNN, got 1"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_said_in_one_line(options, message, tmp_path, capsys):
    assert message in refusal_of(command(tmp_path, **options), capsys)


def test_results_of_an_earlier_run_are_not_overwritten(tmp_path, capsys):
    earlier = tmp_path / "run" / "version_0" / "estimator_error.csv"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("estimator\n")
    line = refusal_of([*command(tmp_path), "--trainer.logger.version", "0"], capsys)
    assert "estimator_error.csv exists; nothing is overwritten" in line
    assert earlier.read_text() == "estimator\n"
