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
from lit_knn.theory.noise import EDM, VP, LinearInterpolant, Process
from main import main
from tests import ROOT
from tests.ranks import run_main

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


def test_on_shards_it_is_refused_with_a_line(outside):
    own = "--model.estimator mine.Nearest --model.estimator.k 4 --data.sharded true"
    command = f"fit -c {ROOT}/configs/demo.yaml {own}".split()
    done = run_main([*command, *TINY, *SHORT], ranks=2, check=False)
    assert done.codes == [2, 2], done.stderr[-2000:]
    # The other rank may repeat the line if it does not know whether the first rank is alive.
    line, *_ = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line == "error: Nearest needs the whole reference set on each rank, this one is sharded"


def test_an_estimator_that_tells_nothing_is_not_said_to_be_counted(outside, capsys):
    (outside / "silent.py").write_text(SNIPPETS[0][1].partition("    def holds")[0])
    command = f"plan -c {ROOT}/configs/demo.yaml --model.estimator silent.Nearest --model.estimator.k 32"
    main(command.split())
    out = capsys.readouterr().out
    assert re.search(r"index +\d", out)
    assert re.search("Nearest .*NOT KNOWN, not counted", out)
    assert "fits, apart from what is NOT KNOWN\n" in out


def plan_with(code, outside, name):
    (outside / f"{name}.py").write_text("import torch\nfrom lit_knn.estimators import Estimator, Holdings\n" + code)
    main(f"plan -c {ROOT}/configs/demo.yaml --model.estimator {name}.Own".split())


def test_an_estimator_without_a_reference_set_is_in_the_plan(outside, capsys):
    code = "class Own(Estimator):\n    needs_reference = False\n    _posterior_mean = lambda self, z, *args: z\n"
    plan_with(code, outside, "free")
    out = capsys.readouterr().out
    assert re.search("Own .*NOT KNOWN, not counted", out)
    assert "fits, apart from what is NOT KNOWN\n" in out
    tells = "    def holds(self, N, d, pixels, device):\n        return Holdings(arrays={'table': 3 * 10**9})\n"
    plan_with(code + tells, outside, "free_and_telling")
    out = capsys.readouterr().out
    assert "NOT KNOWN" not in out
    assert re.search(r"table +3\.000 GB", out)
    with pytest.raises(SystemExit, match="2"):
        plan_with(code + tells.replace("Holdings(arrays=", "dict(arrays="), outside, "mistaken")
    assert "error: plan: Own.holds must return Holdings or None, got {'arrays'" in capsys.readouterr().err


def test_the_estimators_of_figure_3_are_in_the_plan(capsys):
    main(["plan", "-c", f"{ROOT}/configs/figure3/digits.yaml"])
    assert re.search(r"index +0\.000 GB", capsys.readouterr().out)


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


@pytest.mark.parametrize(
    ("process", "t"), [(EDM(), 7.0), (VP(), 0.6), (VP(3.0, 1e-3), 0.01), (LinearInterpolant(), 0.3)]
)
def test_derivatives_and_inverse_are_those_of_the_closed_forms(process, t):
    plain = type("Plain", (Process,), {"sigma": staticmethod(process.sigma), "scale": staticmethod(process.scale)})()
    times = t * torch.linspace(0.1, 1.0, 7, dtype=torch.float64)
    torch.testing.assert_close(plain.sigma_derivative(times), process.sigma_derivative(times), rtol=1e-12, atol=0)
    torch.testing.assert_close(plain.scale_derivative(times), process.scale_derivative(times), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(plain.t_of_sigma(process.sigma(times)), times, rtol=1e-10, atol=0)
    z, mu = torch.randn(2, 7, dtype=torch.float64)
    torch.testing.assert_close(plain.velocity(z, times, mu), process.velocity(z, times, mu), rtol=1e-9, atol=1e-9)


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


def test_times_in_float32_of_a_process_that_turns_infinite_at_1():
    """σ(t) = tan(πt/2), whose value at t = 1, rounded to float32, is negative."""
    process = ByFormula(lambda t: torch.tan(t * (torch.pi / 2)))
    sigma = torch.tensor([1e-6, 0.002, 1.0, 80.0])
    expected = sigma.double().atan() * (2 / torch.pi)
    torch.testing.assert_close(process.t_of_sigma(sigma), expected.float(), rtol=1e-6, atol=0)
