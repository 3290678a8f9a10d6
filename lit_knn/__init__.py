"""Diffusion generative models with plug-in score estimators. `docs/architecture.md` describes the subpackages."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_knn.sampling.loading import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"

# In a checkout, `callbacks` and `configs` are links to the folders beside this package. If the links were lost (as in
# some archives), Python finds both through the path added here.
if not (Path(__file__).parent / "callbacks").is_dir():
    __path__.append(str(Path(__file__).parents[1]))


def __getattr__(name: str) -> Any:
    # `load` is imported only when it is used, because it needs torch, which takes seconds to import.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_knn.sampling.loading import load

    return load
