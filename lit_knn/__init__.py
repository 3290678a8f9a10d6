"""Diffusion generative models with plug-in score estimators. `docs/architecture.md` maps the rooms.

Each room imports only from the rooms above it in this list; `tests/project/test_layers.py` checks this.

- `common`: errors, random streams, files, ranks, memory.
- `theory`: the paper as pure functions.
- `index`: neighbour search, with its products and principal components.
- `reference`: the data set that estimators average over, whole or in shards.
- `nets`: networks, and a reader of EDM's published ones.
- `sampling`: steps of the ODE, noise levels, samplers, the models that sample; `lit_knn.load(path)` reads them.
- `estimators`: the plug-ins, which all estimate the posterior mean.
- `metrics`: measurements; `figures`: their pictures.
- `data`: image files and data modules.
- `runs`: the folder of a run, its checkpoints, resuming; `modules`: the Lightning modules.
- `callbacks`: Lightning callbacks, one in each file; a link to the folder `callbacks` of a checkout.
- `referee`: a benchmark on frozen cases, for anybody's estimators.
- `commands`: the command `lit-knn`; each subcommand has a file. `configs`: a link to the configurations.
"""

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
