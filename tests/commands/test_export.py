"""`lit-knn export` writes weights, configuration and a model card that tells no path of the machine."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import lit_knn
from lit_knn.commands.training_facts import without_paths
from lit_knn.common.tables import write_rows
from main import main
from tests.command_lines import ROOT, refusal_of
from tests.interrupted_runs import file_size_limit
from tests.networks import write_published
from tests.trained_runs import last, leave_run

FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A conditional run with measurements, whose data and logs have absolute paths."""
    cached = "--data.index", "FaissIndex", "--data.index.cache_dir", "/var/secret/cache"
    folder, _ = leave_run(tmp_path_factory.mktemp("runs"), "ict_classes", *cached)
    measured = [
        {"step": i, "images_seen": 16 * i, "num_samples": 9, "fd_pixels": 2.5 / i} for i in (1, 2)
    ]
    write_rows(folder / "fidelity.csv", measured)
    fids = [
        {"images_seen": seen, "fid": fid, "checkpoint": "/x/a"}
        for seen, fid in ((16, 5.5), (64, 2.0))
    ]
    write_rows(folder / "checkpoints_fid.csv", fids)
    return folder


def exported(run, folder):
    main(["export", str(run), str(folder)])
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text, json.loads((folder / "config.json").read_text())


def sections(text):
    """The values of each section in YAML, by its title."""
    found = re.findall(r"^## (\w+)\n\n```yaml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return {title: yaml.safe_load(block) for title, block in found}


def cells(text):
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows}


def test_the_folder_holds_weights_configuration_and_card(run, tmp_path, capsys, monkeypatch):
    front, text, config = exported(run, tmp_path / "digits")
    printed = capsys.readouterr().out
    assert "ConsistencyModel(UNet, 1x8x8 images, 10 classes" in printed
    assert f"Exported: {tmp_path / 'digits'}" in printed
    assert sorted(os.listdir(tmp_path / "digits")) == FILES
    assert len({(tmp_path / "digits" / name).stat().st_mode for name in FILES}) == 1
    assert front["library_name"] == config["library_name"] == "lit_knn"
    assert "consistency-model" in front["tags"]
    assert "license" not in front
    assert "class-conditional" in front["tags"]
    assert "pipeline_tag" not in front  # The Hub has none of images of a class.
    assert "The model is class-conditional: `class_label` chooses one of 10 classes;" in text
    model = lit_knn.load(tmp_path / "digits")
    assert config["model"] == model.description()
    # The example of the card works as it stands.
    (snippet,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert torch.equal(names["samples"], model.sample(range(16)))
    assert f"({', '.join(map(str, names['samples'].shape))})" in snippet
    # No path of the machine is told.
    everything = "".join(
        (tmp_path / "digits" / name).read_bytes().decode(errors="replace") for name in FILES
    )
    for told in ("secret", "/home", "/tmp", str(run.parent), str(tmp_path), os.getcwd()):
        assert told not in everything
    assert "cache_dir: cache" in text
    paths = [
        "/home/me/cifar.zip",
        "~/data/",
        "runs/demo",
        "../data/a.zip",
        "https://a.org/b",
        {"a": ["/c/d", 3, None]},
    ]
    names = [
        "cifar.zip",
        "data",
        "runs/demo",
        "../data/a.zip",
        "https://a.org/b",
        {"a": ["d", 3, None]},
    ]
    assert without_paths(paths) == names


def test_the_card_tells_of_network_training_data_and_metrics(run, tmp_path):
    _, text, config = exported(run, tmp_path / "digits")
    told, checkpoint = sections(text), torch.load(last(run), weights_only=True)
    assert told["Model"] == config["model"]
    assert told["Model"]["architecture"]["class"] == "UNet"
    assert told["Model"]["options"]["sampling_sigmas"] == [80.0, 0.821]
    training = told["Training"]
    assert (training["steps"], training["images_seen"]) == (1, 32)
    assert training["hours"] == pytest.approx(checkpoint["training_time"]["seconds"] / 3600)
    assert training["hardware"] == list(checkpoint["training_time"]["hardware"])
    data = training["data"]
    assert (data["images"], data["class"]) == (1797, "Digits")
    assert data["hash"] == checkpoint["run"]["data"]
    assert data["fingerprint"].startswith(checkpoint["run"]["data"])
    assert training["versions"]["torch"] == torch.__version__.partition("+")[0]
    # The last values up to these weights: the distance at 64 images is of later ones.
    measured = cells(text)
    assert measured["Fréchet distance on pixels"] == ["1.25", "32"]
    assert measured["FID"] == ["5.5", "16"]
    written, settings = told["Configuration"], yaml.safe_load((run / "config.yaml").read_text())
    assert written["model"]["class_path"] == "lit_knn.modules.LitICT"
    assert written["model"]["init_args"]["estimator"]["class_path"] == "lit_knn.estimators.KNN"
    assert written["model"] == settings["model"]
    assert written["seed_everything"] == 0
    assert written["trainer"]["max_steps"] == 1
    assert config["training"]["config"] == written


def test_a_checkpoint_without_its_run_is_exported_too(run, tmp_path):
    alone = tmp_path / "alone" / "weights.ckpt"
    alone.parent.mkdir()
    alone.write_bytes(last(run).read_bytes())
    _, text, _ = exported(alone, tmp_path / "digits")
    told = sections(text)
    assert told["Training"]["images_seen"] == 32
    assert "Configuration" not in told
    assert "No measurement of these weights" in text
    assert torch.equal(lit_knn.load(tmp_path / "digits").sample([1]), lit_knn.load(run).sample([1]))


def test_distances_of_usual_average_are_not_those_of_another(run, tmp_path):
    average = run / "averages" / "ema=0.050.ckpt"
    average.parent.mkdir()
    torch.save(
        {**torch.load(last(run), weights_only=True), "power_average": {"length": 0.05}}, average
    )
    _, text, _ = exported(average, tmp_path / "digits")
    assert sections(text)["Training"]["images_seen"] == 32
    assert "No measurement of these weights" in text
    measured = "ema,step,images_seen,num_samples,checkpoint,fid,seconds,settings\n"
    measured += "".join(f"{ema},1,32,70,x,{fid},1,a\n" for ema, fid in ((0.05, 7.5), (0.1, 6.5)))
    average.with_name("averages_fid.csv").write_text(measured)
    _, text, _ = exported(average, tmp_path / "measured")
    assert cells(text)["FID"] == ["7.5", "32"]


def test_interrupted_export_goes_on_and_replaces_nothing_else(run, tmp_path, own_folder, capsys):
    with file_size_limit(10_000):
        line = refusal_of(["export", str(run), "out"], capsys)
    assert "cannot be written" in line
    # The largest file comes first, and a full disk leaves none.
    assert not any(Path("out").iterdir())
    main(["export", str(run), "out"])
    whole = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    for name in ("README.md", "config.json"):
        Path("out", name).unlink()
        main(["export", str(run), "out"])
        assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == whole
    for name in whole:
        with Path("out", name).open("ab") as file:
            file.write(b" ")
        line = refusal_of(["export", str(run), "out"], capsys)
        assert (
            line
            == f"error: export: out/{name} is there already; nothing is overwritten, use another folder"
        )
        Path("out", name).write_bytes(whole[name])
    line = refusal_of(["export", str(write_published(tmp_path / "edm.pkl")), "new"], capsys)
    assert line.endswith("edm.pkl must be the folder of a training run or a checkpoint (.ckpt)")
    line = refusal_of(["export", str(tmp_path), "new"], capsys)
    assert "has neither checkpoints/last.ckpt nor a kept checkpoint" in line
    assert not Path("new").exists()


def test_a_home_that_the_shell_left_is_expanded(run, tmp_path, own_folder, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    main(["export", str(run), "~/out"])
    main(["report", str(run), "--output=~/table"])
    assert {"out", "table.md"} <= {path.name for path in Path("home").iterdir()}
    assert not Path("~").exists()
    line = refusal_of(["export", str(run), "~nobody-of-this-name/out"], capsys)
    assert line == "error: ~nobody-of-this-name/out: there is no such user"
    main(["plan", "-c", "demo", "--model.estimator.k=~"])  # YAML's null
    assert "fits" in capsys.readouterr().out


def test_without_the_package_of_the_hub_the_card_is_a_plain_page(
    run, tmp_path, monkeypatch, capsys
):
    _, text, _ = exported(run, tmp_path / "digits")
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "plain").mkdir()
    main(["export", str(run), str(tmp_path / "plain" / "digits")])
    page = (tmp_path / "plain" / "digits" / "README.md").read_text()
    assert page.startswith("# digits\n")
    assert text.endswith(page)
    said = "README.md has no front matter for the Hugging Face Hub, which needs: pip install"
    assert capsys.readouterr().out.endswith(f"{said} 'lit_knn[hub]'\n")


OWN_NET = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, channels, 3, padding=1), nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, z_scaled, noise_label, class_label=None):
        label = noise_label.reshape(-1, 1, 1, 1).expand(len(z_scaled), 1, *z_scaled.shape[2:])
        return self.last(self.first(torch.cat([z_scaled, label.to(z_scaled.dtype)], 1)).relu())
"""


@pytest.fixture
def own_run(tmp_path, own_folder, monkeypatch):
    """A run with a network of the user's own, in a file of the current folder."""
    Path("small_net.py").write_text(OWN_NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = [
        "--model.net",
        "small_net.Small",
        "--model.net.channels",
        "5",
        "--model.augmentation",
        "null",
    ]
    made += [
        "--model.estimator",
        "OneSample",
        "--trainer.callbacks",
        "[]",
        "--trainer.max_steps",
        "1",
    ]
    main(["fit", "-c", "table2/digits", *made, "--trainer.accelerator", "cpu"])
    yield Path("runs/table2_digits/one_sample_0")
    sys.modules.pop("small_net", None)


def test_own_network_is_exported_by_config_or_class(own_run, capsys):
    front, text, config = exported(own_run, Path("out"))
    assert front["pipeline_tag"] == "unconditional-image-generation"
    net = {"class_path": "small_net.Small", "init_args": {"channels": 5}}
    assert sections(text)["Configuration"]["model"]["init_args"]["net"] == net
    assert config["training"]["config"]["model"]["init_args"]["net"] == net
    # The example of the card works where the class is at hand.
    (snippet,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert "from small_net import Small" in snippet
    names = {}
    exec(compile(snippet, "README.md", "exec"), names)
    # A checkpoint that left its run has no config.
    alone = Path("elsewhere/last.ckpt")
    alone.parent.mkdir()
    alone.write_bytes(last(own_run).read_bytes())
    net = "{class_path: small_net.Small, init_args: {channels: 5}}"
    main(["export", str(alone), "again", "--net", net])
    main(["export", str(own_run), "by_name", "--net", "small_net.Small"])
    whole, *others = (
        load_file(f"{folder}/model.safetensors") for folder in ("out", "again", "by_name")
    )
    for weights in others:
        assert all(torch.equal(weights[name], value) for name, value in whole.items())
    assert "from small_net import Small" in Path("again/README.md").read_text()
    for options, words in (
        ([], "no config.yaml that names its network: give --net, the class path of the network"),
        (
            ["--net", "small_net.Smal"],
            "error: --net: module 'small_net' has no attribute 'Smal'; did you mean",
        ),
        (["--net", "small_net.Small"], "the weights do not fit the architecture"),
        (["--net", "{class_path: small_net.Small, init_args: {width: 5}}"], "width"),
    ):
        assert words in refusal_of(["export", str(alone), "bad", *options], capsys)
    assert not Path("bad").exists()


def test_a_card_of_latents_says_that_they_must_be_decoded(tmp_path):
    latents = [
        "--data",
        str(ROOT / "configs" / "data" / "digits_latents.yaml"),
        "--data.batch_size",
        "32",
    ]
    run, _ = leave_run(tmp_path, "ict", *latents, "--trainer.callbacks", "[]")
    front, text, _ = exported(run, tmp_path / "out")
    assert "pipeline_tag" not in front
    assert (
        "Samples are latents, not images: decode them with the training's `lit_knn.data.autoencoders.PCA`."
        in text
    )
    assert "127.5" not in text


def test_an_exported_mean_flow_keeps_its_class(tmp_path):
    options = [
        "--model.net.num_classes",
        "10",
        "--model.class_conditional",
        "true",
        "--model.sampling_class",
        "3",
    ]
    run, _ = leave_run(tmp_path, "mean_flow", *options)
    front, _, _ = exported(run, tmp_path / "out")
    assert {"flow-matching", "meanflow"} <= {*front["tags"]}
    for model in (lit_knn.load(run), lit_knn.load(tmp_path / "out")):
        chosen, other = (model.sample(range(4), class_label=label) for label in (3, 4))
        assert torch.equal(model.sample(range(4)), chosen)
        assert not torch.equal(chosen, other)
