"""Runs of one's own photos: the network gets channels, levels and classes from the data, and the run records them."""

import sys
from pathlib import Path

import pytest
import torch
import yaml

import lit_knn
from lit_knn.commands.cli.arguments import as_dict
from lit_knn.commands.cli.cli import CLI
from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.common.tables import read_rows
from lit_knn.data.files import say
from main import main
from tests.command_lines import refusal_of
from tests.image_files import encoded, labels_json, pixels, write_folder

TINY = "--trainer.accelerator cpu --trainer.devices 1 --trainer.enable_progress_bar false --model.net.channels 8"
TINY += " --data.batch_size 4 --data.val_images 4 --samples 4"


@pytest.fixture(autouse=True)
def _own_folder(own_folder):
    say.cache_clear()  # A line about the data is printed once in a process.


def write_photos(path, *size):
    """Write six photos of each of two classes into the folders of the classes."""
    names = [f"{name}/{i}.png" for name in ("cat", "dog") for i in range(6)]
    return write_folder(Path(path), {name: encoded(pixels(*size)) for name in names})


def fit(run, *args, steps=2):
    every = ["--trainer.max_steps", str(steps), "--trainer.val_check_interval", str(steps)]
    main(["fit", "-c", f"photos/{run}", *TINY.split(), *every, *args])


def net_of(run):
    options = yaml.safe_load((Path(run) / "config.yaml").read_text())
    return options["model"]["init_args"]["net"]["init_args"]


def test_gray_folder_gives_network_and_run_resumes_and_exports(capsys):
    write_photos("photos", 20, 28)
    fit("edm", "--data.path", "photos")
    taken = "the network gets in_channels=1, num_classes=0, multipliers=[1, 2, 4]"
    assert f"photos: 1 channel, 28x20; {taken}" in capsys.readouterr().err
    run = Path("runs/photos_edm/one_sample_0")
    net = net_of(run)
    assert (net["in_channels"], net["num_classes"], net["multipliers"]) == (1, 0, [1, 2, 4])
    assert list(run.glob("samples/step_0000002_*.png"))
    assert read_rows(run / "fidelity.csv")[0]["num_samples"] == "4"
    assert list(run.glob("checkpoints/best_fd_efficientnet_lite0*.ckpt"))

    fit("edm", "--data.path", "photos", "--ckpt_path", "last", steps=3)
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3
    # The settings of the run are enough to sample from it.
    main(
        [
            "predict",
            "-c",
            str(run / "config.yaml"),
            "--ckpt_path",
            "last",
            "--data.predict_samples",
            "2",
        ]
    )
    main(["export", str(run), "mine"])
    assert lit_knn.load("mine").sample(seeds=range(2), num_steps=2).shape == (2, 1, 20, 28)


@pytest.mark.parametrize("run", [pytest.param("flow", marks=pytest.mark.slow), "ict", "meanflow"])
def test_a_run_takes_the_classes_of_prepared_color_images(run, capsys):
    write_photos("mine", 40, 32, 3)
    prepare = ["prepare", "mine", "photos.npy", "--size", "32", "--center-crop", "--rgb"]
    main([*prepare, "--labels-from-folders"])
    fit(
        run,
        "--data.path",
        "photos.npy",
        "--model.class_conditional",
        "true",
        "--model.sampling_class",
        "dog",
    )
    said = "photos.npy: 3 channels, 32x32, 2 classes; the network gets in_channels=3, num_classes=2"
    assert said in capsys.readouterr().err
    net = net_of(f"runs/photos_{run}/one_sample_0")
    assert (net["in_channels"], net["num_classes"], net["multipliers"]) == (3, 2, [1, 2, 4])


# Parsing alone


@pytest.fixture
def parsed(monkeypatch):
    """A function that parses options after those of photos/edm, and returns the options of the network."""
    monkeypatch.setattr(CLI, "instantiate_classes", lambda self: None)

    def parse(*args):
        config = make_cli(["-c", "photos/edm", *args], run=False).config
        return as_dict(config)["model"]["init_args"]["net"]["init_args"]

    return parse


@pytest.mark.parametrize(
    ("sides", "multipliers"),
    [
        ((8, 8), [1, 2]),
        ((20, 20), [1, 2]),
        ((33, 24), [1, 2, 4]),
        ((36, 36), [1, 2, 4]),
        ((64, 64), [1, 2, 4, 4]),
        ((64, 128), [1, 2, 4, 4, 4]),
    ],
)
def test_levels_halve_the_longer_side_to_about_8(sides, multipliers, parsed):
    write_photos("photos", *sides)
    assert parsed("--data.path", "photos")["multipliers"] == multipliers


def test_numbers_that_are_given_stay(parsed):
    write_photos("photos", 16, 16)
    net = parsed(
        "--data.path", "photos", "--model.net.multipliers", "[1, 3]", "--model.net.num_classes", "5"
    )
    assert (net["in_channels"], net["multipliers"], net["num_classes"]) == (1, [1, 3], 5)


def test_other_network_takes_channels_and_null_size_from_data(parsed):
    write_photos("photos", 16, 16)
    net = parsed("--data.path", "photos", "--model.net", "DDPMpp", "--model.net.image_size", "null")
    assert (net["in_channels"], net["image_size"], net["multipliers"]) == (1, 16, [2, 2, 2])


def test_user_network_takes_what_it_allows_to_be_null(parsed, tmp_path, monkeypatch):
    options = "in_channels: int | None, num_classes: int | None = 3, width: int = 4"
    lines = [
        "from torch import nn",
        "class Net(nn.Module):",
        f"    def __init__(self, {options}): ...",
    ]
    Path("mine_of_photos.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    write_photos("photos", 16, 16)
    net = parsed("--data.path", "photos", "--model.net", "mine_of_photos.Net")
    assert net == {"in_channels": 1, "num_classes": 0, "width": 4}
    sys.modules.pop("mine_of_photos")


def test_null_stays_if_it_is_a_networks_word_for_no_classes(parsed, tmp_path, monkeypatch):
    lines = [
        "from torch import nn",
        "class Net(nn.Module):",
        "    def __init__(self, width: int = 4, num_classes=None): ...",
    ]
    Path("like_adm.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    write_photos("photos", 16, 16)
    given = ["--data.path", "photos", "--model.net", "like_adm.Net"]
    assert parsed(*given) == {"num_classes": None, "width": 4}
    classes = ["--data", "Digits", *given[2:], "--model.class_conditional", "true"]
    assert parsed(*classes)["num_classes"] == 10
    sys.modules.pop("like_adm")


def test_labels_are_not_read_without_need(parsed, capsys):
    write_folder(write_photos("photos", 16, 16), {"dataset.json": b"no JSON"})
    assert parsed("--data.path", "photos")["num_classes"] == 0
    assert "dataset.json" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "classes"),
    [
        (["Digits"], 10),
        (["ImageFiles", "--data.path", "photos"], 3),
        (["lit_knn.data.Images", "--data.path", "photos", "--data.labels_from_folders", "true"], 2),
    ],
    ids=lambda value: str(value),
)
def test_the_classes_of_any_data_are_counted(data, classes, parsed):
    names = [f"{name}/{i}.png" for name in ("cat", "dog") for i in range(6)]
    listed = labels_json([[name, i % 3] for i, name in enumerate(names)])
    write_folder(write_photos("photos", 16, 16), listed)
    assert parsed("--data", *data, "--model.class_conditional", "true")["num_classes"] == classes


COUNTED_DATA = """
import numpy as np
from lit_knn.data import ReferenceDataModule

class Counted(ReferenceDataModule):
    loads = 0

    def load(self):
        Counted.loads += 1
        return np.zeros((6, 3, 16, 16), np.uint8), np.arange(6) % 2
"""


def test_data_of_unknown_shape_are_loaded_once(parsed, monkeypatch, tmp_path):
    Path("mine_counted.py").write_text(COUNTED_DATA)
    monkeypatch.syspath_prepend(tmp_path)
    net = parsed("--data", "mine_counted.Counted", "--model.class_conditional", "true")
    assert (net["in_channels"], net["num_classes"], net["multipliers"]) == (3, 2, [1, 2])
    assert sys.modules.pop("mine_counted").Counted.loads == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "--data.path photos --model.class_conditional true",
            "photos has no labels: list them in dataset.json, or",
        ),
        (
            "--data.path gray.npy --model.class_conditional true",
            "gray.npy has no labels: prepare it with",
        ),
        (
            "--data.path gray.npy --data.labels_from_folders true",
            "give --labels-from-folders to lit-knn prepare",
        ),
        ("--data.path absent", "data.path=absent: absent does not exist"),
        ("--data.path other.npy", "data.path=other.npy: other.npy does not exist"),
        (
            "--data PointsOnALine",
            "in_channels, num_classes, multipliers can be taken from images alone",
        ),
        (
            "--data.path photos --model.net DDPMpp --model.net.image_size null",
            "DDPMpp: image_size must be a multiple of 4 with 3 multipliers, got 33",
        ),
    ],
)
def test_data_without_needed_numbers_are_refused_in_one_line(options, words, capsys):
    write_photos("photos", 33, 33)
    main(["prepare", "photos", "gray.npy"])
    capsys.readouterr()
    say("photos: 1 channel, 33x33; the network gets in_channels=1, image_size=33, num_classes=0")
    capsys.readouterr()
    assert words in refusal_of(
        ["fit", "-c", "photos/edm", *options.split(), "--trainer.accelerator", "cpu"], capsys
    )
