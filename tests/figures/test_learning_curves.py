"""The learning curves: the grid goes on where it stopped, and the variance of gradients is that of closed forms."""

import csv
import math
import multiprocessing
import os
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.learning_curves.__main__ import main
from benchmarks.learning_curves.claims import judge
from benchmarks.learning_curves.grid import Run, runs_of
from benchmarks.learning_curves.kinds import KINDS, Latents, flow_end
from benchmarks.learning_curves.measurements import Measurements, gradient_moments, posterior_sources
from benchmarks.learning_curves.sets import Lengths, averaged
from benchmarks.learning_curves.statistics import Curves, derived, interval
from benchmarks.learning_curves.table import CurveTable
from benchmarks.learning_curves.training import Measure
from lit_knn.estimators import KNN, STF, Exact, OneSample
from lit_knn.metrics import Pixels
from lit_knn.metrics.fidelity import frechet_distance_of_statistics, image_statistics
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import EDM_PROCESS, LINEAR_PROCESS, forward_noise

LENGTHS = Lengths(steps=2, measurements=2, batch_size=16, samples=80, held=20, pairs=6, repeats=3)
TINY = ["--steps", "2", "--measurements", "2", "--batch-size", "16", "--samples", "80", "--held", "20", "--pairs", "4"]
TINY += ["--repeats", "2", "--seeds", "1"]


def rows_of(path):
    return list(csv.DictReader(path.open()))


def curves_command(path, *more):
    main(["--output", str(path), "--checkpoints", str(path.with_suffix("")), *TINY, *more])


def same_numbers(rows, others):
    """Compare rows without their times."""
    times = {"cpu_seconds", "seconds", "estimator_seconds"}
    return [{k: v for k, v in row.items() if k not in times} for row in rows] == [
        {k: v for k, v in row.items() if k not in times} for row in others
    ]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("curves") / "x.csv"
    curves_command(path, "--modules", "EDM", "iCT", "--estimators", "OneSample", "KNN")
    return path


def test_the_grid_has_a_row_for_every_run_and_measurement(table):
    rows = rows_of(table)
    assert [(row["module"], row["estimator"], row["step"]) for row in rows] == [
        (module, estimator, step) for module in ("EDM", "iCT") for estimator in ("OneSample", "KNN") for step in "12"
    ]
    assert {row["images"] for row in rows if row["step"] == "2"} == {"32"}
    numbers = ("val_loss", "val_error", "fd_pixels", "gradient_variance", "one_sample_variance")
    assert all(0 < float(row[name]) < 1e6 for row in rows for name in numbers)


def test_a_finished_run_is_not_repeated_and_a_missing_one_is_made_again_the_same(table, tmp_path):
    kept = rows_of(table)
    shorter = tmp_path / "x.csv"
    lines = table.read_text().splitlines(keepends=True)
    shorter.write_text("".join(lines[:5] + lines[7:]))  # without the run iCT, OneSample
    curves_command(shorter, "--modules", "EDM", "iCT", "--estimators", "OneSample", "KNN")
    again = rows_of(shorter)
    assert again[:6] == kept[:4] + kept[6:]
    assert same_numbers(again[6:], kept[4:6])


def stop(self, trainer, *_):
    if trainer.global_step == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def killed(path, *run):
    Measure.on_train_batch_start = stop
    curves_command(path, *run)


def test_an_interrupted_run_goes_on_from_its_checkpoint(table, tmp_path):
    path = tmp_path / "x.csv"
    run = ["--modules", "EDM", "--estimators", "KNN"]
    # A fork of this process could not train if another test has started threads of autograd.
    child = multiprocessing.get_context("forkserver").Process(target=killed, args=(path, *run))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not path.exists()
    (checkpoint,) = tmp_path.glob("x/digits-EDM-KNN-0-*/last.ckpt")
    kept = torch.load(checkpoint, weights_only=True)
    assert kept["global_step"] == 1
    curves_command(path, *run)
    assert same_numbers(rows_of(path), rows_of(table)[2:4])
    # The first row is that of the interrupted run, with its times.
    assert float(rows_of(path)[0]["seconds"]) == kept["callbacks"]["Measure"]["rows"][0]["seconds"]


@pytest.mark.slow  # The next tests continue runs, too.
def test_tuning_starts_from_the_run_of_the_same_seed_which_is_made_if_it_is_missing(tmp_path):
    path = tmp_path / "x.csv"
    curves_command(path, "--modules", "ECT", "--estimators", "STF")
    rows = rows_of(path)
    assert [(row["module"], row["estimator"], row["images_before"]) for row in rows] == [
        ("EDM", "OneSample", "0"), ("EDM", "OneSample", "0"), ("ECT", "STF", "32"), ("ECT", "STF", "32")
    ]  # fmt: skip
    # Without the rows and the checkpoint of ECT, only ECT is trained again.
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    shutil.rmtree(next(tmp_path.glob("x/digits-ECT-*")))
    curves_command(path, "--modules", "ECT", "--estimators", "STF")
    again = rows_of(path)
    assert again[:2] == rows[:2]
    assert same_numbers(again[2:], rows[2:])


def test_a_run_is_claimed_by_one_process_at_a_time(tmp_path):
    run, other = Run("digits", "EDM", "STF", 0), Run("digits", "EDM", "STF", 1)
    one, two = CurveTable(tmp_path / "x.csv"), CurveTable(tmp_path / "x.csv")
    with one.claimed(run) as mine, two.claimed(run) as theirs, two.claimed(other) as free:
        assert (mine, theirs, free) == (True, False, True)
    with two.claimed(run) as theirs:
        assert theirs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pairs", "5"], "digits-EDM-OneSample-0 has the settings"),
        (["--modules", "DDPM"], "--modules DDPM: digits has EDM"),
        (["--estimators", "SubspaceKNN"], "--estimators SubspaceKNN: digits has OneSample"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--steps", "3"], "--measurements 2 must divide --steps 3"),
        (["--repeats", "1"], "--repeats must be at least 2, got 1"),
        (["--samples", "81"], "--samples must be an even number of at least 4, got 81"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--set", "cifar16"], "--kept None"),
    ],
)
def test_bad_options_are_one_line_before_any_training(table, tmp_path, options, words, capsys):
    path = tmp_path / "x.csv"
    shutil.copy(table, path)
    with pytest.raises(SystemExit, match="2"):
        curves_command(path, "--modules", "EDM", *options)
    assert words in capsys.readouterr().err.strip()
    assert rows_of(path) == rows_of(table)


def test_a_report_is_made_from_rows_alone(table, tmp_path, capsys):
    path = tmp_path / "x.csv"
    shutil.copy(table, path)
    main(["--output", str(path), "--report"])
    text = capsys.readouterr().out
    assert "## EDM, 32 images" in text
    last = {(row["module"], row["estimator"]): float(row["val_error"]) for row in rows_of(table) if row["step"] == "2"}
    difference = last["iCT", "KNN"] - last["iCT", "OneSample"]
    assert f"{difference:+.3g} (one seed)" in text.split("## iCT")[1]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.csv", "x.md", "x.pdf", "x.png"]


def test_runs_come_by_seed_first():
    runs = runs_of("digits", ["EDM", "iCT"], ["STF", "Exact"], 2)
    assert runs[:3] == [Run("digits", *rest, 0) for rest in (("EDM", "STF"), ("EDM", "Exact"), ("iCT", "STF"))]
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4


def test_averaged_images_are_the_means_of_blocks():
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 4, 6), np.uint8)
    wanted = torch.nn.functional.avg_pool2d(torch.from_numpy(images).double(), 2).round()
    np.testing.assert_array_equal(averaged(images), wanted.numpy().astype(np.uint8))


# The variance of gradients


class Linear(nn.Module):
    """A network that is a matrix: W times its flattened input."""

    def __init__(self, d):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(d, d, generator=torch.Generator().manual_seed(4)) / d)

    def forward(self, z, noise_label, class_label=None):
        return (z.flatten(1) @ self.matrix.T).reshape(z.shape)


def tiny_set():
    generator = torch.Generator().manual_seed(1)
    return ReferenceSet(torch.rand(7, 1, 2, 2, generator=generator) * 2 - 1)


def posterior(reference, z, t):
    """Weights of the images, (B, N), in float64 by enumeration."""
    x = reference.gather(torch.arange(reference.N)).flatten(1).double()
    sq_dist = torch.cdist(z.flatten(1).double(), x).square()
    return torch.softmax(-sq_dist / (2 * t[:, None].square()), 1), x


def test_the_gradient_variance_of_a_linear_denoiser_is_its_closed_form():
    reference = tiny_set()
    lengths = LENGTHS._replace(repeats=1500, pairs=3, held=2)
    kind = KINDS["EDM"]
    measurements = Measurements(kind, reference, lengths)
    _, z, t, _ = measurements.pairs
    module = kind.make(Linear(4), OneSample(), 0, 10, None)
    found = measurements.gradients(module, OneSample())
    weights, x = posterior(reference, z, t)
    mean = weights @ x
    trace = (weights * x.square().sum(1)).sum(1) - mean.square().sum(1)
    # D = c_skip·z + c_out·W·(c_in·z), so dL_i/dW = 2 λ c_out (D − target) (c_in·z)ᵀ for the sum over pixels, and λ is
    # 1/c_out². The batch averages three independent items.
    c_out = t * 0.5 / (t.square() + 0.25).sqrt()
    z_in = z.flatten(1).double() / (t.square() + 0.25).sqrt()[:, None]
    variance = (4 / c_out.square() * z_in.square().sum(1) * trace).sum() / 9
    assert found.variance == pytest.approx(variance.item(), abs=4 * found.variance_se)
    assert found.variance_se < 0.05 * found.variance
    skip = 0.25 / (t.square() + 0.25)
    output = skip[:, None] * z.flatten(1) + c_out[:, None] * (z_in @ module.denoiser.model.matrix.T.double())
    gradient = ((2 / c_out)[:, None, None] * (output - mean)[:, :, None] * z_in[:, None]).mean(0)
    assert found.norm_sq == pytest.approx(gradient.square().sum().item(), rel=0.05)


@pytest.mark.parametrize(("process", "t"), [(EDM_PROCESS, 0.6), (LINEAR_PROCESS, 0.375)])  # σ = 0.6 in both
def test_sources_are_drawn_from_the_posterior(process, t):
    reference = tiny_set()
    times = torch.full((5,), t, dtype=torch.float64)
    z = forward_noise(reference.gather(torch.arange(5)), times, torch.randn(5, 1, 2, 2), process)
    sources = posterior_sources(reference, process, Latents(z, z, times, times), 20_000)
    weights, x = posterior(
        reference, z / process.scale(times).float()[:, None, None, None], torch.full((5,), 0.6, dtype=torch.float64)
    )
    torch.testing.assert_close(sources.flatten(2).mean(1).double(), weights @ x, rtol=0, atol=0.03)


@pytest.mark.parametrize("name", ["EDM", "flow"])
def test_the_error_of_a_regression_is_its_loss_with_enumerated_targets(name):
    reference, kind = tiny_set(), KINDS[name]
    latents = kind.latents(reference, 40, 0)
    scale, sigma = kind.process.scale(latents.t), kind.process.sigma(latents.t)
    weights, x = posterior(reference, latents.z / scale.float()[:, None, None, None], sigma)
    wanted = kind.exact_output(latents, Exact().bind(reference))
    torch.testing.assert_close(wanted.flatten(1).double(), weights @ x, rtol=0, atol=1e-4)
    module = kind.make(Linear(4), Exact().bind(reference), 0, 10, None)
    generator = torch.Generator()
    losses = kind.losses(module, latents, latents.x, generator)
    torch.testing.assert_close(losses, kind.errors(module, latents, wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["EDM", "flow", "iCT"])
def test_exact_targets_have_no_gradient_variance_and_others_less_than_one_sample(name):
    reference = tiny_set()
    kind = KINDS[name]
    measurements = Measurements(kind, reference, LENGTHS._replace(repeats=60))
    module = kind.make(Linear(4), OneSample(), 0, 10, None)
    moments = {
        estimator: measurements.gradients(module, estimator.bind(reference))
        for estimator in (OneSample(), STF(n=4), KNN(k=7, n=4), Exact())
    }
    plain, stf, knn, exact = moments.values()
    assert exact.variance == 0
    assert min(stf.variance, knn.variance) > 0
    assert max(stf.variance, knn.variance) < plain.variance
    assert type(module.estimator) is OneSample


def test_samples_have_other_noise_for_each_seed_and_the_same_for_all_estimators():
    class Recorder:
        def __init__(self, seed):
            self.hparams, self.seen = SimpleNamespace(seed=seed), []

        def sample(self, seeds):
            self.seen += seeds.tolist()
            return torch.randn(len(seeds), 1, 2, 2)

    measurements = Measurements(KINDS["EDM"], tiny_set(), LENGTHS._replace(samples=200))
    first, again, second = Recorder(0), Recorder(0), Recorder(1)
    for each in (first, again, second):
        measurements.distances(each)
    assert first.seen == again.seen == list(range(200))
    assert second.seen == list(range(200, 400))


def test_moments_are_those_of_numpy():
    g = torch.randn(6, 5, dtype=torch.float64)
    found = gradient_moments(g)
    assert found.variance == pytest.approx(np.cov(g.numpy().T).trace())
    assert found.norm_sq == pytest.approx((g.mean(0).square().sum() - found.variance / 6).item())
    # Over many sets of draws the standard error is the deviation of the variances.
    many = [gradient_moments(torch.randn(8, 40, generator=torch.Generator().manual_seed(i))) for i in range(400)]
    spread = np.std([each.variance for each in many])
    assert np.mean([each.variance_se for each in many]) == pytest.approx(spread, rel=0.15)
    assert abs(np.mean([each.norm_sq for each in many])) < 4 * np.std([each.norm_sq for each in many]) / 20


def test_the_end_of_the_flow_of_a_single_image_is_near_the_image():
    # With one image the flow is linear: z − x shrinks in proportion to t.
    reference = ReferenceSet(torch.rand(1, 1, 2, 2) * 2 - 1)
    x = reference.gather(torch.zeros(3, dtype=torch.long))
    t = torch.tensor([0.002, 0.7, 40.0], dtype=torch.float64)
    z = forward_noise(x, t, torch.randn(x.shape))
    exact = Exact().bind(reference)
    wanted = x + (z - x) * (0.002 / t).float()[:, None, None, None]
    torch.testing.assert_close(flow_end(z, t, exact.posterior_mean), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(KINDS["ECT"].exact_output(Latents(x, z, t, t), exact), x, rtol=0, atol=2e-5)


# Statistics of the report


def made_rows(values):
    """Rows of two measurements; `values` gives the Fréchet distances by (estimator, seed)."""
    rest = {"gradient_variance": 1.0, "one_sample_variance": 2.0, "gradient_norm_sq": 4.0, "fd_second_half": 1.0}
    return [
        {"estimator": name, "seed": seed, "step": step, "images": 100 * step, "cpu_seconds": 10.0 * step}
        | {"fd_pixels": value, "fd_first_half": 1.2, **rest}
        for (name, seed), pair in values.items()
        for step, value in enumerate(pair, start=1)
    ]


def test_intervals_are_those_of_scipy_over_paired_seeds():
    from scipy.stats import ttest_rel

    a, b = [1.0, 1.3, 0.9, 1.2], [1.4, 1.5, 1.5, 1.6]
    rows = made_rows(
        {("OneSample", i): (9, v) for i, v in enumerate(b)} | {("Exact", i): (9, v) for i, v in enumerate(a)}
    )
    curves = Curves(rows, ["OneSample", "Exact"])
    found = curves.difference(curves.last("fd_pixels"), "Exact", "OneSample")
    wanted = ttest_rel(a, b).confidence_interval(0.95)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(tuple(wanted))
    assert found.sign == -1
    assert interval([1.0, -1.1, 0.2]).sign == 0
    chosen = curves.difference(curves.last("fd_pixels"), "Exact", "OneSample", comparisons=5)
    wider = ttest_rel(a, b).confidence_interval(0.99)
    assert (chosen.mean - chosen.half_width, chosen.mean + chosen.half_width) == pytest.approx(tuple(wider))


def test_images_to_reach_a_value_are_interpolated_in_its_logarithm():
    rows = made_rows({("OneSample", 0): (8, 2), ("Exact", 0): (4, 1), ("STF", 0): (9, 3), ("KNN", 0): (1, 1)})
    curves = Curves(rows, ["OneSample", "STF", "KNN", "Exact"])
    share = curves.images_to_reach("fd_pixels", "OneSample")
    assert share("OneSample", 0) == 1
    assert share("Exact", 0) == pytest.approx(0.75)  # 2 is halfway from 4 to 1 in logarithms
    assert share("KNN", 0) == 0.5  # the first measurement
    assert np.isnan(share("STF", 0))
    assert curves.at_seconds("fd_pixels", 15.0)("OneSample", 0) == pytest.approx(4)
    assert np.isnan(curves.at_seconds("fd_pixels", 9.0)("OneSample", 0))  # before the first measurement
    assert curves.last("fd_noise")("KNN", 0) == pytest.approx(0.1)
    assert curves.last("relative_noise")("KNN", 0) == pytest.approx(0.5)


def test_the_limit_of_the_distance_of_true_samples_is_near_zero():
    generator = np.random.default_rng(0)
    whole = torch.as_tensor(generator.uniform(-1, 1, (5000, 1, 2, 4)), dtype=torch.float32)
    real, samples = image_statistics(ReferenceSet(whole), Pixels()), whole[:200]
    distances = [
        frechet_distance_of_statistics(image_statistics(part, Pixels()), real)
        for part in (samples, samples[:100], samples[100:])
    ]
    names = ("fd_pixels", "fd_first_half", "fd_second_half")
    (row,) = made_rows({("Exact", 0): (1,)})
    limit = derived(row | dict(zip(names, distances, strict=True)))["fd_limit"]
    assert abs(limit) < 0.3 * distances[0]


def test_claims_are_judged_by_the_side_of_their_intervals():
    noise = [0.0, 0.1, -0.1]
    values = {"OneSample": 2.0, "STF": 1.0, "KNN": 1.5, "Exact": 2.01}
    rows = made_rows({(name, i): (value, value + noise[i]) for name, value in values.items() for i in range(3)})
    wobble = {0: 0.1, 1: -0.1, 2: 0.02}
    rows = [row | {"gradient_variance": 0.0} if row["estimator"] == "Exact" else row for row in rows]
    rows = [
        row | {"fd_pixels": row["fd_pixels"] + (wobble[row["seed"]] if row["estimator"] == "Exact" else 0.0)}
        for row in rows
    ]
    judged = {(each.claim, each.pair): each for each in judge(Curves(rows, list(values)))}
    verdicts = {key: each.verdict for key, each in judged.items()}
    assert verdicts == {
        ("better samples at the end", ("KNN", "OneSample")): "holds",
        ("faster convergence (mean ln fd_pixels)", ("KNN", "OneSample")): "holds",
        ("stochastic and closed-form targets end equal", ("OneSample", "Exact")): "no difference told",
        ("the least variance is not the best sample", ("STF", "Exact")): "holds",
    }
    (ratio,) = [each.difference for (claim, _), each in judged.items() if "ln" in claim]
    assert math.exp(ratio.mean) == pytest.approx(0.75, rel=0.03)
    alone = [row for row in rows if row["seed"] == 0]
    assert judge(Curves(alone, list(values))) == []
