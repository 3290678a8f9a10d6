"""The lowest versions in pyproject.toml have what the code uses."""

import ast
import re
import tomllib

import pytest

from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Arguments that functions got later, and the first release that has them.
NEW_IN_PYTORCH = {("mm", "out_dtype"): (2, 8), ("bmm", "out_dtype"): (2, 8)}
NEW_IN_JSONARGPARSE = {("save", "skip_unset"): (4, 50)}
TRAIN = PROJECT["optional-dependencies"]["train"]


def floor(name, requirements):
    (found,) = {match[1] for r in requirements if (match := re.match(rf"{name}>=([\d.]+)", r))}
    return tuple(int(part) for part in found.split("."))


def used_arguments():
    for folder in ("lit_knn", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    yield from ((node.func.attr, keyword.arg) for keyword in node.keywords)


@pytest.mark.parametrize(
    ("package", "requirements", "new"),
    [("torch", PROJECT["dependencies"], NEW_IN_PYTORCH), (r"jsonargparse\[signatures\]", TRAIN, NEW_IN_JSONARGPARSE)],
)
def test_the_lowest_version_has_the_arguments_that_are_used(package, requirements, new):
    needed = [new[used] for used in used_arguments() if used in new]
    assert needed  # Otherwise nothing needs this release any more.
    assert floor(package, requirements) >= max(needed)


def test_the_lowest_torchvision_belongs_to_the_lowest_pytorch():
    (_, torch_minor) = floor("torch", PROJECT["dependencies"])
    (_, vision_minor) = floor("torchvision", TRAIN)
    assert vision_minor == torch_minor + 15
