"""LitEstimator: an estimator replaces the trained model."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from main import main
from tests.command_lines import refusal_of

RUN = ["--data", "Digits", "--data.batch_size", "32", "--model", "LitEstimator", "--trainer.accelerator", "cpu"]
RUN += ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs"]
KNN = ["--model.estimator", "KNN"]


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_predict_with_the_exact_score_returns_images_of_the_reference_set(capsys):
    # Neither command needs a checkpoint.
    main(["validate", *RUN])
    assert "error" not in capsys.readouterr().err
    # The exact score's flow ends in training images, so memorisation is the right result.
    exact = ["--model.estimator", "Exact", "--model.sampling_steps", "40", "--data.predict_samples", "40"]
    main(["predict", *RUN, *exact, "--sample_writer.format", "npz", "--sample_writer.folder", "out"])
    samples = np.load("out/samples.npz")["images"].reshape(40, 64).astype(int)
    digits = np.rint(load_digits().data * (255 / 16)).astype(int)
    distance = np.abs(samples[:, None] - digits[None]).max(2).min(1)
    assert (distance <= 2).mean() > 0.9


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("fit", [], "has nothing to train"),
        ("predict", [], "estimator is null"),
        ("validate", ["--model.sigma_min", "90"], "sigma_min < sigma_max, got 90.0 and 80.0"),
        ("validate", [*KNN, "--model.estimator.k", "2048"], "k=2048 is more than the 1797 images"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(command, options, message, capsys):
    assert message in refusal_of([command, *RUN, *options], capsys)
