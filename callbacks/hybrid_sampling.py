"""Figure 5: samples of the probability flow, begun by an estimator and finished by a network or another estimator."""

import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from tqdm import tqdm

from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.files import written_whole
from lit_knn.common.pixels import are_pictures
from lit_knn.common.settings import describe, fingerprint
from lit_knn.common.tables import ResultsTable, Row
from lit_knn.estimators import Estimator
from lit_knn.figures import figure5, image_grid, save_figure
from lit_knn.metrics import FeatureExtractor, FidelityMeasure, InceptionV3
from lit_knn.metrics.hybrid import HybridSamples
from lit_knn.metrics.latents import check_at_least, try_estimator
from lit_knn.metrics.memorisation import MemorisationMetric, check_search
from lit_knn.metrics.samples import draw_samples, measure_samples
from lit_knn.modules import LitEstimator
from lit_knn.runs.pictures import save_picture, show_figure
from lit_knn.runs.run import check_new, compared_reference, data_reference, measuring_bar
from lit_knn.sampling.samplers import hybrid_sigmas

FORWARD = "forward"
GRID_SAMPLES = 64
Point = tuple[str, float]


class HybridSampling(pl.Callback):
    """For each t_switch, sample with each estimator down to t_switch and with the network below, and measure samples.

    The baseline, `forward`, starts the network from noisy data. The measurements are the distance to the data, the
    copied fraction and the mean distance to the nearest training image. Any estimator may take the network's place: an
    average over images of patches or of neighbourhoods generalises, too (`docs/analytic.md`).

    Each finished point is a row of a CSV file in `folder`; a run of the same settings does not compute it again. The
    last column is a hash of estimator, network, data, index and options; the JSON file of that name lists them. At the
    end the picture of the run's points is written to the run's own folder. Samples are split over the ranks by batches,
    which are the same for any number of ranks.

    Args:
        network: integrates below t_switch: a trained `lit_knn.estimators.Network`, or any other estimator that can
            sample. Random estimators draw apart on both sides of t_switch.
        estimators: integrate above t_switch, by name.
        t_switch: noise levels, each between the model's sigma_min and sigma_max.
        folder: folder that keeps the finished points of all runs, with a grid of samples of each.
        num_samples: samples of each point, with the seeds 0 to num_samples − 1.
        num_steps: levels of the sampler's grid, without t_switch, which is inserted.
        batch_size: samples drawn at a time, on each rank. An estimator's draws depend on it.
        extractor: maps samples and data to the features that are compared; null for Inception, whose distance is FID.
        threshold: largest ratio of nearest to second nearest distance at which a sample is a copy.
        cache_dir: folder that keeps the statistics of the data for other runs; null to keep none.
        held_out: measure the distance to the held-out images of the data (`data.held_out`), whose column ends in
            `_held_out`. The copied fraction and the nearest distance stay those of the training images.

    Raises:
        InputError: an option out of its range; at `setup`, a t_switch outside the noise levels, an estimator that
            cannot sample, a network that does not fit the data, or no held-out images.
    """

    def __init__(
        self,
        network: Estimator,
        estimators: dict[str, Estimator],
        t_switch: list[float],
        folder: str,
        num_samples: int = 50_000,
        num_steps: int = 18,
        batch_size: int = 500,
        extractor: FeatureExtractor | None = None,
        threshold: float = 1 / 3,
        cache_dir: str | None = "runs/fidelity_cache",
        held_out: bool = False,
    ) -> None:
        with prefixed("HybridSampling"):
            check_at_least(2, num_samples=num_samples)
            check_at_least(1, num_steps=num_steps, batch_size=batch_size)
            _check_names(estimators)
        if not t_switch:
            raise InputError("HybridSampling: t_switch is empty")
        MemorisationMetric(threshold)  # This refuses a bad threshold now.
        self.network = network
        self.estimators: dict[str, Estimator | None] = {**estimators, FORWARD: None}
        self.t_switch = sorted(set(t_switch), reverse=True)
        self.folder = Path(folder)
        self.num_samples = num_samples
        self.num_steps = num_steps
        self.batch_size = batch_size
        self.threshold = threshold
        extractor = InceptionV3() if extractor is None else extractor
        self.distance = FidelityMeasure(extractor, batch_size, cache_dir=cache_dir, held_out=held_out)
        self.held_out = held_out

    @property
    def metric(self) -> str:
        """Name of the distance, a column of the results."""
        return self.distance.metric

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check all settings and find the finished points, before any sample is drawn."""
        if stage != "validate":
            return
        if not isinstance(pl_module, LitEstimator):
            raise InputError(f"HybridSampling: needs the model LitEstimator, got {type(pl_module).__name__}")
        h = pl_module.hparams
        for t in self.t_switch:
            hybrid_sigmas(t, self.num_steps, pl_module.grid)
        reference = data_reference("HybridSampling", trainer).to(trainer.strategy.root_device)
        self._samples = HybridSamples(self.network, reference, self.num_steps, pl_module.grid, h.seed)
        check_new("HybridSampling", trainer, "hybrid_sampling.png", "hybrid_sampling.pdf")
        with prefixed("HybridSampling"):
            parts = {"network": self.network, **{f"estimators.{name}": own for name, own in self.estimators.items()}}
            for option, estimator in parts.items():
                if estimator is not None:
                    with prefixed(option):
                        estimator.check_levels(*pl_module.grid.noise_range())
                    try_estimator(option, estimator, reference, h.sigma_max)
        check_search(reference)
        self._real = compared_reference("HybridSampling", trainer, self.held_out)
        self.distance.prepare(self._real, self.num_samples)
        self._settings = self._describe()
        self._table = self._open_table()
        finished = on_first_rank(self._table.load)
        points = [(method, t) for t in self.t_switch for method in self.estimators]
        self._rows = {point: self._table.find(finished, **self._key(point)) for point in points}

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the unfinished points, and draw all points."""
        log_dir = trainer.log_dir  # Every rank must read `log_dir`, because reading it is a collective operation.
        if trainer.sanity_checking:
            return
        todo = [point for point, row in self._rows.items() if row is None]
        rank_zero_info(f"Hybrid sampling: {len(self._rows) - len(todo)} of {len(self._rows)} points are finished")
        with measuring_bar(trainer, len(todo) * self.num_samples, "Hybrid sampling", " samples", leave=True) as bar:
            for point in todo:
                bar.set_description(f"{point[0]}, t_switch={point[1]:g}")
                self._rows[point] = self._measure(point, trainer, bar)
        if trainer.is_global_zero:
            self._draw(trainer, Path(log_dir or self.folder))

    def _measure(self, point: Point, trainer: pl.Trainer, bar: tqdm) -> Row:
        method, t_switch = point
        start = time.monotonic()

        def show(seeds: Tensor, samples: Tensor) -> None:
            if seeds[0] == 0:
                self._save_grid(point, samples[:GRID_SAMPLES], trainer)
            bar.update(min(len(seeds) * trainer.world_size, bar.total - bar.n))

        draw, reference = partial(self._samples.draw, self.estimators[method], t_switch), self._samples.reference
        drawn = draw_samples(draw, self.num_samples, self.batch_size)
        options = (self.threshold, show, partial(measuring_bar, trainer), self._real)
        measured = measure_samples(drawn, reference, self.distance, *options)
        row: Row = {**self._key(point), **measured, "num_samples": self.num_samples, "num_steps": self.num_steps}
        row |= {"seed": self._samples.seed, "seconds": round(time.monotonic() - start, 2)}
        if trainer.is_global_zero:
            self._write_settings(method)
            self._table.append(row)
        return row

    def _key(self, point: Point) -> Row:
        return {"method": point[0], "t_switch": point[1], "settings": fingerprint(self._settings[point[0]])}

    def _describe(self) -> dict[str, Any]:
        """Describe everything that the results of each method depend on."""
        reference = self._samples.reference
        shared: dict[str, Any] = {
            "network": describe(self.network),
            "data": {"images": reference.fingerprint(), "index": describe(reference.index)},
            "extractor": self.distance.extractor.fingerprint(),
            "num_samples": self.num_samples,
            "num_steps": self.num_steps,
            "batch_size": self.batch_size,
            "threshold": self.threshold,
            "seed": self._samples.seed,
            **asdict(self._samples.grid),
        }
        if self.held_out:
            # Without the option, the hash stays that of earlier versions, whose points count as finished.
            shared["held_out"] = self._real.fingerprint()
        return {
            name: {"estimator": None if estimator is None else describe(estimator), **shared}
            for name, estimator in self.estimators.items()
        }

    def _open_table(self) -> ResultsTable:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"HybridSampling: folder={self.folder} cannot be made: {error.strerror}") from error
        measured = {self.metric: float, "copied_fraction": float, "mean_nearest_distance": float}
        options = {"num_samples": int, "num_steps": int, "seed": int, "seconds": float, "settings": str}
        columns = {"method": str, "t_switch": float, **measured, **options}
        # Each distance has its own file, because a file with other columns would count as damaged.
        path = self.folder / f"hybrid_sampling_{self.metric}.csv"
        return ResultsTable(path, columns, key=("method", "t_switch", "settings"))

    def _write_settings(self, method: str) -> None:
        path = self.folder / "settings" / f"{fingerprint(self._settings[method])}.json"
        with written_whole(path) as partial:
            partial.write_text(json.dumps(self._settings[method], indent=2) + "\n")

    def _save_grid(self, point: Point, samples: Tensor, trainer: pl.Trainer) -> None:
        if are_pictures(samples.shape[1:]):
            path = self.folder / "samples" / f"{point[0]}_t{point[1]:g}_{self._key(point)['settings']}.png"
            save_picture(trainer, image_grid(samples), path, f"samples/{point[0]}/t_switch={point[1]:g}")

    def _draw(self, trainer: pl.Trainer, folder: Path) -> None:
        rows = [row for row in self._rows.values() if row is not None]
        figure = figure5(rows, self.metric, FORWARD)
        picture, _ = save_figure(figure, folder / "hybrid_sampling")
        show_figure(trainer, "hybrid_sampling", figure)
        rank_zero_info(f"Results: {self._table.path}\nPicture: {picture}")


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name == FORWARD or not re.fullmatch(r"[\w.+-]+", name):
            rule = f"letters, digits and _.+- only, and {FORWARD!r} is the baseline"
            raise InputError(f"an estimator cannot be called {name!r}: {rule}")
