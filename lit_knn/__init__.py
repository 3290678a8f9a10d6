"""Diffusion generative models with plug-in score estimators. `docs/architecture.md` maps the rooms."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_knn.sampling.loading import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"

# A checkout has the folders `callbacks` and `configs` beside this one, and links to them in it. Where an archive of the
# repository has lost the links, Python looks for `lit_knn.callbacks` and `lit_knn.configs` beside this folder.
if not (Path(__file__).parent / "callbacks").is_dir():
    __path__.append(str(Path(__file__).parents[1]))


def __getattr__(name: str) -> Any:
    # `import lit_knn` does not load torch.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_knn.sampling.loading import load

    return load
