"""Command lines of `validate` with callbacks; each test works in a folder of its own."""

from pathlib import Path

import pytest
import yaml

from main import main
from tests.networks import write_own

QUICK = [
    "--model",
    "LitEstimator",
    "--trainer.accelerator",
    "cpu",
    "--trainer.enable_progress_bar",
    "false",
]
QUICK += ["--trainer.limit_val_batches", "1", "--trainer.logger", "TensorBoardLogger"]
QUICK += ["--trainer.logger.save_dir", "runs", "-c", "callbacks.yaml"]


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def command():
    """`command(callbacks, *args)`: `validate` with callbacks, {name: options}; on the digits if `args` name no data."""

    def arguments(callbacks, *args):
        listed = [
            {"class_path": f"lit_knn.callbacks.{name}", "init_args": own}
            for name, own in callbacks.items()
        ]
        Path("callbacks.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": listed}}))
        return ["validate", *QUICK, *([] if "--data" in args else ["--data", "Digits"]), *args]

    return arguments


@pytest.fixture
def validate(command):
    """`validate(callbacks, *args)` runs that command, and returns the run's folder."""

    def run(callbacks, *args):
        before = set(Path("runs").rglob("events*"))
        main(command(callbacks, *args))
        (events,) = set(Path("runs").rglob("events*")) - before
        return events.parent

    return run


@pytest.fixture
def network():
    """`network("one.ckpt")` writes an untrained network for the digits, and returns the recipe of its estimator."""

    def recipe(path):
        write_own(path)
        net = {"in_channels": 1, "channels": 8, "multipliers": [1, 2], "blocks": 1}
        net = {"class_path": "lit_knn.nets.UNet", "init_args": net}
        return {"class_path": "Network", "init_args": {"path": path, "net": net}}

    return recipe
