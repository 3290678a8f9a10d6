"""Figure 5: samples that an estimator begins at high noise levels and a network finishes."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from tqdm import tqdm

from lit_knn.callbacks.hybrid_points import FORWARD, check_names, open_points
from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import check_at_least, prefixed
from lit_knn.common.pixels import are_pictures
from lit_knn.common.settings import describe
from lit_knn.common.tables import Row
from lit_knn.estimators import Estimator
from lit_knn.figures import figure5, image_grid
from lit_knn.metrics import FeatureExtractor, FidelityMeasure
from lit_knn.metrics.hybrid import HybridSamples
from lit_knn.metrics.latents import bind_all, check_not_empty, draw_samples
from lit_knn.metrics.memorisation import MemorisationMetric, check_search, nearest_images
from lit_knn.modules import LitEstimator
from lit_knn.sampling.hybrid_sampler import hybrid_sigmas

GRID_SAMPLES = 64


class HybridSampling(Measurement):
    """Draw samples with each estimator above t_switch and with the network below it, and measure them.

    The baseline, `forward`, starts the network from noisy data. The measurements are the distance to the data, the
    copied fraction and the mean distance to the nearest training image. Any estimator may take the network's place: one
    that averages over patches or neighbourhoods of images generalises, too (`docs/analytic.md`).

    A point is a method (an estimator or `forward`) with a t_switch. Each finished point is a row of a CSV file in
    `folder`; a run with the same settings does not compute it again. The last column is a hash of estimator, network,
    data, index and options; the JSON file of that name lists them. At the end a picture of the run's points is written
    to the run's own folder. Samples are split over the ranks by batches, which are the same for any number of ranks.

    Args:
        network: integrates below t_switch: a trained `lit_knn.estimators.Network`, or any other estimator that can
            sample. A random estimator makes independent draws above and below.
        estimators: integrate above t_switch, by name.
        t_switch: noise levels, each between the model's sigma_min and sigma_max.
        folder: folder that keeps the finished points of all runs, with a grid of samples of each.
        num_samples: samples of each point, with the seeds 0 to num_samples − 1.
        num_steps: levels of the sampler's grid, without t_switch, which is inserted.
        batch_size: samples drawn at a time, on each rank. An estimator's draws depend on it.
        extractor: maps samples and data to the features that are compared; null for Inception, whose distance is FID.
        threshold: largest ratio of nearest to second nearest distance at which a sample is a copy.
        cache_dir: folder that keeps the statistics of the data for other runs; null to keep none.
        held_out: measure the distance to the held-out images of the data (`data.held_out`); the name of its column
            then ends in `_held_out`. The copied fraction and the nearest distance stay those of the training images.
    """

    model_class = LitEstimator
    outputs = ("hybrid_sampling.png", "hybrid_sampling.pdf")

    @prefixed("HybridSampling")
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
        check_at_least(2, num_samples=num_samples)
        check_at_least(1, num_steps=num_steps, batch_size=batch_size)
        check_names(estimators)
        check_not_empty(t_switch=t_switch)
        MemorisationMetric(threshold)  # called for the error that it raises if this is bad
        self.network = network
        self.estimators = estimators
        self.t_switch = sorted(set(t_switch), reverse=True)
        self.folder = Path(folder).expanduser()
        self.num_samples = num_samples
        self.num_steps = num_steps
        self.batch_size = batch_size
        self.threshold = threshold
        self.measure = FidelityMeasure(
            extractor, batch_size, cache_dir=cache_dir, held_out=held_out
        )
        self.held_out = held_out

    def check(self) -> None:
        """Check levels, estimators and data, and open the table of the finished points."""
        grid = self.module.grid
        reference = self.reference.to(self.device)
        for t in self.t_switch:
            hybrid_sigmas(t, self.num_steps, grid)  # called for its error if t is outside the grid

        by_option = {"network": self.network}
        for name, estimator in self.estimators.items():
            by_option[f"estimators.{name}"] = estimator
        for option, estimator in by_option.items():
            with prefixed(option):
                estimator.check_lies_within(*grid.noise_range())
        bind_all(by_option, reference, grid.sigma_max)

        check_search(reference)
        self._samples = HybridSamples(self.network, reference, self.num_steps, grid, self.seed)
        self._real = self.real_images(self.held_out)
        self.measure.prepare(self._real, self.num_samples)
        metric = self.measure.metric
        self._finished = open_points(self.folder, metric, self.estimators, self._describe())

    def evaluate(self) -> None:
        """Measure the points that are not finished yet, and draw all points."""
        methods = [*self.estimators, FORWARD]
        points = [(method, t_switch) for t_switch in self.t_switch for method in methods]
        unfinished = [point for point in points if self._finished.find(*point) is None]
        num_finished = len(points) - len(unfinished)
        rank_zero_info(f"Hybrid sampling: {num_finished} of {len(points)} points are finished")

        total = len(unfinished) * self.num_samples
        with self.bar(total, "Hybrid sampling", " samples", leave=True) as bar:
            for method, t_switch in unfinished:
                bar.set_description(f"{method}, t_switch={t_switch:g}")
                self._finished.add(self._measure(method, t_switch, bar))
        self._draw(points)

    @rank_zero_only
    def _draw(self, points: list[tuple[str, float]]) -> None:
        """Write the picture of the run's points, of which each is a method and a t_switch."""
        rows = []
        for method, t_switch in points:
            row = self._finished.find(method, t_switch)
            if row is not None:
                rows.append(row)

        figure = figure5(rows, self.measure.metric, FORWARD)
        picture = self.save_figure(figure, "hybrid_sampling")
        rank_zero_info(f"Results: {self._finished.path}\nPicture: {picture}")

    def _measure(self, method: str, t_switch: float, bar: tqdm) -> Row:
        """Draw and measure the samples of one point, and return its row of the table; `bar` counts the samples."""
        start = time.monotonic()
        reference = self._samples.reference
        memorisation = MemorisationMetric(self.threshold).to(reference.device)

        def draw() -> Iterator[tuple[Tensor, Tensor]]:
            """Yield seeds and samples in batches, after `memorisation` has counted the copies among them."""
            # `get` returns None for `forward`, which has no estimator.
            draw_batch = partial(self._samples.draw, self.estimators.get(method), t_switch)
            for seeds, samples in draw_samples(draw_batch, self.num_samples, self.batch_size):
                memorisation.update(nearest_images(samples, reference))
                if seeds[0] == 0 and are_pictures(samples.shape[1:]):
                    self._save_grid(samples, method, t_switch)
                drawn_by_all = (
                    len(seeds) * self.trainer.world_size
                )  # about: last batches are shorter
                bar.update(min(drawn_by_all, bar.total - bar.n))
                yield seeds, samples

        metric = self.measure.metric
        distances = self.measure(
            self._real, draw(), total=None, device=reference.device, bar=self.bar
        )
        row: Row = {"method": method, "t_switch": t_switch, metric: distances[metric]}
        row.update(memorisation.compute())
        row["num_samples"] = self.num_samples
        row["num_steps"] = self.num_steps
        row["seed"] = self.seed
        row["seconds"] = round(time.monotonic() - start, 2)
        return row

    def _save_grid(self, samples: Tensor, method: str, t_switch: float) -> None:
        """Write a picture of the first samples of a point; `samples` is its first batch, (B, C, H, W)."""
        name = f"{method}_t{t_switch:g}_{self._finished.hash_of(method)}.png"
        tag = f"samples/{method}/t_switch={t_switch:g}"
        picture = image_grid(samples[:GRID_SAMPLES])
        self.save_picture(picture, self.folder / "samples" / name, tag)

    def _describe(self) -> dict[str, object]:
        """Return everything that the results of all methods depend on, as plain values."""
        settings: dict[str, object] = {
            "network": describe(self.network),
            "data": {
                "images": self.reference.fingerprint(),
                "index": describe(self.reference.index),
            },
            "held_out": self._real.fingerprint() if self.held_out else None,
            "extractor": self.measure.extractor.fingerprint(),
            "num_samples": self.num_samples,
            "num_steps": self.num_steps,
            "batch_size": self.batch_size,
            "threshold": self.threshold,
            "seed": self._samples.seed,
        }
        return settings | asdict(self._samples.grid)
