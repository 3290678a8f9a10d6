"""Find the patch size of an estimator at each noise level that is nearest to trained networks."""

from pathlib import Path
from typing import Any

import yaml
from pytorch_lightning.utilities import rank_zero_info

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import check_at_least, prefixed
from lit_knn.common.files import written_whole
from lit_knn.common.settings import describe
from lit_knn.common.tables import Row, text_table, write_rows
from lit_knn.estimators import Estimator
from lit_knn.figures.network_agreement import size_calibration
from lit_knn.metrics.kept_results import KeptResults
from lit_knn.metrics.latents import bind_all, check_not_empty
from lit_knn.metrics.same_noise import COLUMNS, SameNoise
from lit_knn.metrics.size_calibration import FIRST_SEED, best_sizes, calibration_curve, compare_sizes, sized
from lit_knn.modules import LitEstimator

NAME = "size_calibration"


class SizeCalibration(Measurement):
    """At validation, find the patch size for each noise level whose mean is nearest to the mean of trained networks.

    The rule is that of `lit_knn.metrics.size_calibration`: the least MSE at latents on the networks' own sampling
    trajectories, at the levels of the sampler of the model `LitEstimator`.

    The run's folder gets `calibrated.yaml`, the estimator with the table {t: size}, ready as a config; the calibration
    curve, `size_calibration.csv`; and its picture. Finished comparisons are kept in `folder`, and a run of the same
    settings does not make them again.

    Args:
        networks: trained networks, `lit_knn.estimators.Network`, by name.
        estimator: has an argument `size`, such as `PatchPosterior`; its own size is ignored.
        sizes: the sizes to choose from, in pixels.
        folder: folder that keeps the finished comparisons of all runs.
        num_latents: number of trajectories of each network. Their noise is not that of samples.
    """

    model_class = LitEstimator
    outputs = (f"{NAME}.csv", "calibrated.yaml")

    @prefixed("SizeCalibration")
    def __init__(
        self, networks: dict[str, Estimator], estimator: Estimator, sizes: list[int], folder: str, num_latents: int = 20
    ) -> None:
        check_not_empty(networks=networks)
        check_at_least(2, num_latents=num_latents)
        self.made = sized(estimator, sizes)
        self.networks = networks
        self.estimator = estimator
        self.folder = Path(folder)
        self.num_latents = num_latents

    def check(self) -> None:
        module, reference = self.module, self.reference.to(self.device)
        steps, grid = module.hparams.sampling_steps, module.grid
        parts = {f"networks.{name}": network for name, network in self.networks.items()}
        bind_all(parts | {f"sizes: {size}": own for size, own in self.made.items()}, reference, grid.sigma_max)
        self._source = SameNoise(reference, steps, grid, self.num_latents, self.seed, module.process)
        shared = {"first_seed": FIRST_SEED, **self._source.settings()}
        settings = {
            (name, size): {"network": describe(network), "estimator": describe(own), **shared}
            for name, network in self.networks.items()
            for size, own in self.made.items()
        }
        columns = {"network": str, "size": int, "t": float, "num_latents": int, **COLUMNS}
        self._kept = KeptResults(self.folder / f"{NAME}.csv", columns, ("network", "size", "t"), settings)

    def evaluate(self) -> None:
        total = len(self.networks) * len(self.made) * self._source.num_steps * self.num_latents
        with self.bar(total, "Size calibration", " estimates", leave=True) as bar:
            found = compare_sizes(self.made, self.networks, self._source, bar.update, self._kept.find)
            rows = [self._kept.add(row) for row in found]
        if self.is_first:
            self._show(rows)

    def _show(self, rows: list[Row]) -> None:
        """Write the table of sizes as an estimator, the curve and its picture."""
        sizes, curve = best_sizes(rows), calibration_curve(rows)
        write_rows(self.run_folder / f"{NAME}.csv", curve)
        path, given = self.run_folder / "calibrated.yaml", self.estimator.given()
        with written_whole(path) as partial:
            kind, names = type(self.estimator), ", ".join(self.networks)
            path_of_class = f"{kind.__module__.rpartition('.')[0]}.{kind.__qualname__}"
            config = yaml.safe_dump(
                {"class_path": path_of_class, "init_args": {**given, "size": sizes}}, sort_keys=False
            )
            partial.write_text(f"# Sizes of least MSE to the posterior mean of {names}.\n{config}")
        # Without a size, the estimator computes sizes from the data.
        rule: Any = type(self.estimator)(**{**given, "size": None}).bind(self._source.reference)
        tables = {"calibrated": sizes, "the rule of the spectrum (size: null)": rule.sizes_in_use}
        self.save_figure(size_calibration(curve, tables), NAME)
        best = [row for row in curve if row["size"] == sizes[row["t"]]]
        table = text_table(best, {"t": ".4g", "size": "d", "mse": ".3e", "r2": ".4f"})
        rank_zero_info(f"{table}\nThe estimator with these sizes: {path}")
