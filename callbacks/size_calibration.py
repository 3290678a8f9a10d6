"""Find the patch size of an estimator at each noise level that is nearest to trained networks."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from pytorch_lightning.utilities import rank_zero_info

from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.files import written_whole
from lit_knn.common.settings import describe, fingerprint
from lit_knn.common.tables import ResultsTable, Row, text_table, write_rows
from lit_knn.estimators import Estimator
from lit_knn.figures import save_figure, size_calibration
from lit_knn.metrics.agreement import MEASURES
from lit_knn.metrics.same_noise import SameNoise
from lit_knn.metrics.size_calibration import (
    FIRST_SEED,
    best_sizes,
    calibration_curve,
    check_calibration,
    compare_sizes,
    sized,
)
from lit_knn.modules import LitEstimator
from lit_knn.runs.pictures import show_figure
from lit_knn.runs.run import check_new, data_reference, measuring_bar

NAME = "size_calibration"


class SizeCalibration(pl.Callback):
    """At validation, find for each noise level the size whose posterior mean is nearest to that of trained networks.

    The rule is that of `lit_knn.metrics.size_calibration.calibrated_sizes`: the least MSE at latents on the networks'
    own sampling trajectories, at the levels of the sampler of the model `LitEstimator`.

    The run's folder gets `calibrated.yaml`, the estimator with the table {t: size}, ready as a config; the calibration
    curve, `size_calibration.csv`; and its picture. Finished comparisons are kept in `folder`, and a run of the same
    settings does not make them again.

    Args:
        networks: trained networks, `lit_knn.estimators.Network`, by name.
        estimator: has an argument `size`, such as `PatchPosterior`; its own size is ignored.
        sizes: the sizes to choose from, in pixels.
        folder: folder that keeps the finished comparisons of all runs.
        num_latents: number of trajectories of each network. Their noise is not that of samples.

    Raises:
        InputError: an option out of its range, an estimator without sizes, a size that it refuses; at `setup`, a
            network that does not fit the data, a size above the images', or results of an earlier run in the run's
            folder.
    """

    @prefixed("SizeCalibration")
    def __init__(
        self,
        networks: dict[str, Estimator],
        estimator: Estimator,
        sizes: list[int],
        folder: str,
        num_latents: int = 20,
    ) -> None:
        self.made = sized(estimator, sizes)
        self.networks = networks
        self.estimator = estimator
        self.folder = Path(folder)
        self.num_latents = num_latents

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check all settings and find the finished comparisons, before any long work."""
        if stage != "validate":
            return
        if not isinstance(pl_module, LitEstimator):
            raise InputError(f"SizeCalibration: needs the model LitEstimator, got {type(pl_module).__name__}")
        reference = data_reference("SizeCalibration", trainer).to(trainer.strategy.root_device)
        check_new("SizeCalibration", trainer, f"{NAME}.csv", "calibrated.yaml")
        h = pl_module.hparams
        with prefixed("SizeCalibration"):
            check_calibration(self.made, self.networks, reference, self.num_latents, h.sigma_max)
        self._source = SameNoise(
            reference, h.sampling_steps, pl_module.grid, self.num_latents, int(h.seed), pl_module.process
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"SizeCalibration: folder={self.folder} cannot be made: {error.strerror}") from error
        measured = {f"{name}{end}": float for name in MEASURES for end in ("", "_se")}
        columns = {"network": str, "size": int, "t": float, "num_latents": int, **measured, "settings": str}
        self._table = ResultsTable(self.folder / f"{NAME}.csv", columns, key=("network", "size", "t", "settings"))
        self._finished = on_first_rank(self._table.load)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare what is not finished. Every rank makes all comparisons, and the first one writes."""
        log_dir = trainer.log_dir  # Every rank must read `log_dir`, because reading it is a collective operation.
        if trainer.sanity_checking:
            return
        hashes = {
            (name, size): fingerprint(self._describe(network, own))
            for name, network in self.networks.items()
            for size, own in self.made.items()
        }

        def finished(name: str, size: int, t: float) -> Row | None:
            return self._table.find(self._finished, network=name, size=size, t=t, settings=hashes[name, size])

        rows: list[Row] = []
        total = len(hashes) * self._source.num_steps * self.num_latents
        with measuring_bar(trainer, total, "Size calibration", " estimates", leave=True) as bar:
            for row in compare_sizes(self.made, self.networks, self._source, bar.update, finished):
                if "settings" not in row:
                    row["settings"] = hashes[row["network"], row["size"]]
                    if trainer.is_global_zero:
                        self._table.append(row)
                rows.append(row)
        if trainer.is_global_zero:
            self._show(trainer, Path(log_dir or self.folder), rows)

    def _describe(self, network: Estimator, estimator: Estimator) -> dict[str, Any]:
        own = {"network": describe(network), "estimator": describe(estimator), "first_seed": FIRST_SEED}
        return {**own, **self._source.settings()}

    def _show(self, trainer: pl.Trainer, folder: Path, rows: list[Row]) -> None:
        """Write the table of sizes as an estimator, the curve and its picture."""
        sizes, curve = best_sizes(rows), calibration_curve(rows)
        write_rows(folder / f"{NAME}.csv", curve)
        path = folder / "calibrated.yaml"
        with written_whole(path) as partial:
            partial.write_text(self._as_config(sizes))
        tables = {"calibrated": sizes, "the rule of the spectrum (size: null)": self._by_rule()}
        figure = size_calibration(curve, tables)
        save_figure(figure, folder / NAME)
        show_figure(trainer, NAME, figure)
        best = [row for row in curve if row["size"] == sizes[row["t"]]]
        table = text_table(best, {"t": ".4g", "size": "d", "mse": ".3e", "r2": ".4f"})
        rank_zero_info(f"{table}\nThe estimator with these sizes: {path}")

    def _as_config(self, sizes: dict[float, int]) -> str:
        kind = type(self.estimator)
        names = ", ".join(self.networks)
        given = {**self.estimator.given(), "size": sizes}
        config = {"class_path": f"{kind.__module__.rpartition('.')[0]}.{kind.__qualname__}", "init_args": given}
        return f"# Sizes of least MSE to the posterior mean of {names}.\n{yaml.safe_dump(config, sort_keys=False)}"

    def _by_rule(self) -> dict[float, int]:
        """Return the sizes that the estimator computes from the data."""
        computed: Any = type(self.estimator)(**{**self.estimator.given(), "size": None}).bind(self._source.reference)
        return dict(computed.sizes_in_use)
