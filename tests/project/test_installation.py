"""An installation: the command, the configs by name, what works without extras, and which Pythons it names."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from lit_knn.commands import entry
from lit_knn.commands.cli.cli import CLI
from lit_knn.commands.cli.packaged_configs import with_packaged_configs, with_packaged_parts
from lit_knn.common import extras
from lit_knn.common.one_line import one_line
from tests import ROOT
from tests.image_files import refusal

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEMO = str(ROOT / "configs" / "demo.yaml")
# The import of each requirement that has another name, and requirements that the library does not import itself.
MODULES = {
    "pytorch-lightning": "pytorch_lightning",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
}
MODULES |= {"faiss-gpu": "faiss", "faiss-cpu": "faiss", "torch-fidelity": "torch_fidelity"}
LIGHTNING = {"lightning_fabric"}


def requirements(extra):
    """The packages of an extra, those of the extras that it names included."""
    for line in PROJECT["optional-dependencies"][extra]:
        found = Requirement(line)
        if found.name == "lit-knn":
            for inner in found.extras:
                yield from requirements(inner)
        else:
            yield found


def test_config_is_found_by_name_and_a_users_file_wins(tmp_path, own_folder):
    names = ["demo", "demo.yaml", "configs/demo.yaml", "./configs/demo.yaml"]
    for name in names:
        assert with_packaged_configs(["fit", "-c", name]) == ["fit", "-c", DEMO]
        assert with_packaged_configs(["fit", f"--config={name}"]) == ["fit", f"--config={DEMO}"]
    part = ["--model.net", "models/unet.yaml"]
    ours = str(ROOT / "configs" / "models" / "unet.yaml")
    options = {"model": [{"net": "models/unet.yaml"}]}
    assert with_packaged_configs(part) == ["--model.net", ours]
    assert with_packaged_parts(options, tmp_path) == {"model": [{"net": ours}]}
    for path in (tmp_path / "models" / "unet.yaml", tmp_path / "configs" / "demo.yaml"):
        path.parent.mkdir()
        path.touch()
    assert with_packaged_configs(part) == part
    assert with_packaged_parts(options, tmp_path) == options
    assert with_packaged_configs(["-c", names[2]]) == ["-c", names[2]]


def test_a_part_that_is_missing_is_named_with_the_nearest(tmp_path, monkeypatch):
    options = {"model": {"init_args": {"estimator": "estimators/kn.yaml"}}}
    line = refusal(with_packaged_parts, options, tmp_path)
    assert line.startswith("estimators/kn.yaml: no such file; did you mean estimators/knn")
    # Other texts are left to the option, and the parser replaces ~.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").touch()
    options = {"out": "new.yaml", "estimator": "~/mine.yaml"}
    assert with_packaged_parts(options, tmp_path / "elsewhere") == options


def test_an_unknown_config_tells_what_there_is(own_folder):
    assert "did you mean table1/ict_knn" in refusal(with_packaged_configs, ["-c", "table1/ict_kn"])
    message = refusal(with_packaged_configs, ["-c", "nothing"])
    assert "demo, " in message
    assert "evaluate/fid" in message
    assert "estimators/knn" not in message  # This is a part of a run.
    assert refusal(with_packaged_configs, ["-c", "mine.yaml"]).endswith("no such file")


def told_by(capsys, *args):
    with pytest.raises(SystemExit, match="0"):
        entry.main([*args])
    return capsys.readouterr().out


def test_help_has_every_command_and_option_below_short_usage(capsys):
    said = told_by(capsys, "--help")
    assert all(re.search(rf"^  {name} ", said, re.MULTILINE) for name in entry.COMMANDS)
    assert {*CLI.subcommands(), *entry.COMMANDS_WITH_OWN_PARSER} == {*entry.COMMANDS}
    for name in entry.COMMANDS_WITH_OWN_PARSER:  # They have parsers of their own.
        assert f"lit-knn {name}" in told_by(capsys, name, "--help")
    printed = told_by(capsys, "plan", "--help")
    assert len(printed[: printed.index("options:")].splitlines()) < 8
    for option in (
        "--seed_everything",
        "--image_shape",
        "--model ",
        "--data ",
        "--optimizer ",
        "--trainer.max_steps",
    ):
        assert f"\n  {option}" in printed


# A process of its own, in which these packages cannot be imported.
ALONE = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import torch
from lit_knn.commands.entry import main
from lit_knn.estimators import KNN, Exact
from lit_knn.reference import ReferenceSet
x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
reference = ReferenceSet(x)
print(type(reference.index).__name__)
z = x[:5] + 1
mu = Exact().bind(reference).posterior_mean(z, 1.0)
weights = torch.softmax(-torch.cdist(z.double(), x.double()) ** 2 / 2, 1)
assert torch.allclose(mu.double(), weights @ x.double(), atol=1e-5)
assert KNN(k=50, n=200).bind(reference).posterior_mean(z, 1.0).isfinite().all()
main(["fit", "-c", "demo"])
"""


def test_estimators_need_torch_and_numpy_alone():
    absent = {*extras.EXTRAS, "scipy"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(absent=absent)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "FlatIndex\n", done.stderr
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: \w+ is not installed: pip install 'lit_knn\[train\]'\n", done.stderr
    )


def modules_of(extra):
    return {MODULES.get(found.name, found.name.replace("-", "_")) for found in requirements(extra)}


def test_the_classifiers_name_all_pythons_from_the_oldest():
    versions = [
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if " :: Python :: 3." in line
    ]
    oldest = PROJECT["requires-python"].removeprefix(">=3.")
    # All requirements have wheels for these.
    assert versions == [f"3.{minor}" for minor in range(int(oldest), 15)]
    assert f"3.{sys.version_info.minor}" in versions


def test_every_import_is_a_requirement_and_every_extra_is_known():
    imported = set()
    for path in (ROOT / "lit_knn").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    # PyTorch brings Triton, and Lightning its parts.
    foreign = imported - set(sys.stdlib_module_names) - {"lit_knn", "torch", "numpy", "triton"}
    assert foreign <= modules_of("all") | LIGHTNING
    assert foreign <= set(extras.EXTRAS)
    for module, extra in extras.EXTRAS.items():
        assert module in modules_of(extra) | LIGHTNING, module
    for module in ("faiss", "sklearn.datasets"):
        missing = f"{module.partition('.')[0]} is not installed: pip install 'lit_knn["
        assert one_line(ModuleNotFoundError(name=module))[0].startswith(missing)
    assert one_line(ModuleNotFoundError("no", name="lit_knn.no_such_module"))[1] == 1
