"""The arrows between the layers, read from the imports, and what an import pulls in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "lit_knn").rglob("*.py"))
LIGHTNING = {"pytorch_lightning", "lightning"}
LIGHTNING_FILES = ("ict.py", "edm.py", "evaluation.py", "training.py", "data.py")
HEAVY = LIGHTNING | {"faiss", "jsonargparse", "torchvision", "sklearn", "tqdm", "scipy", "matplotlib"}
HEAVY |= {"torchmetrics", "torch_fidelity"}
MATHS = ("solvers", "sampling", "schedules", "precond", "bounds", "metrics")


def module_of(path):
    """`lit_knn/index/base.py` -> `lit_knn.index.base`; a package is named by its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path, top=False):
    """Every module a file imports, also inside functions unless `top`; relative imports made absolute."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            # `from lit_knn import x` may import the module x.
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def top_level(names):
    return {name.partition(".")[0] for name in names}


def second_level(names):
    """The part after `lit_knn.` of each import from this package."""
    return {name.split(".")[1] for name in names if name.startswith("lit_knn.")}


def files_of(*concepts):
    return [path for path in FILES if path.relative_to(ROOT / "lit_knn").parts[0].removesuffix(".py") in concepts]


def test_the_reader_of_imports_sees_what_it_should(tmp_path):
    # The other tests pass on nothing if this one is wrong.
    seen = imports_of(ROOT / "lit_knn" / "index" / "faiss_index.py")
    assert {"faiss", "torch", "lit_knn.errors", "lit_knn.index.base"} <= seen
    assert len(FILES) > 15
    assert files_of("solvers")
    assert files_of("estimators")


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_their_files_import_lightning_faiss_and_callbacks(path):
    imported = top_level(imports_of(path))
    assert "callbacks" not in imported
    if path.relative_to(ROOT / "lit_knn").parts[0] not in LIGHTNING_FILES:
        assert not imported & LIGHTNING
    if path != ROOT / "lit_knn" / "index" / "faiss_index.py":
        assert "faiss" not in imported


@pytest.mark.parametrize("path", files_of(*MATHS), ids=module_of)
def test_maths_imports_nothing_above_the_posterior(path):
    own = path.relative_to(ROOT / "lit_knn").parts[0].removesuffix(".py")
    allowed = {"process", "posterior", "rng", "errors", "files", own}
    if own == "sampling":
        allowed |= {"solvers", "schedules"}  # a sampler takes the one's steps along the other's grid
    assert second_level(imports_of(path)) <= allowed


@pytest.mark.parametrize(
    ("concepts", "forbidden"),
    [
        (("process", "errors", "rng"), {"posterior", "proposal", "snis", "reference", "index", "estimators"}),
        (("posterior", "proposal", "snis"), {"reference", "index", "estimators"}),
        (("reference", "index"), {"estimators", "proposal", "snis"}),
        (("index",), {"reference"}),
    ],
    ids=str,
)
def test_lower_layers_do_not_look_up(concepts, forbidden):
    above = forbidden | {"ict", "edm", "data", "metrics", "solvers", "sampling", "schedules", "precond", "nets"}
    for path in files_of(*concepts):
        assert not second_level(imports_of(path)) & above, path


def test_estimators_know_nothing_of_training():
    training = {"ict", "edm", "training", "conditional", "data", "solvers", "sampling", "schedules"}
    for path in files_of("estimators", "classes"):
        assert not second_level(imports_of(path)) & training, path


def test_network_files_lie_between_networks_and_estimators():
    inert = {"inert_objects", "inert_numpy", "inert_pickle"}
    readers = {"edm_pickle", "edm_converted"}
    door = {"edm_checkpoint"}
    assert len(files_of(*inert, *readers, *door)) == 6
    for path in files_of(*inert):
        assert second_level(imports_of(path)) <= inert | {"errors"}, path
    for path in files_of(*readers):
        assert second_level(imports_of(path)) <= inert | readers | {"errors"}, path
    for path in files_of(*door):
        assert second_level(imports_of(path)) <= readers | {"errors", "nets", "precond"}, path
    for path in files_of("nets", "precond"):
        assert not second_level(imports_of(path)) & (inert | readers | door), path
    # One door: nothing else opens network files.
    for path in set(FILES) - set(files_of(*inert, *readers, *door)):
        assert not second_level(imports_of(path)) & (inert | readers), path


def test_the_library_imports_heavy_packages_where_they_are_used():
    # torch loads tqdm by itself, where it is installed, so that the next test cannot see it.
    library = (
        "prepare",
        "prepared",
        "prepare_source",
        "process",
        "posterior",
        "proposal",
        "snis",
        "classes",
        "reference",
        "index",
        "estimators",
        "solvers",
        "sampling",
    )
    library += ("prepare", "prepare_source", "prepare_writer", "prepared", "image_files")
    for path in files_of(*library, "schedules", "precond", "bounds", "errors", "rng", "__init__"):
        assert not top_level(imports_of(path, top=True)) & HEAVY, path


def test_the_library_loads_without_the_application():
    # A fresh interpreter: this one has loaded everything. What torch itself brings along is not ours to forbid.
    code = (
        "import sys, torch, numpy; before = set(sys.modules); "
        "import lit_knn.estimators, lit_knn.solvers, lit_knn.sampling; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "lit_knn" in loaded
    assert not loaded & HEAVY


def test_preparing_images_needs_no_torch():
    # Its workers and restarts would each pay seconds for it.
    code = "import sys, lit_knn.prepare; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
