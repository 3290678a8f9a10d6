"""The examples of docs/extending.md: every subcommand runs classes outside the project, from another folder."""

import csv
import re
import shlex
import sys

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.data import Digits
from lit_knn.estimators import ByClass
from lit_knn.index import FaissIndex
from lit_knn.theory.noise import Process
from main import main
from tests import ROOT

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
    """The command's arguments with absolute config paths, and options that make it small."""
    args = shlex.split(re.sub(r"configs/", f"{ROOT}/configs/", command))
    if args[0] == "plan":
        return args
    if args[0] == "validate":
        return [*args, *TINY, *(part for name, n in FEW.items() for part in (f"--trainer.callbacks.{name}", n))]
    return [*args, *TINY, *SHORT]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_runs(command, outside, capsys):
    main(arguments(command))
    if command.startswith("plan"):
        out = capsys.readouterr().out
        assert re.search(r"index +\d", out)
        assert "NOT KNOWN" not in out
    if command.startswith("validate"):
        (table,) = outside.rglob("estimator_error.csv")
        rows = list(csv.DictReader(table.open()))
        assert len([row for row in rows if row["estimator"] == "Nearest"]) == 3
        # A deterministic estimator is measured once at each latent.
        assert {row["mu_variance"] for row in rows if row["estimator"] == "Nearest"} == {""}
    if command.startswith("fit"):
        assert list(outside.rglob("last.ckpt"))


def test_samples_are_drawn_with_an_own_estimator(outside):
    options = ["--model", "LitEstimator", "--model.estimator", "mine.Nearest", "--data", "mine_data.Stripes"]
    options += ["--model.sampling_steps", "4", "--data.predict_samples", "4"]
    main(["predict", *options, "--trainer.logger", "false", *TINY])
    assert len(list(outside.rglob("*.png"))) >= 4


@pytest.mark.parametrize(("answer", "got"), [("None", "None"), ("loss", "(16,)")])
def test_an_objective_that_is_no_scalar_is_refused(answer, got, outside, capsys):
    code = (
        f"from lit_knn.modules.edm import LitEDM\nclass Own(LitEDM):\n    objective = lambda self, loss, x: {answer}\n"
    )
    name = f"objective_{answer.lower()}"
    (outside / f"{name}.py").write_text(code)
    command = (
        f"fit -c configs/table2/digits.yaml --model {name}.Own --model.net mine_net.Small --model.augmentation null"
    )
    with pytest.raises(SystemExit, match="2"):
        main(arguments(command))
    assert f"error: Own: objective must return a scalar tensor, got {got}\n" in capsys.readouterr().err


def test_the_other_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for name, code in SNIPPETS:
        if not name:
            exec(compile(code, "extending.md", "exec"), names)
    assert names["samples"].shape == (8, 1, 8, 8)
    assert names["samples"].isfinite().all()


def test_the_own_estimator_is_what_it_says(outside):
    sys.path.append(str(outside))
    from mine import Nearest

    data = Digits(index=FaissIndex("Flat"))
    data.setup()
    images = data.reference.gather(torch.arange(data.reference.N)).double()
    z, t = (images[:5] + 0.4 * torch.randn(images[:5].shape)).float(), 0.4
    everything = Nearest(data.reference.N).bind(data.reference).posterior_mean(z, t)
    log_p = -(z.double()[:, None] - images).flatten(2).square().sum(2) / (2 * t**2)
    exact = torch.einsum("bn,n...->b...", log_p.softmax(1), images)
    torch.testing.assert_close(everything.double(), exact, rtol=0, atol=1e-5)
    labels = data.reference.labels[:5]
    own = ByClass(Nearest(3)).bind(data.reference).posterior_mean(z, t, labels=labels)
    assert own.shape == z.shape


# A process that defines only its two methods must agree with our closed forms.


class ByFormula(Process):
    """A process of σ(t) alone."""

    def __init__(self, formula):
        self.formula = formula

    def sigma(self, t):
        return self.formula(t)

    def scale(self, t):
        return torch.ones_like(t)


@pytest.mark.parametrize(
    "formula",
    [
        lambda t: 50 * t.tanh(),  # never reaches 80
        lambda t: 40 * (1 - (1 - t.square()).sqrt()),  # not defined beyond t = 1
        lambda t: 0.01 * 8000**t,  # begins above 0.002
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_noise_level_that_a_process_never_has_is_refused(formula, dtype):
    process = ByFormula(formula)
    between = torch.tensor([0.1, 30.0], dtype=dtype)
    found = process.t_of_sigma(between)
    assert found.dtype == dtype
    torch.testing.assert_close(process.sigma(found.double()), between.double(), rtol=1e-4, atol=0)
    with pytest.raises(InputError, match=r"ByFormula: no t has the noise level σ\(t\)=(80|0.002)"):
        process.t_of_sigma(torch.tensor([0.002, 1.0, 80.0], dtype=dtype))
