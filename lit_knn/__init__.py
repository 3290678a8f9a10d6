"""Diffusion generative models with plug-in score estimators: the map of the layers, from the bottom to the top.

Each line imports from the lines above it alone; `tests/test_layers.py` holds that. `docs/architecture.md` draws it.

- `startup`, `errors`, `rng`, `settings`, `atomic_files`, `extras`, `stopwatch`, `memory`, `deferred_checks`,
  `distributed`, `child_process`, `versions`, `results`: small tools; `checkpoint_file`: reads checkpoints safely;
  `run_folder`: names the files of a run.
- `theory`: the paper as pure functions; `linalg`: number types, integer products, principal components.
- `images`: files of images on a disk; `prepare`: the command that makes one file of many; `pixels`: of images
  in model space.
- `solvers`, `schedules`, `sampling`, `flow_sampling`, `guidance`: steps of the ODE, noise levels, samplers.
- `autoencoders`: from images to latents and back.
- `index`: neighbour search; `reference`: the data set that estimators average over, whole or in shards.
- `nets`: networks, and a reader of EDM's published ones.
- `generative_models`: trained networks with their samplers; `loading`: `lit_knn.load(path)` reads them from any file.
- `estimators`: the plug-ins, which all estimate the posterior mean.
- `metrics`: measurements; `figures`: their pictures; `referee`: the benchmark of anybody's estimators on frozen cases.
- `data`: data modules; `training`: what the training modules share.
- `ict`, `ect`, `edm`, `flow`, `lit_estimator`: the Lightning modules.
- `planning`, `best_checkpoint`, `export`, `average`, `report`, `trainer`: the commands `plan`, `best`, `export`,
  `average` and `report`.
- `callbacks`: Lightning callbacks, one a file.
- `command_line`: the command `lit-knn`, which is `main.py` in a checkout and `python -m lit_knn`; checks of config
  files, values and the trainer's options; the one line that tells an error.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_knn.loading import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # `import lit_knn` alone loads no torch.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_knn.loading import load

    return load
