"""Runs that compare estimators: Figure 3."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_knn.common.tables import read_rows
from tests.command_lines import refusal_of
from tests.trained_runs import events_of

ESTIMATORS = {
    "KNN": {"class_path": "KNN", "init_args": {"k": 32, "n": 8}},
    "STF": {"class_path": "STF", "init_args": {"n": 8}},
    "exact": {"class_path": "Exact"},
}
CURVE = {
    "estimators": ESTIMATORS,
    "noise_levels": [0.5, 5.0],
    "num_z": 20,
    "repeats": 3,
    "batch_size": 8,
}


def test_figure_3_run_leaves_table_of_errors_and_peaks(validate):
    folder = validate({"EstimatorError": {**CURVE, "resample_source": True}})
    rows = {
        (row["estimator"], float(row["t"])): row
        for row in read_rows(folder / "estimator_error.csv")
    }
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
    assert float(stf["bias_share"]) == pytest.approx(
        float(stf["mu_bias_sq_corrected"]) / float(stf["mu_mse"])
    )
    assert 0 < float(stf["bias_share_se"]) < 1
    assert np.asarray(Image.open(folder / "figure3.png").convert("L")).std() > 5
    assert (folder / "figure3.pdf").read_bytes().startswith(b"%PDF")
    events, logged = events_of(folder)
    assert events.Tags()["images"] == ["estimator/figure3"]
    parts = {
        f"{error}/{name}" for error in ("mse", "bias_sq", "variance") for name in ESTIMATORS
    } - {"variance/exact"}
    assert {name for name in logged if "peak" in name} == {
        f"estimator/peak_score_{part}" for part in parts
    }
    for part in parts:
        error, name = part.split("/")
        highest = max(float(rows[name, t][f"score_{error}"]) for t in (0.5, 5.0))
        assert logged[f"estimator/peak_score_{part}"] == [pytest.approx(highest, rel=1e-6)]


@pytest.mark.usefixtures("blank_figures")
def test_figure_3_uses_run_seed_and_resamples_sources_on_request(validate, command, capsys):
    def row(*args, **options):
        own = {
            "estimators": {"one": {"class_path": "OneSample"}},
            "noise_levels": [5.0],
            "num_z": 30,
            "repeats": 60,
        }
        (found,) = read_rows(
            validate({"EstimatorError": {**own, **options}}, *args) / "estimator_error.csv"
        )
        return found

    plain, drawn, other = row(), row(resample_source=True), row("--seed_everything", "1")
    assert plain["mu_mse"] == row()["mu_mse"] != other["mu_mse"]
    assert (plain["repeats"], plain["mu_variance"], drawn["repeats"]) == ("1", "", "60")
    (earlier, *_) = sorted(Path("runs").rglob("estimator_error.csv"))
    kept = earlier.read_text()
    line = refusal_of(
        command({"EstimatorError": CURVE}, "--trainer.logger.version", earlier.parent.name), capsys
    )
    assert "estimator_error.csv exists; nothing is overwritten" in line
    assert earlier.read_text() == kept


def test_errors_at_latents_of_own_sampling_have_rows_and_picture(validate):
    folder = validate({"EstimatorError": {**CURVE, "trajectories": True}})
    forward = read_rows(folder / "estimator_error.csv")
    rows = read_rows(folder / "sampler_error.csv")
    assert [(row["estimator"], row["t"]) for row in rows] == [
        (name, t) for t in ("5.0", "0.5") for name in ESTIMATORS
    ]
    assert rows[0].keys() == forward[0].keys()
    errors = {(row["estimator"], row["t"]): float(row["mu_mse"]) for row in rows}
    assert errors["exact", "5.0"] < 1e-9
    assert errors["STF", "5.0"] > 1e-4
    picture = np.asarray(Image.open(folder / "sampler_error.png").convert("L"))
    assert picture.std() > 5


@pytest.mark.usefixtures("blank_figures")
def test_estimator_that_needs_a_source_cannot_sample(command, capsys):
    one = {"estimators": {"one": {"class_path": "OneSample"}}, "trajectories": True}
    line = refusal_of(command({"EstimatorError": {**CURVE, **one}}), capsys)
    assert "trajectories: estimators.one cannot be used" in line
    assert "OneSample needs x_source" in line


def test_each_picture_is_of_its_own_image_or_of_the_given_z(validate):
    means = {"estimators": {"exact": ESTIMATORS["exact"]}, "noise_levels": [0.5], "num_images": 2}
    folder = validate({"MeanPicture": means})
    files = [folder / f"figure2_{i}.png" for i in range(2)]
    line = ("--data", "PointsOnALine")
    files += [validate({"PosteriorPicture": {"z": z}}, *line) / "figure1.png" for z in (0.1, 0.6)]
    first, second, near, far = (np.asarray(Image.open(file)) for file in files)
    assert not np.array_equal(first, second)
    assert not np.array_equal(near, far)
