"""`main.py export` writes weights, configuration and a model card that tells no path of the machine."""

import json
import os
import re

import pytest
import torch
import yaml

import lit_knn
from lit_knn.commands.model_card import without_paths
from lit_knn.common.tables import write_rows
from main import main
from tests.command_lines import refusal_of
from tests.networks import write_published
from tests.trained_runs import last, leave_run

FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A conditional run with measurements, resumed from another one, whose data and logs have absolute paths."""
    cached = "--data.index", "FaissIndex", "--data.index.cache_dir", "/var/secret/cache"
    folder, _ = leave_run(tmp_path_factory.mktemp("runs"), "ict_classes", *cached)
    write_rows(folder / "fidelity.csv", [{"step": 1, "images_seen": 32, "num_samples": 9, "fd_pixels": 1.25}])
    write_rows(
        folder / "checkpoints_fid.csv",
        [{"images_seen": 16, "fid": 5.5, "checkpoint": "/x/a"}, {"images_seen": 64, "fid": 2.0, "checkpoint": "/x/b"}],
    )
    return folder


def exported(run, folder):
    main(["export", str(run), str(folder)])
    card = (folder / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text, json.loads((folder / "config.json").read_text())


def cells(text):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_the_folder_holds_weights_configuration_and_card(run, tmp_path, capsys, monkeypatch):
    front, text, config = exported(run, tmp_path / "digits")
    printed = capsys.readouterr().out
    assert "ConsistencyModel(UNet, 1x8x8 images, 10 classes" in printed
    assert f"Written: {tmp_path / 'digits'}" in printed
    assert sorted(os.listdir(tmp_path / "digits")) == FILES
    assert len({(tmp_path / "digits" / name).stat().st_mode for name in FILES}) == 1
    assert front["library_name"] == "lit_knn"
    assert "consistency-model" in front["tags"]
    assert "license" not in front
    assert front["pipeline_tag"] == "unconditional-image-generation"
    model = lit_knn.load(tmp_path / "digits")
    assert config["model"] == model.description()
    assert config["library_name"] == "lit_knn"

    # The example of the card works as it stands.
    (snippet,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert len([line for line in snippet.splitlines() if line]) == 3
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert torch.equal(names["images"], model.sample(range(16)))
    assert f"({', '.join(map(str, names['images'].shape))})" in snippet


def test_the_card_tells_of_network_training_data_and_metrics(run, tmp_path):
    _, text, config = exported(run, tmp_path / "digits")
    told = cells(text)
    assert told["class"] == ["UNet"]
    assert told["sampling_sigmas"] == ["[80.0, 0.821]"]
    assert told["trained by"] == ["lit_knn.modules.LitICT"]
    assert told["target estimated by"] == ["lit_knn.estimators.KNN"]
    assert told["optimiser steps"] == ["1"]
    assert told["images seen"] == ["32"]
    checkpoint = torch.load(last(run), weights_only=True)
    assert told["hardware"] == list(checkpoint["training_time"]["hardware"])
    assert float(told["time"][0].split()[0]) == pytest.approx(checkpoint["training_time"]["seconds"] / 3600, rel=0.01)
    assert told["data: images"] == ["1797"]
    assert told["data: hash"] == [checkpoint["run"]["data"]]
    assert told["data: class"] == ["Digits"]
    assert told["data: fingerprint"][0].startswith(checkpoint["run"]["data"])
    assert told["torch"] == [torch.__version__.partition("+")[0]]
    # The last values up to these weights: the distance at 64 images is of later ones.
    assert told["Fréchet distance on pixels"] == ["1.25", "32"]
    assert told["FID"] == ["5.5", "16"]
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    written, settings = yaml.safe_load(block), yaml.safe_load((run / "config.yaml").read_text())
    assert written["model"] == settings["model"]
    assert written["seed_everything"] == 0
    assert written["trainer"]["max_steps"] == 1
    assert config["training"]["config"] == written


def test_no_path_of_the_machine_is_told(run, tmp_path):
    _, text, _ = exported(run, tmp_path / "digits")
    everything = "".join((tmp_path / "digits" / name).read_bytes().decode(errors="replace") for name in FILES)
    for told in ("secret", "/home", "/tmp", str(run.parent), str(tmp_path), os.getcwd()):
        assert told not in everything
    assert "cache_dir: cache" in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/home/me/data/cifar.zip", "cifar.zip"),
        ("~/data/", "data"),
        ("runs/demo/knn_0", "runs/demo/knn_0"),
        ("../data/cifar.zip", "../data/cifar.zip"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ({"a": ["/c/d", 3, None, {"b": "/e"}]}, {"a": ["d", 3, None, {"b": "e"}]}),
    ],
)
def test_absolute_paths_become_names(value, expected):
    assert without_paths(value) == expected


def test_a_checkpoint_without_its_run_is_exported_too(run, tmp_path):
    alone = tmp_path / "alone" / "weights.ckpt"
    alone.parent.mkdir()
    alone.write_bytes(last(run).read_bytes())
    _, text, _ = exported(alone, tmp_path / "digits")
    told = cells(text)
    assert told["images seen"] == ["32"]
    assert told["trained by"] == ["-"]
    assert "None was measured" in text
    assert "## Configuration" not in text
    assert torch.equal(lit_knn.load(tmp_path / "digits").sample([1]), lit_knn.load(run).sample([1]))


def test_nothing_is_overwritten_and_nothing_else_is_exported(run, tmp_path, capsys):
    (tmp_path / "README.md").write_text("mine")
    line = refusal_of(["export", str(run), str(tmp_path)], capsys)
    assert line == f"error: export: {tmp_path}/README.md is there already; nothing is overwritten, use another folder"
    assert os.listdir(tmp_path) == ["README.md"]
    pickled = write_published(tmp_path / "edm.pkl")
    line = refusal_of(["export", str(pickled), str(tmp_path / "new")], capsys)
    assert line.endswith("edm.pkl must be the folder of a training run or a checkpoint (.ckpt)")
    line = refusal_of(["export", str(tmp_path), str(tmp_path / "new")], capsys)
    assert "has neither checkpoints/last.ckpt nor a kept checkpoint" in line
    assert not (tmp_path / "new").exists()
