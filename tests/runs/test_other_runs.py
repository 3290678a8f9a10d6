"""Runs of LitECT and LitFlow by command lines, and what loggers get of a run, by the files that they write."""

import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from lit_knn.common.tables import read_rows
from main import main
from tests.command_lines import DEMO, ROOT, TINY, refusal_of
from tests.trained_runs import last

TABLE = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs"]


pytestmark = pytest.mark.usefixtures("own_folder")


def test_a_tuned_model_goes_on_and_samples_without_the_file_it_started_from(trained_run, capsys):
    run, options = trained_run("ect")
    checkpoint = shutil.copy(last(run), "kept.ckpt")
    alone = [*options, *TABLE, "--model.start", "null", "--ckpt_path", str(checkpoint)]
    main(["fit", *alone, "--trainer.max_steps", "6"])
    (resumed,) = Path("runs").rglob("last.ckpt")
    assert torch.load(resumed, weights_only=True)["global_step"] == 6
    main(["validate", *alone])
    measured = [path for path in Path("runs").rglob("metrics.csv") if "fd_pixels" in path.read_text()]
    assert len(measured) == 2
    writer = ["--sample_writer.folder", "samples", "--sample_writer.format", "npz", "--data.predict_samples", "3"]
    main(["predict", *alone, *writer, "--model.predict_steps", "2"])
    assert np.load("samples/samples.npz")["images"].shape == (3, 8, 8, 1)
    capsys.readouterr()
    for start, said in (
        ("gone.ckpt", "gone.ckpt: no such file"),
        ("null", "null has no trained network: give a start"),
    ):
        assert f"error: LitECT: start={said}" in refusal_of(["fit", *options, "--model.start", start], capsys)


def test_a_flow_trains_in_bf16_measures_and_samples(trained_run):
    options = [*trained_run("flow")[1], *TABLE, "--model.sampling_steps", "3", "--trainer.max_steps", "2"]
    callbacks = ["--trainer.callbacks+", "lit_knn.callbacks.Memorisation", "--trainer.callbacks.num_samples", "70"]
    callbacks += ["--trainer.callbacks+", "lit_knn.callbacks.NetworkSpeed", "--trainer.callbacks.compile", "false"]
    main(["fit", *options, *callbacks, "--trainer.precision", "bf16-mixed"])
    (log,) = Path("runs").rglob("metrics.csv")
    names = {name for row in read_rows(log) for name, value in row.items() if value}
    assert {"samples/fd_pixels", "samples/copied_fraction", "val/loss", "val/target_mse", "train/augmented"} <= names
    assert any(name.startswith("train/loss_t_0.25_to_0.5") for name in names)
    (path,) = Path("runs").rglob("last.ckpt")
    main(["predict", *options, "--ckpt_path", str(path), "--data.predict_samples", "3"])
    assert len(list(Path("runs").rglob("00*.png"))) == 3


# Loggers


def picture(file):
    return np.asarray(Image.open(file).convert("RGB"))


def session_of(folder):
    """The options in TensorBoard's tab HPARAMS, and the run's events."""
    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    told = {}
    for tag, metadata in events.summary_metadata.items():
        if metadata.plugin_data.plugin_name == "hparams":
            told[tag] = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
    # With a description of all runs alike, the tab would not show first the options in which they differ.
    assert set(told) == {"_hparams_/session_start_info", "_hparams_/session_end_info"}
    start = told["_hparams_/session_start_info"].session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in start.items()}, events


def test_the_loggers_of_the_documentation_together_get_pictures_and_options(monkeypatch):
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    section = (ROOT / "docs" / "command_line.md").read_text().split("## Loggers")[1].split("\n## ")[0]
    (snippet,) = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    Path("loggers.yaml").write_text(snippet)
    more = ["--trainer.val_check_interval", "1", "--trainer.accumulate_grad_batches", "2"]
    more += ["--data.index", "FaissIndex", "--trainer.precision", "bf16-mixed"]
    main(["fit", "-c", DEMO, *TINY, *more, "-c", "loggers.yaml"])
    run = Path("runs/mine/knn_0")
    grid = picture(next(run.rglob("step_0000001_1-step.png")))
    for store in (Path("mlflow"), next(Path().rglob("offline-run-*"))):
        assert any(np.array_equal(grid, picture(path)) for path in store.rglob("*.png"))
    # TensorBoard compares runs by their options and by the results in these scalars.
    told, events = session_of(run)
    assert {"samples/fd_pixels", "val/loss"} <= set(events.Tags()["scalars"])
    assert "hp_metric" not in events.Tags()["scalars"]
    expected = {"estimator": "KNN", "estimator.k": 32, "estimator.n": 8, "net": "UNet", "net.channels": 8}
    expected |= {"data": "Digits", "data.batch_size": 32, "data.index": "FaissIndex", "data.index.factory": "Flat"}
    expected |= {"model": "LitICT", "seed": 0, "solver": "heun_step", "lr": 3e-3}
    expected |= {"max_steps": 1, "precision": "bf16-mixed", "accumulate_grad_batches": 2}
    assert {name: told.get(name) for name in expected} == expected
    tag = next(tag for tag in events.Tags()["images"] if "grid" in tag or "sampl" in tag)
    Path("shown.png").write_bytes(events.Images(tag)[0].encoded_image_string)
    assert np.array_equal(picture("shown.png"), grid)
    assert (run / "metrics.csv").exists()
    wandb.finish()
    (log,) = Path().rglob("run-*.wandb")
    for _ in range(100):  # W&B writes the file in a process of its own.
        if b"estimator.k" in log.read_bytes():
            break
        time.sleep(0.2)
    assert b"estimator.k" in log.read_bytes()
