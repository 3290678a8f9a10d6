"""The arrows between the layers, read from the imports; and the packages that an import loads."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from lit_knn import estimators
from tests import ROOT

# The list goes from the bottom room to the top. A module may import from its own folder and from earlier lines.
LAYERS = (
    ("common",),
    ("theory",),
    ("index",),
    ("reference",),
    ("nets",),
    ("sampling",),
    ("estimators",),
    ("metrics",),
    ("figures",),
    ("data",),
    ("runs",),
    ("modules",),
    ("callbacks",),
    ("referee",),
    ("commands",),
)
PLACE = {name: place for place, names in enumerate(LAYERS) for name in names}
# Only these folders and files import Lightning; `faiss` has one file.
LIGHTNING_LAYERS = LAYERS[LAYERS.index(("data",)) :]
LIGHTNING = {"pytorch_lightning", "lightning"}
FAISS_FILE = Path("index/faiss_index.py")
# These are imported inside the functions that use them, so that estimators load with only torch and NumPy.
HEAVY = LIGHTNING | {"faiss", "jsonargparse", "torchvision", "sklearn", "tqdm", "scipy", "matplotlib", "torch_fidelity"}
HEAVY |= {"torchmetrics"}
LIGHT_LAYERS = LAYERS[: LAYERS.index(("metrics",))]
# `rglob` does not follow the link `lit_knn/callbacks`.
FILES = sorted([*(ROOT / "lit_knn").rglob("*.py"), *(ROOT / "lit_knn" / "callbacks").glob("*.py")])


def module_of(path, root=ROOT):
    """`lit_knn/index/base.py` -> `lit_knn.index.base`; a package is named by its folder."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _nodes(text, top):
    tree = ast.parse(text)
    return tree.body if top else list(ast.walk(tree))


def nodes_of(path, top=False):
    """All nodes of a file, or only its statements; most files are read by several rules, and parsed once."""
    return _nodes(path.read_text(encoding="utf-8"), top)


def imports_of(path, top=False, root=ROOT):
    """List every module that a file imports, also inside functions unless `top`; relative imports become absolute."""
    package = module_of(path, root) if path.name == "__init__.py" else module_of(path, root).rpartition(".")[0]
    found = set()
    for node in nodes_of(path, top):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            # `from lit_knn import x` may import the module x.
            found.update([base] if base != "lit_knn" else [])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def layer_of(path, root=ROOT):
    """The folder or file directly in `lit_knn`; None for the package itself."""
    parts = path.relative_to(root / "lit_knn").parts
    return None if parts == ("__init__.py",) else parts[0].removesuffix(".py")


def upward_imports(path, root=ROOT):
    """The imports of a file from higher layers, or from other names in its own layer's line."""
    own = layer_of(path, root)
    asked = {name.split(".")[1] for name in imports_of(path, root=root) if name.startswith("lit_knn.")} - {own}
    return {name for name in asked if PLACE[name] >= PLACE[own]}


def top_level(names):
    return {name.partition(".")[0] for name in names}


def test_every_file_has_a_place_and_every_place_a_file():
    assert {layer_of(path) for path in FILES} - {None} == set(PLACE)


def test_the_rule_sees_an_arrow_that_runs_up(tmp_path):
    # If the reader of imports is wrong, the other tests pass without checking anything.
    for line, expected in [
        ("from lit_knn.estimators import KNN", {"estimators"}),
        ("def f():\n    from lit_knn.metrics.features import Pixels", {"metrics"}),
        ("from .. import estimators", {"estimators"}),
        ("from ..estimators.knn import KNN", {"estimators"}),
        ("import lit_knn.figures.figure3", {"figures"}),
        ("from lit_knn.common.errors import InputError\nfrom .base import Index", set()),
    ]:
        path = tmp_path / "lit_knn" / "index" / "new.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line)
        assert upward_imports(path, tmp_path) == expected, line


def offences(paths, rule):
    """Return what a rule finds, by the names of the files in which it finds something."""
    return {module_of(path): found for path in paths if (found := sorted(rule(path)))}


def test_imports_point_down():
    assert not offences([path for path in FILES if layer_of(path)], upward_imports)


def foreign_imports(path, root=ROOT):
    """The top-level imports of packages that this file must not know."""
    imported = top_level(imports_of(path, root=root))
    found = imported & {"callbacks", "benchmarks", "main"}
    if not any(layer_of(path, root) in names for names in LIGHTNING_LAYERS):
        found |= imported & LIGHTNING
    return found | (imported & {"faiss"} if path != root / "lit_knn" / FAISS_FILE else set())


def test_only_some_files_know_the_application_lightning_and_faiss():
    assert not offences([path for path in FILES if layer_of(path)], foreign_imports)


def test_the_library_imports_heavy_packages_where_they_are_used():
    # torch itself loads tqdm if it is installed, so the next test cannot check it.
    light = [path for path in FILES if any(layer_of(path) in names for names in LIGHT_LAYERS)]
    assert not offences(light, lambda path: top_level(imports_of(path, top=True)) & HEAVY)


def test_the_library_loads_without_the_application():
    # This interpreter has loaded everything, so the test starts a new one. Modules that torch loads are allowed.
    code = (
        "import sys, torch, numpy; before = set(sys.modules); "
        "import lit_knn.estimators, lit_knn.sampling.solvers, lit_knn.sampling.samplers; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before}); "
        "import lit_knn.metrics, lit_knn.figures; print(*{name.partition('.')[0] for name in sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded, with_figures = (set(line.split()) for line in result.stdout.splitlines())
    assert "lit_knn" in loaded
    assert not loaded & HEAVY
    # Metrics and figures may load more, but not Lightning.
    assert not with_figures & {"pytorch_lightning", "lightning", "jsonargparse"}


PRODUCT = [*FILES, *sorted((ROOT / "benchmarks").glob("*.py"))]


# `DrawingEstimator` is the contract of what certifies its own error.
KINDS = set(estimators.__all__) - {"Estimator", "DrawingEstimator", "Holdings", "Query", "Certificate"}


def questions_of_kind(path):
    """The `isinstance` that ask for a kind of estimator."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            asked = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
            if asked & KINDS:
                yield ast.unparse(node)


def test_no_algorithm_asks_for_a_kind_of_estimator():
    # It asks a property or for a contract, which an estimator kept outside the project may have, too.
    assert not offences(PRODUCT, questions_of_kind)


KEYED = {"keyed_generator": 1, "keyed_default_rng": 1, "seed_from_key": 0}


def own_streams(path):
    """The keys of several parts that hold a number of the module's own, and none of `lit_knn.common.rng.Stream`."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in KEYED:
            key = [ast.unparse(part) for part in node.args[KEYED[node.func.id] :]]
            numbers = [part for part in key if part.isdigit() or part.isupper()]
            if len(key) > 1 and numbers and not any(part.startswith("Stream.") for part in key):
                yield ", ".join(key)


def test_all_random_streams_stand_in_one_table():
    assert not offences(FILES, own_streams)
