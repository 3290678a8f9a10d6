"""Loggers get a run's pictures and options: TensorBoard, W&B and MLflow by the files that they write."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from main import main
from tests.command_lines import DEMO, ROOT, TINY


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


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_tensorboard_compares_estimators():
    told = {}
    for name, options in {"OneSample": [], "KNN": ["--model.estimator.k", "32", "--model.estimator.n", "8"]}.items():
        options += ["--model.net.channels", "8", "--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
        options += ["--data.index", "FaissIndex"]
        tiny = ["fit", "-c", DEMO, "-c", str(ROOT / "tests" / "tiny.yaml"), "--model.estimator", name]
        main([*tiny, *options, "--trainer.logger.name", name])
        told[name], events = session_of(Path("runs") / name)
        # The tab reads the results of these scalars.
        assert {"samples/fd_pixels", "val/loss"} <= set(events.Tags()["scalars"])
        assert "hp_metric" not in events.Tags()["scalars"]
        assert (told[name]["estimator"], told[name]["net"]) == (name, "UNet")
    expected = {"estimator.k": 32, "estimator.n": 8, "net.channels": 8, "data": "Digits", "data.batch_size": 32}
    expected |= {"data.index": "FaissIndex", "data.index.factory": "Flat", "lr": 3e-3, "max_steps": 1}
    expected |= {"model": "LitICT", "seed": 0, "solver": "heun_step"}
    assert {name: told["KNN"][name] for name in expected} == expected


def test_the_loggers_of_the_documentation_together_get_pictures_and_options(monkeypatch):
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    section = (ROOT / "docs" / "command_line.md").read_text().split("## Loggers")[1].split("\n## ")[0]
    (snippet,) = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    Path("loggers.yaml").write_text(snippet)
    main(["fit", "-c", DEMO, *TINY, "--trainer.val_check_interval", "1", "-c", "loggers.yaml"])
    run = Path("runs/mine/knn_0")
    grid = picture(next(run.rglob("step_0000001_1-step.png")))
    for store in (Path("mlflow"), next(Path().rglob("offline-run-*"))):
        assert any(np.array_equal(grid, picture(path)) for path in store.rglob("*.png"))
    told, events = session_of(run)
    assert told["estimator"] == "KNN"
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
