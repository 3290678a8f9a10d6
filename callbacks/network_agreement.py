"""How like trained networks estimators are: at noisy images, and in what they sample from the same noise."""

from itertools import product
from pathlib import Path

from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import InputError, check_at_least, prefixed
from lit_knn.common.pixels import are_pictures
from lit_knn.common.settings import describe
from lit_knn.common.tables import Row, text_table, write_rows
from lit_knn.estimators import Estimator, Exact
from lit_knn.figures.network_agreement import agreement_curves, agreement_grid, same_noise_boxes
from lit_knn.metrics import network_agreement
from lit_knn.metrics.kept_results import KeptResults
from lit_knn.metrics.latents import bind_all, check_names, check_not_empty, noise_grid
from lit_knn.metrics.network_agreement import GENERATED, HELD_OUT, IMAGES, TRAINING
from lit_knn.metrics.same_noise import COLUMNS, SameNoise, same_noise
from lit_knn.modules import LitEstimator

CSV_NAME, CURVES, SAME_NOISE = "network_agreement.csv", "network_agreement", "same_noise"
GRID_SAMPLES = 8
# Columns of the tables that a run prints, with their formats.
NEAREST = {"images": "", "t": ".3g", "estimator": "", "mse": ".2e", "r2": ".4f", "pearson_r": ".4f"}
MEDIANS = {"network": "", "estimator": "", **dict.fromkeys(("r2_q25", "r2_median", "r2_q75"), ".3f")}
MEDIANS |= dict.fromkeys(("pearson_r_median", "pearson_r2_median"), ".3f")


class NetworkAgreement(Measurement):
    """At validation, measure how like trained networks estimators are, by MSE, R² and correlation (`Agreement`).

    The posterior means are compared at z = x + tε over noise levels, for x from the training set, from the images that
    the data holds out, and from images that each network samples. The samples of the whole flow are compared, too: from
    the same latents, by the sampler of the model `LitEstimator`, with its `sampling_steps`. `Exact`, the ideal
    denoiser, is always among the estimators.

    Each finished comparison is a row of `network_agreement.csv` in `folder`, and samples are files beside it; a run of
    the same settings does not compute them again. The last column is a hash of estimator, network, data and options;
    the JSON file of that name lists them. Tables and pictures of the run are in the run's own folder.

    Args:
        networks: trained networks, `lit_knn.estimators.Network`, by name.
        estimators: by name.
        noise_levels: the levels t; or their number, for levels evenly spaced in ln t from `t_min` to `t_max`.
        folder: folder that keeps the finished comparisons of all runs.
        t_min: smallest level, if `noise_levels` is a number.
        t_max: largest level, if `noise_levels` is a number.
        images: kinds of images, some of "training", "held_out" and "generated".
        num_images: number of images of each kind.
        num_latents: number of latents to sample from, with the seeds 0, 1, …; 0 to compare no samples.
        batch_size: latents at a time, on each rank. A random estimator's draws depend on it.
    """

    model_class = LitEstimator
    outputs = (CSV_NAME, f"{CURVES}.png", f"{SAME_NOISE}.csv")

    @prefixed("NetworkAgreement")
    def __init__(
        self,
        networks: dict[str, Estimator],
        estimators: dict[str, Estimator],
        noise_levels: list[float] | int,
        folder: str,
        t_min: float = 0.02,
        t_max: float = 80.0,
        images: list[str] | None = None,
        num_images: int = 256,
        num_latents: int = 100,
        batch_size: int = 128,
    ) -> None:
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, num_latents=num_latents)
        check_at_least(2, num_images=num_images)
        check_not_empty(networks=networks)
        check_names((*networks, *estimators))
        # Samples are training images, with which every estimator is compared.
        self.estimators = {**estimators, "Exact": estimators.get("Exact", Exact())}
        for name in networks:
            if name in self.estimators:
                raise InputError(f"the network {name!r} has the name of an estimator")
        self.noise_levels = noise_grid(noise_levels, t_min, t_max)
        self.images = list(IMAGES) if images is None else images
        if not self.images or not set(self.images) <= set(IMAGES):
            raise InputError(f"images must be some of {', '.join(IMAGES)}, got {self.images}")
        self.networks = networks
        self.folder = Path(folder)
        self.num_images = num_images
        self.num_latents = num_latents
        self.batch_size = batch_size

    def check(self) -> None:
        module, reference, held_out = self.module, self.reference.to(self.device), None
        if HELD_OUT in self.images:
            with prefixed("images has held_out"):
                held_out = self.held_out_images().to(self.device)
        steps, grid = module.hparams.sampling_steps, module.grid
        for kind, images in (("training", reference), ("held-out", held_out)):
            if images is not None and self.num_images > images.N:
                raise InputError(f"num_images={self.num_images} is more than the {images.N} {kind} images")
        parts = {f"networks.{name}": network for name, network in self.networks.items()}
        parts |= {f"estimators.{name}": own for name, own in self.estimators.items()}
        bind_all(parts, reference, grid.sigma_max)
        self._sampler = SameNoise(reference, steps, grid, self.batch_size, self.seed, module.process)
        self._real = {TRAINING: reference if TRAINING in self.images else None, HELD_OUT: held_out}
        columns = {"estimator": str, "network": str, "images": str, "t": float, **COLUMNS}
        columns |= {"num_images": int, "seed": int}
        shared = {**self._sampler.settings(), "held_out": None if held_out is None else held_out.fingerprint()}
        shared |= {"num_images": self.num_images, "num_generated": max(self.num_images, self.num_latents)}
        networks = {name: describe(network) for name, network in self.networks.items()}
        settings = {
            (name, network): {"estimator": describe(estimator), "network": own, **shared}
            for (name, estimator), (network, own) in product(self.estimators.items(), networks.items())
        }
        key = ("estimator", "network", "images", "t")
        self._kept = KeptResults(self.folder / CSV_NAME, columns, key, settings)

    def evaluate(self) -> None:
        num_generated = self.num_images if GENERATED in self.images else 0
        samples_folder = self.folder / "samples"
        generated = self._sampler.kept(samples_folder, self.networks, max(num_generated, self.num_latents), self.bar)
        samples = self._sampler.kept(samples_folder, self.estimators, self.num_latents, self.bar)
        sets = network_agreement.image_sets(self.networks, self._real, generated if num_generated else {})
        total = self.num_images * len(sets) * len(self.noise_levels) * len(self.estimators)
        with self.bar(total, "Network agreement", " estimates", leave=True) as bar:
            options = (self.num_images, self._sampler, bar.update, self._kept.find)
            found = network_agreement.compare(self.estimators, sets, self.noise_levels, *options)
            rows = [self._kept.add(row) for row in found]
        if self.is_first:
            self._show(rows, samples, generated)

    def _show(self, rows: list[Row], samples: dict[str, Tensor], generated: dict[str, Tensor]) -> None:
        """Write the run's tables and pictures, and print which estimator is nearest."""
        averaged = network_agreement.over_networks(rows)
        write_rows(self.run_folder / CSV_NAME, averaged)
        rank_zero_info(
            f"The estimator nearest to the networks:\n{text_table(network_agreement.nearest(averaged), NEAREST)}"
        )
        self.save_figure(agreement_curves(averaged), CURVES)
        if samples:
            pairs = same_noise(samples, generated)
            write_rows(self.run_folder / f"{SAME_NOISE}.csv", pairs)
            rank_zero_info(f"Samples from the same noise:\n{text_table(pairs, MEDIANS)}")
            self.save_figure(same_noise_boxes(samples, generated), SAME_NOISE)
            if are_pictures(self._sampler.reference.shape):
                for name, images in generated.items():
                    grid = agreement_grid({name: images, **samples}, GRID_SAMPLES)
                    self.save_picture(grid, self.run_folder / f"same_noise_{name}.png", f"same_noise/{name}")
        rank_zero_info(f"Results: {self._kept.path}\nTables and pictures: {self.run_folder}")
