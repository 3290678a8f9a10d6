"""Each config that may run on a GPU has an index that works there, at its real size. Nothing is built."""

import importlib
import math

import pytest
import torch

from lit_knn.commands.plan import estimator_parts
from lit_knn.data import Stored
from lit_knn.estimators import Estimator
from tests.config_files import CONFIGS, RUNS, resolved

ON_GPUS = [path for path in RUNS if resolved(path)["trainer"].get("accelerator") != "cpu"]
# Data that are not at hand: CelebA, ImageNet, and as many images of one's own as ImageNet has.
SIZES = {"data/celeba64.npy": (202_599, 3, 64, 64), "data/imagenet64.npy": (1_281_167, 3, 64, 64)}
OWN = SIZES["data/imagenet64.npy"]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def made(config):
    """Instantiate what a config names; networks stay dictionaries, because only files of their weights make them."""
    if isinstance(config, dict):
        parts = {name: made(part) for name, part in config.items()}
        if "class_path" not in config:
            return parts
        module, _, name = config["class_path"].rpartition(".")
        if name != "Network" and module in ("lit_knn.data", "lit_knn.index", "lit_knn.estimators"):
            return getattr(importlib.import_module(module), name)(**parts.get("init_args", {}))
        return parts
    return [made(part) for part in config] if isinstance(config, list) else config


def estimators_in(value):
    if isinstance(value, Estimator):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [estimator for part in inner for estimator in estimators_in(part)]


def test_the_runs_are_found():
    assert {"celeba64", "imagenet64", "figure3", "table1", "table2"} <= {path.parent.name for path in ON_GPUS}


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_a_run_searches_on_a_gpu_and_on_a_cpu_at_its_real_size(path):
    config = made(resolved(path))
    data, estimators = config["data"], estimators_in([config["model"], config["trainer"]])
    size = SIZES.get(getattr(data, "path", None))
    stored = data.stored() if size is None else Stored(size, mapped=True)
    for device in (CPU, GPU):
        held, _ = estimator_parts(estimators, data, stored, device)
        assert all(part.counted for part in held)
        # Half of a large GPU is left for the network.
        assert sum(part.bytes for part in held) + math.prod(stored.shape) < 40e9
    assert estimators or path.stem == "published"


def test_an_index_of_data_works_on_a_cpu_and_on_a_gpu():
    found = {path.stem: made(resolved(path)) for path in (CONFIGS / "data").glob("*.yaml")}
    chosen = {name: data for name, data in found.items() if data.index is not None}
    assert chosen
    for data in chosen.values():
        N, *shape = SIZES.get(getattr(data, "path", None), OWN)
        for device in (CPU, GPU):
            data.index.check(N, math.prod(shape), device, 2048)
