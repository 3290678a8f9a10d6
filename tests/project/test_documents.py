"""The pages and notebooks work: their Python runs, their commands are parsed, and their links and files exist."""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from lit_knn.commands.cli.cli import CLI
from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.common.errors import InputError
from lit_knn.data.prepared_writer import prepare
from lit_knn.sampling.loading import load_network
from lit_knn.theory.noise import Process
from main import main
from tests.command_lines import ROOT
from tests.image_files import image_folder
from tests.networks import write_own, write_published
from tests.trained_runs import leave_run

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "benchmarks").rglob("*.md"))
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
# These pages run in this order, the snippets of a page share their names.
RUN = ["README.md", "docs/tour.md", "docs/library.md", "docs/large_data.md", "docs/hand_over.md"]


def snippets(page, language="python"):
    return [code for name, code in FENCED.findall(TEXTS[page]) if name == language]


def test_the_snippets_of_a_page_run_in_their_order(own_folder):
    # The runs, checkpoints and networks that the pages name
    write_published("edm-cifar10-32x32-cond-vp.pkl")
    write_own("last.ckpt", channels=8)
    leave_run("runs", "ict")
    Path("runs/ict").rename("runs/demo")
    own = load_network("edm-cifar10-32x32-cond-vp.pkl")
    shape = (2, own.model.in_channels, own.model.image_size, own.model.image_size)
    names = {page: {} for page in RUN}
    for page in RUN:
        for snippet in snippets(page):
            if "load_network" in snippet:
                names[page] |= {
                    "z": torch.randn(shape),
                    "sigma": torch.ones(2, 1, 1, 1),
                    "labels": None,
                }
            # Weights of Inception are downloaded, and features of large images take long to compare.
            snippet = snippet.replace("InceptionV3", "Pixels").replace(
                "(5000, 3, 32, 32)", "(5000, 3, 8, 8)"
            )
            exec(compile(snippet, page, "exec"), names[page])
    for page in ("README.md", "docs/library.md"):
        assert names[page]["mu"].shape == (16, 3, 8, 8)
        assert names[page]["score"].isfinite().all()
    assert names["docs/library.md"]["fid"] > 0
    assert all(names["docs/library.md"][name].isfinite().all() for name in ("epsilon", "velocity"))
    assert {row["estimator"] for row in names["docs/library.md"]["rows"]} == {"KNN", "STF"}
    assert np.load("latents.npy").shape == (1797, 1, 4, 4)
    tour = names["docs/tour.md"]
    assert tour["images"].shape == names["docs/hand_over.md"]["images"].shape == (16, 1, 8, 8)
    assert (tour["estimate"] - tour["exact"]).square().mean() < (
        tour["x"] - tour["exact"]
    ).square().mean()


# Commands


def commands(text):
    """The arguments of lit-knn in indented lines; a line that ends with a backslash is joined with the next."""
    lines = "\n".join(re.findall(r"^    (.*)$", text, flags=re.MULTILINE))
    lines = (
        re.sub(r"\\\n\s*", " ", lines)
        .replace("$seed", "0")
        .replace("$estimator", "stf")
        .splitlines()
    )
    found = [
        re.search(r"(?:^|\s)(?:lit-knn|main\.py) (.*)", line.partition("  #")[0]) for line in lines
    ]
    return [match[1].strip() for match in found if match]


ALL = {
    command
    for page, text in TEXTS.items()
    if page != "docs/extending.md"
    for command in commands(text)
}
WITH_CONFIG = ("fit", "validate", "predict", "plan", "best", "probe")
OF_FILES = sorted(command for command in ALL if command.split()[0] not in WITH_CONFIG)
# `tests/configs/test_configs.py` makes every config, so that a command without options is known to work.
COMMANDS = sorted(
    c for c in ALL if not re.fullmatch(r"\w+ -c configs/\S+", c) and c not in OF_FILES
)
FILES_OF_USERS = ("edm.pkl", "mine.yaml", "photos.npy", "probe_edm/probe.yaml")
OF_SUBCOMMANDS = (
    "--ckpt_path",
    "--images",
    "--image_shape",
    "--gpu_gb",
    "--run",
    "--checkpoints",
    "--out",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_parsed(command, tmp_path, monkeypatch):
    subcommand, *args = shlex.split(command)
    write_published(tmp_path / "edm.pkl")
    (tmp_path / "mine.yaml").write_text(snippets("docs/command_line.md", "yaml")[0])
    # `prepare` writes such a file. A config may take numbers from it.
    image_folder(tmp_path / "photos")
    prepare(tmp_path / "photos", tmp_path / "photos.npy")
    # `probe --out probe_edm` writes such a file.
    (tmp_path / "probe_edm").mkdir()
    (tmp_path / "probe_edm/probe.yaml").write_text("model: {init_args: {sigma_max: 40}}")
    for option in OF_SUBCOMMANDS:
        if option in args:
            del args[args.index(option) : args.index(option) + 2]
    if subcommand == "probe" and "-c" not in args:  # it needs no model
        args = ["--model", "LitEstimator", *args]
    args = [str(tmp_path / arg) if arg in FILES_OF_USERS else arg for arg in args]
    if subcommand == "best":  # the run's folder has its config
        args = ["-c", "configs/table1/ict_knn.yaml", *args]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(CLI, "instantiate_classes", lambda self: None)
    make_cli(
        [
            *args,
            "--trainer.accelerator",
            "cpu",
            "--trainer.devices",
            "1",
            "--trainer.num_nodes",
            "1",
        ],
        run=False,
    )


@pytest.mark.parametrize("command", OF_FILES)
def test_commands_of_files_have_these_options(command, capsys):
    args = shlex.split(command)
    with pytest.raises(SystemExit, match="0"):
        main([args[0], "--help"])
    told = capsys.readouterr().out
    assert [arg for arg in args if arg.startswith("--") and arg not in told] == []


def test_commands_in_config_headers_name_existing_files():
    missing = []
    for path in (ROOT / "configs").rglob("*.yaml"):
        header = re.sub(r"\\\n#\s*", " ", path.read_text().partition("\nmodel:")[0])
        for line in re.findall(
            r"^#\s+(?:lit-knn|python main\.py) (.*)$", header, flags=re.MULTILINE
        ):
            names = [
                arg for arg in shlex.split(line.partition("   ")[0]) if arg.startswith("configs/")
            ]
            missing += [(path, name) for name in names if not (ROOT / name).is_file()]
    assert missing == []


# Links


def anchors(text):
    """The anchors of a page on GitHub: those of its headings, and those that it sets."""
    found = re.findall(r'<a id="([^"]+)"', text)
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", text), flags=re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return found


def broken_links(page, text):
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", prose):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name
        if not path.exists() or (
            anchor and anchor not in anchors(path.read_text() if name else text)
        ):
            yield target


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_and_every_file_that_a_page_names_exists(page):
    assert list(broken_links(page, TEXTS[page])) == []
    assert "](<" not in TEXTS[page], "the site does not follow links with spaces"
    configs = re.findall(r"configs/[\w/]+\.yaml", TEXTS[page])
    modules = re.findall(r"python -m ((?:lit_knn|benchmarks|callbacks|tests)[\w.]*)", TEXTS[page])
    # A package can be run if it has a file __main__.py.
    paths = [module.rstrip(".").replace(".", "/") for module in modules]
    files = [*configs, *(f"{p}/__main__.py" if (ROOT / p).is_dir() else f"{p}.py" for p in paths)]
    assert [name for name in files if not (ROOT / name).exists()] == []


# The site


def test_the_site_lists_every_page_of_docs():
    listed = re.findall(
        r"^ +- .*?: (\S+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE
    )
    notebooks = [
        f"docs/notebooks/{path.name}" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")
    ]
    pages = [page for page in TEXTS if page.startswith("docs/")]
    assert sorted(f"docs/{name}" for name in listed) == sorted(pages + notebooks)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert "KNN" in (tmp_path / "api" / "estimators" / "index.html").read_text()


# docs/extending.md: every command runs classes outside the project, from another folder

SNIPPETS = re.findall(
    r'^```python(?: title="(\S+)")?\n(.*?)^```',
    TEXTS["docs/extending.md"],
    flags=re.DOTALL | re.MULTILINE,
)
TINY = [
    "--trainer.accelerator",
    "cpu",
    "--trainer.devices",
    "1",
    "--trainer.enable_progress_bar",
    "false",
]
SHORT = ["--trainer.max_steps", "2", "--trainer.callbacks", "[]"]
SHORT += ["--trainer.val_check_interval", "2", "--data.val_images", "16", "--data.batch_size", "16"]
FEW = {"num_z": "4", "repeats": "2", "noise_levels": "3"}


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A working folder with the files of docs/extending.md; their modules are removed from sys.modules afterwards."""
    for name, code in SNIPPETS:
        if name:
            (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(ROOT))])
    yield tmp_path
    for name, _ in SNIPPETS:
        sys.modules.pop(name.removesuffix(".py"), None)


def arguments(command):
    """The command's arguments, and options that make it small."""
    few = [part for name, n in FEW.items() for part in (f"--trainer.callbacks.{name}", n)]
    small = {"plan": TINY, "validate": [*TINY, *few], "fit": [*TINY, *SHORT]}
    return [*shlex.split(command), *small[command.partition(" ")[0]]]


@pytest.mark.parametrize("command", commands(TEXTS["docs/extending.md"]))
def test_every_command_of_the_page_on_extending_runs(command, outside, capsys):
    main(arguments(command))
    if command.startswith("plan"):
        out = capsys.readouterr().out
        assert re.search(r"index +\d", out)
        # The estimator of the page does not tell its memory.
        assert re.search(r"Nearest +NOT KNOWN", out)
    if command.startswith("validate"):
        (table,) = outside.rglob("estimator_error.csv")
        rows = [row for row in csv.DictReader(table.open()) if row["estimator"] == "Nearest"]
        # A deterministic estimator is measured once at each latent.
        assert [row["mu_variance"] for row in rows] == ["", "", ""]
    if command.startswith("fit"):
        assert list(outside.rglob("last.ckpt"))


def test_the_other_snippets_of_the_page_run(own_folder):
    names = {}
    for name, code in SNIPPETS:
        if not name:
            exec(compile(code, "extending.md", "exec"), names)
    assert names["samples"].shape == (8, 1, 8, 8)
    assert names["samples"].isfinite().all()


@pytest.mark.parametrize(
    "formula",
    [
        lambda t: 50 * t.tanh(),  # never reaches 80
        lambda t: 40 * (1 - (1 - t.square()).sqrt()),  # not defined beyond t = 1
        lambda t: 0.01 * 8000**t,  # begins above 0.002
    ],
)
def test_a_noise_level_that_a_process_never_has_is_refused(formula):
    methods = {"sigma": lambda self, t: formula(t), "scale": lambda self, t: torch.ones_like(t)}
    process, between = type("ByFormula", (Process,), methods)(), torch.tensor([0.1, 30.0])
    found = process.t_of_sigma(between)
    assert found.dtype == torch.float32
    # The rounding of t to float32 changes σ by far less than this.
    torch.testing.assert_close(process.sigma(found.double()), between.double(), rtol=1e-4, atol=0)
    with pytest.raises(InputError, match=r"ByFormula: no t has the noise level σ\(t\)=(80|0.002)"):
        process.t_of_sigma(torch.tensor([0.002, 1.0, 80.0]))


# Notebooks: their cells run one after the other, in this process

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = {
    path.stem: json.loads(path.read_text())["cells"] for path in sorted(FOLDER.glob("*.ipynb"))
}


def run(name):
    names = {}
    with torch.random.fork_rng(), matplotlib.rc_context({"backend": "Agg"}):
        for cell in NOTEBOOKS[name]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), names)
    plt.close("all")
    return names


def test_the_errors_of_estimators_have_their_order():
    # The last errors in one dimension are those of the KNN at t = 10.
    assert 0 < run("one_dimension")["errors"][-1] < 1
    peaks = {name: max(errors) for name, errors in run("score_error")["curves"].items()}
    assert peaks["SubspaceKNN"] < peaks["KNN"] < peaks["STF"] < peaks["one sample"]


def test_an_own_estimator_has_no_variance(capsys):
    rows = run("own_estimator")["rows"]
    assert {row["mu_variance"] for row in rows if row["estimator"].startswith("Nearest")} == {""}
    assert "z must be (B, 1, 8, 8), got (2, 3)" in capsys.readouterr().out


def test_exact_samples_are_copies_and_hybrid_ones_are_not():
    names = run("memorisation")
    nearest = [
        names["nearest_images"](images, names["reference"]) for images in names["samples"].values()
    ]
    shares = [names["is_copied"](found).float().mean() for found in nearest]
    assert shares[0] > 0.95
    assert shares[-1] < 0.1


def test_a_model_is_trained_in_plain_pytorch():
    names = run("plain_pytorch")
    losses = names["losses"]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert names["samples"].isfinite().all()
