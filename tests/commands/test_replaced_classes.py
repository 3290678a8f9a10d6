"""A class of another name on the command line starts from its own defaults, and the rest of the config stays."""

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from lit_knn.commands.cli.arguments import as_dict
from lit_knn.commands.cli.cli import CLI
from lit_knn.commands.cli.make_cli import make_cli
from main import main
from tests.command_lines import DEMO, TINY

pytestmark = pytest.mark.usefixtures("own_folder")

NETS = """
from torch import nn
from lit_knn.estimators import Estimator
from lit_knn.nets import UNet

class Plain(nn.Module):
    def __init__(self, in_channels: int, channels: int = 4) -> None:
        super().__init__()

class Wider(UNet):
    pass

class Own(Estimator):
    def __init__(self, n: int = 30, m: int = 1) -> None:
        self.n = n
    def _posterior_mean(self, z, t, x_source, generator):
        return z
"""


@pytest.fixture
def parsed(tmp_path, monkeypatch):
    """A function that parses options after the demo's, and returns all options."""
    (tmp_path / "mine_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(CLI, "instantiate_classes", lambda self: None)

    def parse(options):
        return as_dict(make_cli(["-c", DEMO, *options.split()], run=False).config)

    yield parse
    sys.modules.pop("mine_nets", None)


def part_of(options, path):
    for name in path.split("."):
        options = options.get("init_args", options)[name]
    return options["init_args"]


PARTS = [
    (
        "--model.net lit_knn.nets.DDPMpp",
        "model.net",
        {"in_channels": 3, "channels": 128, "multipliers": [2, 2, 2], "blocks": 4, "dropout": 0.13},
    ),
    (
        "--model.net DDPMpp --model.net.channels 16 --model.net.in_channels 1",
        "model.net",
        {"in_channels": 1, "channels": 16, "blocks": 4},
    ),
    # The same class, and a class that inherits the options, replace nothing.
    (
        "--model.net UNet --model.net.channels 8",
        "model.net",
        {"in_channels": 1, "channels": 8, "blocks": 1},
    ),
    (
        "--model.net mine_nets.Wider",
        "model.net",
        {"in_channels": 1, "channels": 32, "blocks": 1},
    ),
    (
        "--model.estimator STF",
        "model.estimator",
        {"n": None},
    ),
    ("--model.estimator STF --model.estimator.n 64", "model.estimator", {"n": 64}),
    ("--model.estimator STF --model.estimator.n 32", "model.estimator", {"n": 32}),
    ("--model.estimator estimators/stf.yaml", "model.estimator", {"n": None}),
    (
        "--model.estimator estimators/stf.yaml --model.estimator KNN",
        "model.estimator",
        {"k": None, "n": None},
    ),
    (
        "--model.estimator mine_nets.Own --model.estimator.m 3",
        "model.estimator",
        {"n": 30, "m": 3},
    ),
    # Every data module inherits the sizes of batches; a path is its own.
    ("--data Arrays --data.path x.npy", "data", {"path": "x.npy", "batch_size": 128}),
    (
        "--data.index SubspaceIndex --data.index.r 4 --data.index.compute float32 --data.index TorchIndex",
        "data.index",
        {"compute": "auto"},
    ),
    ("--trainer.logger CSVLogger", "trainer.logger", {"save_dir": "runs", "name": "demo"}),
]


@pytest.mark.parametrize(
    ("options", "path", "expected"), PARTS, ids=[options for options, *_ in PARTS]
)
def test_another_class_starts_from_its_own_defaults(options, path, expected, parsed):
    part = part_of(parsed(options), path)
    assert {name: part[name] for name in expected} == expected


def test_another_model_keeps_its_parts_and_not_its_numbers(parsed):
    model = part_of(parsed("--model LitEDM"), "model")
    assert model["net"]["init_args"]["in_channels"] == 1
    assert model["estimator"]["init_args"] == {"k": 256, "n": 64, "include_source": False}
    assert (model["lr"], model["P_mean"], model["sigma_data"]) == (1e-3, -1.2, 0.5)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (
            "--model.net mine_nets.Plain",
            "--model.net: the following arguments are required: in_channels",
        ),
        (
            "--data Arrays --data.path x.npy --data Prepared",
            "--data: the following arguments are required: path",
        ),
    ],
)
def test_an_option_without_a_default_is_asked_for(options, missing, parsed):
    with pytest.raises(ValueError, match=missing):
        parsed(options)


def test_a_list_of_callbacks_replaces_one_of_its_length(parsed):
    def file_of(name, *callbacks):
        items = [
            {"class_path": f"lit_knn.callbacks.{kind}", "init_args": init_args}
            for kind, init_args in callbacks
        ]
        Path(name).write_text(yaml.safe_dump({"trainer": {"callbacks": items}}))

    file_of(
        "a.yaml", ("SampleGrid", {"num_samples": 4}), ("PixelFrechetDistance", {"num_samples": 33})
    )
    file_of("b.yaml", ("PixelFrechetDistance", {}), ("Memorisation", {}))
    last = "--trainer.callbacks.batch_size 7 --trainer.callbacks.num_pairs 3"
    options = parsed(f"-c a.yaml -c b.yaml {last}")
    distance, memorisation = (callback["init_args"] for callback in options["trainer"]["callbacks"])
    assert (distance["num_samples"], memorisation["num_samples"]) == (5000, 1000)
    assert (memorisation["batch_size"], memorisation["num_pairs"]) == (7, 3)


def test_another_network_trains_on_images_of_colour():
    np.save("colour.npy", np.random.default_rng(0).integers(0, 256, (64, 3, 8, 8), dtype=np.uint8))
    net = [
        "--model.net",
        "lit_knn.nets.DDPMpp",
        "--model.net.channels",
        "8",
        "--model.net.image_size",
        "8",
    ]
    net += ["--model.net.multipliers", "[1, 1]", "--model.net.blocks", "1"]
    main(
        [
            "fit",
            "-c",
            DEMO,
            *TINY[:2],
            *net,
            *TINY[4:],
            "--data",
            "Arrays",
            "--data.path",
            "colour.npy",
        ]
    )
    assert list(Path("runs").rglob("last.ckpt"))
