"""The examples of docs/extending.md: every subcommand runs classes outside the project, from another folder."""

import csv
import re
import shlex
import sys

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.theory.noise import Process
from main import main
from tests.command_lines import ROOT, refusal_of

PAGE = (ROOT / "docs" / "extending.md").read_text()
SNIPPETS = re.findall(r'^```python(?: title="(\S+)")?\n(.*?)^```', PAGE, flags=re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^    lit-knn (.*)$", PAGE.replace("\\\n", ""), flags=re.MULTILINE)
TINY = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.enable_progress_bar", "false"]
SHORT = ["--trainer.max_steps", "2", "--trainer.callbacks", "[]"]
SHORT += ["--trainer.val_check_interval", "2", "--data.val_images", "16", "--data.batch_size", "16"]
FEW = {"num_z": "4", "repeats": "2", "noise_levels": "3"}


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A working folder with the files of the page; their modules are removed from sys.modules afterwards."""
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
    small = {"plan": [], "validate": [*TINY, *few], "fit": [*TINY, *SHORT]}
    return [*shlex.split(command), *small[command.partition(" ")[0]]]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_runs(command, outside, capsys):
    main(arguments(command))
    if command.startswith("plan"):
        out = capsys.readouterr().out
        assert re.search(r"index +\d", out)
        assert "NOT KNOWN" not in out
    if command.startswith("validate"):
        (table,) = outside.rglob("estimator_error.csv")
        rows = [row for row in csv.DictReader(table.open()) if row["estimator"] == "Nearest"]
        # A deterministic estimator is measured once at each latent.
        assert [row["mu_variance"] for row in rows] == ["", "", ""]
    if command.startswith("fit"):
        assert list(outside.rglob("last.ckpt"))


@pytest.mark.parametrize(("answer", "got"), [("None", "None"), ("loss", "(16,)")])
def test_an_objective_that_is_no_scalar_is_refused(answer, got, outside, capsys):
    name = f"objective_{answer.lower()}"
    code = "from lit_knn.modules.edm import LitEDM\nclass Own(LitEDM):\n    objective = lambda self, loss, x: "
    (outside / f"{name}.py").write_text(code + answer)
    command = f"fit -c table2/digits --model {name}.Own --model.net mine_net.Small --model.augmentation null"
    line = refusal_of(arguments(command), capsys)
    assert line == f"error: Own: objective must return a scalar tensor, got {got}"


def test_the_other_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
