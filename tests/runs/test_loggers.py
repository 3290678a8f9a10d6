"""Loggers get a run's pictures and options: TensorBoard, W&B and MLflow by the files that they write."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from main import main
from tests.command_lines import DEMO, ROOT, TINY

OPTIONS = ["fit", "-c", DEMO, *TINY, "--trainer.val_check_interval", "1"]


def write_config(path, *loggers):
    """Write the config of the page about loggers, with these loggers alone."""
    text = (ROOT / "docs" / "command_line.md").read_text()
    section = text.split("## Loggers")[1].split("\n## ")[0]
    (snippet,) = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    listed = {each["class_path"].rpartition(".")[2]: each for each in yaml.safe_load(snippet)["trainer"]["logger"]}
    Path(path).write_text(yaml.safe_dump({"trainer": {"logger": [listed[name] for name in loggers]}}))


def fit(*args):
    """Train for one step; return the grid of samples that the run's folder has."""
    main([*OPTIONS, *args])
    grid = next(Path().rglob("step_0000001_1-step.png"))
    return np.asarray(Image.open(grid).convert("RGB"))


def pixels_in(folder):
    return [np.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.rglob("*.png"))]


def session_of(folder):
    """The options in TensorBoard's tab HPARAMS, and the run's events."""
    events = EventAccumulator(str(folder))
    events.Reload()
    told = {}
    for tag, metadata in events.summary_metadata.items():
        if metadata.plugin_data.plugin_name == "hparams":
            told[tag] = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
    # With a description of all runs alike, the tab would not show first the options in which they differ.
    assert set(told) == {"_hparams_/session_start_info", "_hparams_/session_end_info"}
    start = told["_hparams_/session_start_info"].session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in start.items()}, events


def one_run(folder):
    (events,) = folder.rglob("events.out.tfevents.*")
    return events.parent


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_tensorboard_compares_estimators():
    told = {}
    for name, options in {"one_sample": [], "stf": ["--model.estimator.n", "8"], "knn": TINY[-6:-2]}.items():
        estimator = ["--model.estimator", str(ROOT / "configs" / "estimators" / f"{name}.yaml"), *options]
        short = [*OPTIONS[:5], "--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
        main([*short, "--model.net.channels", "8", *estimator, "--trainer.logger.name", name])
        told[name], events = session_of(one_run(Path("runs") / name))
        # The tab reads the results of these scalars.
        assert {"samples/fd_pixels", "val/loss"} <= set(events.Tags()["scalars"])
        assert "hp_metric" not in events.Tags()["scalars"]
    assert [told[name]["estimator"] for name in told] == ["OneSample", "STF", "KNN"]
    assert {told[name]["net"] for name in told} == {"UNet"}
    assert (told["knn"]["estimator.k"], told["knn"]["estimator.n"], told["stf"]["estimator.n"]) == (32, 8, 8)
    expected = {"net.channels": 8, "data": "Digits", "data.batch_size": 32, "data.index": "FaissIndex", "lr": 3e-3}
    expected |= {"model": "LitICT", "seed": 0, "solver": "heun_step", "data.index.factory": "Flat", "max_steps": 1}
    assert {name: told["knn"][name] for name in expected} == expected


def test_wandb_gets_pictures_and_options(monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_config("wandb.yaml", "WandbLogger")
    grid = fit("-c", "wandb.yaml")
    assert any(np.array_equal(grid, got) for got in pixels_in(next(Path().rglob("offline-run-*"))))
    wandb.finish()
    (log,) = Path().rglob("run-*.wandb")
    for _ in range(100):  # W&B writes the file in a process of its own.
        if b"estimator.k" in log.read_bytes():
            break
        time.sleep(0.2)
    assert b"estimator.k" in log.read_bytes()


def test_mlflow_csv_and_tensorboard_together_get_pictures_and_options(monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    write_config("several.yaml", "TensorBoardLogger", "CSVLogger", "MLFlowLogger")
    grid = fit("-c", "several.yaml")
    store = Path("mlflow")
    assert any(np.array_equal(grid, got) for got in pixels_in(store))
    told, events = session_of(one_run(Path("runs")))
    assert told["estimator"] == "KNN"
    (tag,) = [tag for tag in events.Tags()["images"] if "grid" in tag or "sampl" in tag][:1]
    shown = Path("shown.png")
    shown.write_bytes(events.Images(tag)[0].encoded_image_string)
    assert np.array_equal(np.asarray(Image.open(shown).convert("RGB")), grid)
    assert list(Path("runs").rglob("metrics.csv"))
