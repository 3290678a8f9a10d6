"""The arrows between the layers, read from the imports, and which files import heavy packages."""

import ast
from functools import cache

from tests import ROOT

# The list goes from the bottom room to the top. A module may import from its own folder and from earlier ones.
LAYERS = [
    "common",
    "theory",
    "index",
    "reference",
    "nets",
    "sampling",
    "estimators",
    "data",
    "metrics",
    "figures",
]
LAYERS += ["runs", "modules", "callbacks", "commands"]
# Only these folders import Lightning, and one file imports `faiss`. Metrics and figures need no trainer.
LIGHTNING_LAYERS = ["data", *LAYERS[LAYERS.index("runs") :]]
LIGHTNING = {"pytorch_lightning", "lightning"}
FAISS_FILE = ROOT / "lit_knn" / "index" / "faiss_library.py"
# These are imported inside the functions that use them, so that estimators load with only torch and NumPy.
HEAVY = LIGHTNING | {
    "faiss",
    "jsonargparse",
    "torchvision",
    "sklearn",
    "tqdm",
    "scipy",
    "matplotlib",
    "torch_fidelity",
}
HEAVY |= {"torchmetrics"}
LIGHT_LAYERS = LAYERS[: LAYERS.index("data")]
# `rglob` does not follow the link `lit_knn/callbacks`.
FILES = sorted([*(ROOT / "lit_knn").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")])
ROOMS = [path for path in FILES if path.parent != ROOT / "lit_knn"]


def layer_of(path):
    """The folder directly in `lit_knn`, or `callbacks`."""
    folder, *inner = path.relative_to(ROOT).parts
    return inner[0] if folder == "lit_knn" else folder


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_in(path, top=False):
    """Name what a file imports, also inside functions unless `top`."""
    tree, found = tree_of(path), set()
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            # `from lit_knn import x` may import the module x.
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def top_level(imports):
    return {name.partition(".")[0] for name in imports}


def offences(paths, rule):
    """Return what a rule finds, by the names of the files in which it finds something."""
    return {str(path.relative_to(ROOT)): found for path in paths if (found := sorted(rule(path)))}


def test_every_room_has_a_place_and_its_imports_point_down():
    assert {layer_of(path) for path in ROOMS} == set(LAYERS)
    above = {name: set(LAYERS[place + 1 :]) for place, name in enumerate(LAYERS)}

    def upwards(path):
        return {
            name.split(".")[1] for name in imports_in(path) if name.startswith("lit_knn.")
        } & above[layer_of(path)]

    assert not offences(ROOMS, upwards)


def test_lightning_and_faiss_are_imported_in_named_files_alone():
    def foreign(path):
        unknown = {"callbacks", "benchmarks", "main"}
        unknown |= LIGHTNING | {"jsonargparse"} if layer_of(path) not in LIGHTNING_LAYERS else set()
        return top_level(imports_in(path)) & (
            unknown | ({"faiss"} if path != FAISS_FILE else set())
        )

    assert not offences(ROOMS, foreign)


def test_heavy_packages_are_imported_where_they_are_used():
    light = [path for path in ROOMS if layer_of(path) in LIGHT_LAYERS]
    assert not offences(light, lambda path: top_level(imports_in(path, top=True)) & HEAVY)
