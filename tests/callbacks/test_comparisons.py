"""Runs that compare estimators: Figures 1 to 3, and agreement with networks."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_knn.common.tables import read_rows
from lit_knn.estimators import PatchPosterior
from lit_knn.metrics.latents import NoisyLatents
from tests.command_lines import refusal_of

ESTIMATORS = {
    "KNN": {"class_path": "KNN", "init_args": {"k": 32, "n": 8}},
    "STF": {"class_path": "STF", "init_args": {"n": 8}},
    "exact": {"class_path": "Exact"},
}
CURVE = {"estimators": ESTIMATORS, "noise_levels": [0.5, 5.0], "num_z": 20, "repeats": 3, "batch_size": 8}
TABLE = Path("results/network_agreement.csv")
AGREEMENT = {
    "estimators": {
        "Patch": {"class_path": "PatchPosterior", "init_args": {"size": 3}},
        "Wiener": {"class_path": "Wiener", "init_args": {"r": 8}},
    },
    "noise_levels": [0.3, 3.0],
    "folder": "results",
    "num_images": 12,
    "num_latents": 5,
    "batch_size": 8,
}


def check_pictures(folder, *names):
    for name in names:
        assert np.asarray(Image.open(folder / f"{name}.png").convert("L")).std() > 5
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert not list(folder.glob(".*"))


def test_a_run_leaves_the_table_of_errors_with_figure_3_and_its_peaks(validate, shown):
    folder = validate({"EstimatorError": {**CURVE, "resample_source": True}})
    rows = {(row["estimator"], float(row["t"])): row for row in read_rows(folder / "estimator_error.csv")}
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
    check_pictures(folder, "figure3")
    pictures, logged = shown(folder)
    assert pictures == {"estimator/figure3"}
    parts = {f"{error}/{name}" for error in ("mse", "bias_sq", "variance") for name in ESTIMATORS} - {"variance/exact"}
    assert {name for name in logged if "peak" in name} == {f"estimator/peak_score_{part}" for part in parts}
    for part in parts:
        error, name = part.split("/")
        highest = max(float(rows[name, t][f"score_{error}"]) for t in (0.5, 5.0))
        assert logged[f"estimator/peak_score_{part}"] == [pytest.approx(highest, rel=1e-6)]


@pytest.mark.usefixtures("blank_figures")
def test_the_run_measures_with_its_seed_and_with_resampled_sources_where_asked(validate, command, capsys):
    def row(*args, **options):
        own = {"estimators": {"one": {"class_path": "OneSample"}}, "noise_levels": [5.0], "num_z": 30, "repeats": 60}
        (found,) = read_rows(validate({"EstimatorError": {**own, **options}}, *args) / "estimator_error.csv")
        return found

    plain, drawn, other = row(), row(resample_source=True), row("--seed_everything", "1")
    assert plain["mu_mse"] == row()["mu_mse"] != other["mu_mse"]
    assert (plain["repeats"], plain["mu_variance"], drawn["repeats"]) == ("1", "", "60")
    # One image with a drawn source is a draw from the posterior, so it has no bias.
    assert abs(float(drawn["mu_bias_sq_corrected"])) < 0.1 * float(drawn["mu_variance"])
    (earlier, *_) = sorted(Path("runs").rglob("estimator_error.csv"))
    kept = earlier.read_text()
    line = refusal_of(command({"EstimatorError": CURVE}, "--trainer.logger.version", earlier.parent.name), capsys)
    assert "estimator_error.csv exists; nothing is overwritten" in line
    assert earlier.read_text() == kept


@pytest.fixture
def patches(monkeypatch):
    """The (size, number of latents) of each call of a patch estimator."""
    seen, original = [], PatchPosterior.posterior_mean

    def watched(self, z, t, *args, **kwargs):
        seen.append((self.size, len(z)))
        return original(self, z, t, *args, **kwargs)

    monkeypatch.setattr(PatchPosterior, "posterior_mean", watched)
    return seen


def test_an_interrupted_comparison_goes_on_and_its_results_serve_the_next_runs(
    validate, pictures, network, patches, monkeypatch, caplog
):
    args = [*pictures, "--data.held_out", "20", "--model.sampling_steps", "3"]
    networks = {"one": network("one.ckpt")}

    def stop(self, numbers, t, original=NoisyLatents.batch):
        assert t < 1 or self.reference.N in (60, 20)
        return original(self, numbers, t)

    # The first run stops before its last comparison, which is of the generated images at t = 3.
    with monkeypatch.context() as patch:
        patch.setattr(NoisyLatents, "batch", stop)
        with pytest.raises(SystemExit):
            validate({"NetworkAgreement": {**AGREEMENT, "networks": networks}}, *args)
    rows = read_rows(TABLE)
    keys = {(row["estimator"], row["images"], row["t"]) for row in rows}
    expected = set(product(("Patch", "Wiener", "Exact"), ("training", "held_out", "generated"), ("0.3", "3.0")))
    assert keys == {key for key in expected if key[1:] != ("generated", "3.0")}
    patches.clear()
    caplog.set_level("INFO", logger="pytorch_lightning.utilities.rank_zero")
    networks["two"] = network("two.ckpt", seed=1)
    folder = validate({"NetworkAgreement": {**AGREEMENT, "networks": networks}}, *args)
    # Only the check of two equal calls, the missing comparison, and those of the new network: nothing is sampled again.
    assert sum(number for _, number in patches) == 2 + 12 + 12 * 3 * 2
    assert read_rows(TABLE)[: len(rows)] == rows
    assert len(read_rows(TABLE)) == 2 * len(expected)
    assert "nearest" in caplog.text
    assert {row["network"] for row in read_rows(folder / "same_noise.csv")} == {"one", "two"}
    averaged = read_rows(folder / "network_agreement.csv")
    assert {row["num_networks"] for row in averaged if row["images"] != "generated"} == {"2"}
    check_pictures(folder, "network_agreement", "same_noise")
    assert np.asarray(Image.open(folder / "same_noise_one.png").convert("L")).std() > 5
    # Comparisons over another number of images are others.
    for number, count in enumerate((5, 4), start=1):
        change = {"num_images": count, "images": ["training"], "num_latents": 6, "networks": networks}
        validate({"NetworkAgreement": {**AGREEMENT, **change}}, *args)
        assert len(read_rows(TABLE)) == 2 * len(expected) + 2 * 3 * 2 * number


def test_figures_1_and_2_are_saved_and_shown_and_follow_their_options(validate, shown):
    def found(callback, options, *args):
        run = validate({callback: options}, *args)
        names = [name.replace("/", "_") for name in sorted(shown(run)[0])]
        check_pictures(run, *names)
        return {name: (run / f"{name}.png").read_bytes() for name in names}

    lines = [
        found("PosteriorPicture", {"k": k, "z": z, "noise_levels": [0.05]}, "--data", "PointsOnALine")
        for k, z in ((2, 0.1), (6, 0.1), (2, 0.8))
    ]
    assert [list(pictures) for pictures in lines] == [["figure1"]] * 3
    assert len({pictures["figure1"] for pictures in lines}) == 3
    options = {"estimators": {"source": {"class_path": "OneSample"}}, "noise_levels": [0.5, 2.0], "num_images": 2}
    means = [found("MeanPicture", options, "--seed_everything", seed) for seed in ("0", "1")]
    assert [list(pictures) for pictures in means] == [["figure2_0", "figure2_1"]] * 2
    assert len({picture for pictures in means for picture in pictures.values()}) == 4
