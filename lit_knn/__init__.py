"""Diffusion generative models with plug-in score estimators: the map of the layers, from the bottom to the top.

Each line imports from the lines above it alone; `tests/test_layers.py` holds that. `docs/architecture.md` draws it.

- `startup`, `errors`, `rng`, `settings`, `atomic_files`, `stopwatch`, `memory`, `deferred_checks`, `distributed`,
  `results`: small tools; `checkpoint_file`: reads checkpoints safely.
- `theory`: the paper as pure functions; `linalg`: number types, integer products, principal components.
- `images`: files of images on a disk; `prepare`: the command that makes one file of many.
- `solvers`, `schedules`, `sampling`: steps of the ODE, noise levels, samplers.
- `index`: neighbour search; `reference`: the data set that estimators average over, whole or in shards.
- `nets`: networks; `edm_checkpoint`: the one door to files of networks.
- `estimators`: the plug-ins, which all estimate the posterior mean.
- `metrics`: measurements; `figures`: their pictures.
- `data`: data modules; `training`: what the training modules share.
- `ict`, `edm`, `lit_estimator`: the Lightning modules.
- `planning`, `best_checkpoint`, `report`, `average`, `trainer`: the commands `plan`, `best`, `report` and `average`.
- `command_line`: checks of config files, values and the trainer's options; the one line that tells an error.
"""
