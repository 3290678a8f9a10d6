"""The paper's runs have the published values: docs/hyperparameters.md agrees with the configs it names."""

import importlib
import math
import re
from typing import NamedTuple

import pytest
import torch
import yaml

from lit_knn.estimators import OneSample
from lit_knn.estimators.counts import DEFAULTS
from lit_knn.modules import LitEDM, LitICT
from tests.config_files import CONFIGS, resolved
from tests.watched import WatchedNet

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
    for section in PAGE.split("\n## ")[1:]:
        title = section.partition("\n")[0].partition(":")[0]
        files = tuple(
            re.findall(r"`(configs/[^`]*)`", re.search(r"^Files: (.*)$", section, re.MULTILINE)[1])
        )
        for line in re.findall(r"^\| (?!option).*", section, re.MULTILINE):
            yield Row(title, *[cell.strip() for cell in line.strip("|").split("|")], files)


ROWS = list(read_page())
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
            value = {
                c["class_path"].rpartition(".")[2]: c for c in value.get(part) or value[f"{part}+"]
            }
        else:
            value = value.get("init_args", value)[part]
    if isinstance(value, dict):
        value = value["class_path"]
    if value is None and owner.startswith("lit_knn.estimators."):
        return DEFAULTS[part]
    return (
        value.rpartition(".")[2]
        if isinstance(value, str) and value.startswith("lit_knn.")
        else value
    )


def values_in(row):
    """The values of a row's key in the row's configs."""
    file, _, key = row.key.strip("`").rpartition(": ")
    if key.startswith("lit_knn."):
        module, _, name = key.rpartition(".")
        return [getattr(importlib.import_module(module), name)]
    files = (
        [file]
        if "/" in file
        else [path for path in row.files if path.endswith(f"/{file}" if file else "")]
    )
    assert files, row
    first, *others = key.split(" * ")
    configs = [resolved(ROOT / path) for path in files]
    return [
        math.prod(option(c, k) for k in (first, *others)) if others else option(c, first)
        for c in configs
    ]


@pytest.mark.parametrize("row", OF_CONFIGS, ids=lambda row: f"{row.section}: {row.key}")
def test_configs_have_the_published_values(row):
    for value in values_in(row):
        assert value == value_of(row.value), row.key


def test_page_has_every_table_and_names_tests_of_the_rest():
    tables = {
        "Table 1",
        "Table 2",
        "Figure 4",
        "CelebA at 64x64",
        "ImageNet at 64x64",
        "Flow matching of CIFAR-10",
    }
    assert {row.section for row in ROWS} == tables
    for row in ROWS:
        assert row.source, row.key
        assert row in OF_CONFIGS or "test" in row.note, f"{row.key}: nothing holds it"
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {
        name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    }
    assert set(re.findall(r"`(test_\w+)`", PAGE)) <= defined
    assert all((ROOT / path).is_file() for path in re.findall(r"`(tests/\w+\.py)`", PAGE))


@pytest.mark.parametrize(
    ("module", "kind"), [(LitICT, torch.optim.RAdam), (LitEDM, torch.optim.Adam)]
)
def test_optimisers(module, kind):
    model = module(WatchedNet(), OneSample())
    optimiser = model.configure_optimizers()
    assert type(optimiser) is kind
    defaults = optimiser.defaults
    assert (defaults["betas"], defaults["eps"], defaults["weight_decay"]) == ((0.9, 0.999), 1e-8, 0)
    assert defaults["lr"] == model.lr
