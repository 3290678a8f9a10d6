"""The README's examples work: its Python runs, its commands are parsed, its links and configs exist."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from lit_knn.edm_checkpoint import load_edm_pickle
from main import CLI, make_cli
from tests.networks import write_own, write_published
from tests.trained_runs import leave_run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
# Lines of code; a line that ends with a backslash is joined with the next.
CODE = re.findall(r"^    (.*)$", README, flags=re.MULTILINE)
COMMANDS = [
    line.partition("main.py ")[2].partition("  #")[0].strip()
    for line in re.sub(r"\\\n\s*", " ", "\n".join(CODE)).splitlines()
    if "main.py " in line
]


def test_every_snippet_runs_in_the_order_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    write_published("edm-cifar10-32x32-cond-vp.pkl")
    write_own("last.ckpt", channels=8)
    leave_run("runs", "ict")
    Path("runs/ict").rename("runs/demo")
    own = load_edm_pickle("edm-cifar10-32x32-cond-vp.pkl")
    names = {}
    for snippet in SNIPPETS:
        if "load_network" in snippet:
            shape = (2, own.model.in_channels, own.model.image_size, own.model.image_size)
            names |= {"z": torch.randn(shape), "sigma": torch.ones(2), "labels": None}
            # This checkpoint tells no architecture, as of a network of one's own.
            snippet = snippet.replace('load_network("last.ckpt")', 'load_network("edm-cifar10-32x32-cond-vp.pkl")')
        # Weights of Inception are downloaded, and features of large images take long to compare.
        snippet = snippet.replace("InceptionV3", "Pixels").replace("(5000, 3, 32, 32)", "(5000, 3, 8, 8)")
        exec(compile(snippet, "README.md", "exec"), names)
    assert len(SNIPPETS) >= 3
    assert names["mu"].shape == (16, 3, 8, 8)
    assert names["score"].isfinite().all()
    assert names["fid"] > 0
    assert {row["estimator"] for row in names["rows"]} == {"KNN", "STF"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_parsed(command, tmp_path, monkeypatch):
    subcommand, *args = shlex.split(command)
    write_published(tmp_path / "edm.pkl")
    for option in ("--ckpt_path", "--images", "--image_shape", "--gpu_gb", "--run"):
        if option in args:  # an option of the subcommand itself
            del args[args.index(option) : args.index(option) + 2]
    args = [str(tmp_path / arg) if arg == "edm.pkl" else arg for arg in args]
    if subcommand == "best":  # the run's folder has its config
        args = ["-c", "configs/table1/ict_knn.yaml", *args]
    monkeypatch.chdir(ROOT)
    # tests/test_configs.py instantiates every config.
    monkeypatch.setattr(CLI, "instantiate_classes", lambda self: None)
    make_cli([*args, "--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.num_nodes", "1"], run=False)
    assert subcommand in ("fit", "validate", "predict", "plan", "best")


def test_every_file_that_the_page_names_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    configs = re.findall(r"configs/[\w/]+\.yaml", README)
    modules = re.findall(r"python -m ((?:lit_knn|benchmarks|callbacks)[\w.]*)", README)
    # A package can be run if it has a file __main__.py.
    paths = [module.replace(".", "/") for module in modules]
    files = [*links, *configs, *(f"{p}/__main__.py" if (ROOT / p).is_dir() else f"{p}.py" for p in paths)]
    assert len(files) > 40
    assert [name for name in files if not (ROOT / name).exists()] == []
