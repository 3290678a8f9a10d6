"""The paper's runs have the published values: docs/hyperparameters.md agrees with the configs it names."""

import importlib
import math
import re
from typing import NamedTuple

import pytest
import torch
import yaml

import lit_knn.estimators
from lit_knn.estimators import OneSample
from lit_knn.modules import LitEDM, LitICT
from lit_knn.nets import UNet
from tests.config_files import CONFIGS, resolved

ROOT = CONFIGS.parent
PAGE = (ROOT / "docs" / "hyperparameters.md").read_text()


class Row(NamedTuple):
    section: str
    key: str
    value: str
    source: str
    note: str
    files: tuple[str, ...]


def read_page():
    rows = []
    for section in PAGE.split("\n## ")[1:]:
        title = section.splitlines()[0]
        files = tuple(re.findall(r"`(configs/[^`]*)`", re.search(r"^Files: (.*)$", section, re.MULTILINE)[1]))
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
            if cells and cells[0] != "option":
                rows.append(Row(title, *cells, files))
    return rows


ROWS = read_page()
OF_CONFIGS = [row for row in ROWS if row.key.startswith("`")]


def value_of(text):
    """Convert a cell of the table to a config's value."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    try:
        return float(text)
    except ValueError:
        return yaml.safe_load(text)


def option(config, key):
    """Look up the command-line option `key` in a config: a class gives its name; callbacks are found by class.

    For an estimator, null means the default of its class.
    """
    value = config
    for part in key.split("."):
        owner = value.get("class_path", "")
        if part == "callbacks":
            value = {c["class_path"].rpartition(".")[2]: c for c in value.get(part) or value[f"{part}+"]}
        else:
            options = value.get("init_args", value)
            assert part in options, f"{key}: no {part}"
            value = options[part]
    if isinstance(value, dict):
        value = value["class_path"]
    if value is None and owner.startswith("lit_knn.estimators."):
        return getattr(getattr(lit_knn.estimators, owner.rpartition(".")[2]), part).default
    return value.rpartition(".")[2] if isinstance(value, str) and value.startswith("lit_knn.") else value


def values_in(row):
    """The values of a row's key in the row's configs."""
    file, _, key = row.key.strip("`").rpartition(": ")
    if key.startswith("lit_knn."):
        module, _, name = key.rpartition(".")
        return [getattr(importlib.import_module(module), name)]
    files = (
        [f for f in row.files if f.endswith(f"/{file}")] if file and "/" not in file else [file] if file else row.files
    )
    assert files, row
    configs = [resolved(ROOT / f) for f in files]
    keys = key.split(" * ")
    return [math.prod(option(c, k) for k in keys) if len(keys) > 1 else option(c, key) for c in configs]


@pytest.mark.parametrize("row", OF_CONFIGS, ids=lambda row: f"{row.section.partition(':')[0]}: {row.key}")
def test_configs_have_the_published_values(row):
    for value in values_in(row):
        assert value == value_of(row.value), row.key


def test_the_page_has_every_table_and_what_no_config_has_names_its_test():
    counts = {title.partition(":")[0]: sum(row.section == title for row in ROWS) for title in {r.section for r in ROWS}}
    least = {"Table 1": 35, "Table 2": 30, "CelebA at 64x64": 10, "ImageNet at 64x64": 12, "Figure 4": 2}
    least |= {"Flow matching of CIFAR-10": 14}
    assert counts.keys() == least.keys()
    assert all(counts[name] >= least[name] for name in least), counts
    for row in ROWS:
        assert row.source, row.key
        if row not in OF_CONFIGS:
            assert "test" in row.note, f"{row.key}: nothing holds it"


def test_every_test_that_the_page_names_is_there():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert named - defined == set()
    assert all((ROOT / path).is_file() for path in re.findall(r"`(tests/\w+\.py)`", PAGE))


# Runs that follow Table 1 may differ from it in these keys. Each is a row of the page or depends on the image size.
OWN = {"net", "estimator", "sampling_sigmas", "class_conditional", "sampling_class"}


@pytest.mark.parametrize(
    "name", ["figure4/cifar10", "celeba64/ict_knn", "imagenet64/ict_knn", "imagenet64/ict_knn_conditional"]
)
def test_runs_that_follow_table_1(name):
    ours, table1 = (resolved(CONFIGS / f"{n}.yaml") for n in (name, "table1/ict_knn"))
    own = OWN if name != "figure4/cifar10" else set()
    model, reference = ours["model"]["init_args"], table1["model"]["init_args"]
    assert {k: v for k, v in model.items() if k not in own} == {k: v for k, v in reference.items() if k not in own}
    assert ours["trainer"]["max_steps"] == table1["trainer"]["max_steps"]
    if name == "figure4/cifar10":
        assert ours["data"] == table1["data"]


def test_optimisers():
    net = UNet(1, channels=4, multipliers=(1,), blocks=1)
    for model, kind in ((LitICT(net, OneSample()), torch.optim.RAdam), (LitEDM(net, OneSample()), torch.optim.Adam)):
        optimiser = model.configure_optimizers()
        assert type(optimiser) is kind
        defaults = optimiser.defaults
        assert (defaults["betas"], defaults["eps"], defaults["weight_decay"]) == ((0.9, 0.999), 1e-8, 0)
        assert defaults["lr"] == model.hparams.lr
