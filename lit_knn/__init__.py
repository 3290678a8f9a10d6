"""Diffusion generative models with plug-in score estimators. `docs/architecture.md` maps the rooms."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_knn.sampling.loading import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # `import lit_knn` does not load torch.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_knn.sampling.loading import load

    return load
