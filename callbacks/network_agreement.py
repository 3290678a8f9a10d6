"""How like trained networks estimators are: at noisy images, and in what they sample from the same noise."""

import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.files import written_whole
from lit_knn.common.pixels import are_pictures
from lit_knn.common.settings import describe, fingerprint
from lit_knn.common.tables import ResultsTable, Row, text_table, write_rows
from lit_knn.estimators import Estimator
from lit_knn.figures import agreement_curves, agreement_grid, same_noise_boxes, save_figure
from lit_knn.metrics.agreement import MEASURES
from lit_knn.metrics.latents import NoisyLatents, check_at_least, noise_grid
from lit_knn.metrics.network_agreement import (
    GENERATED,
    HELD_OUT,
    IMAGES,
    TRAINING,
    check_agreement,
    compare_at,
    image_sets,
    nearest,
    over_networks,
    with_ideal,
)
from lit_knn.metrics.same_noise import SameNoise, same_noise
from lit_knn.metrics.statistics_cache import load_tensors, save_tensors
from lit_knn.modules import LitEstimator
from lit_knn.runs.pictures import save_picture, show_figure
from lit_knn.runs.run import check_new, data_reference, held_out_reference, measuring_bar

CSV_NAME, CURVES, SAME_NOISE = "network_agreement.csv", "network_agreement", "same_noise"
GRID_SAMPLES = 8
# Columns of the tables that a run prints, with their formats.
NEAREST = {"images": "", "t": ".3g", "estimator": "", "mse": ".2e", "r2": ".4f", "pearson_r": ".4f"}
MEDIANS = {"network": "", "estimator": "", **dict.fromkeys(("r2_q25", "r2_median", "r2_q75"), ".3f")}
MEDIANS |= dict.fromkeys(("pearson_r_median", "pearson_r2_median"), ".3f")


class NetworkAgreement(pl.Callback):
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

    Raises:
        InputError: an option out of its range; at `setup`, no held-out images though they are asked for, more images
            than there are, a network of another shape than the data, or results of an earlier run in the run's folder.
    """

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
        self.noise_levels = noise_grid(noise_levels, t_min, t_max)
        self.images = list(IMAGES) if images is None else images
        if not self.images or not set(self.images) <= set(IMAGES):
            raise InputError(f"images must be some of {', '.join(IMAGES)}, got {self.images}")
        self.networks = networks
        self.estimators = with_ideal(estimators)
        self.folder = Path(folder)
        self.num_images = num_images
        self.num_latents = num_latents
        self.batch_size = batch_size

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check all settings and find the finished comparisons, before any long work."""
        if stage != "validate":
            return
        if not isinstance(pl_module, LitEstimator):
            raise InputError(f"NetworkAgreement: needs the model LitEstimator, got {type(pl_module).__name__}")
        device = trainer.strategy.root_device
        self._reference = data_reference("NetworkAgreement", trainer).to(device)
        self._held_out = held_out_reference(trainer) if HELD_OUT in self.images else None
        if HELD_OUT in self.images and self._held_out is None:
            raise InputError("NetworkAgreement: images has held_out, but the data holds out none; set data.held_out")
        if self._held_out is not None:
            self._held_out.to(device)
        check_new("NetworkAgreement", trainer, CSV_NAME, f"{CURVES}.png", f"{SAME_NOISE}.csv")
        h = pl_module.hparams
        with prefixed("NetworkAgreement"):
            check_agreement(
                self.estimators, self.networks, self._reference, self._held_out, self.num_images, h.sigma_max
            )
        self._sampler = SameNoise(
            self._reference, h.sampling_steps, pl_module.grid, self.batch_size, int(h.seed), pl_module.process
        )
        self._settings = self._describe()
        self._table = self._open_table()
        self._rows = on_first_rank(self._table.load)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure what is not finished, and draw everything."""
        log_dir = trainer.log_dir  # Every rank must read `log_dir`, because reading it is a collective operation.
        if trainer.sanity_checking:
            return
        num_generated = self.num_images if GENERATED in self.images else 0
        generated = self._samples(trainer, self.networks, max(num_generated, self.num_latents))
        samples = self._samples(trainer, self.estimators, self.num_latents)
        rows = self._compare(trainer, generated if num_generated else {})
        if trainer.is_global_zero:
            self._show(trainer, Path(log_dir or self.folder), rows, samples, generated)

    def _samples(self, trainer: pl.Trainer, parts: dict[str, Estimator], num: int) -> dict[str, Tensor]:
        """Return the first `num` samples of each part, from files or drawn now; none if num is 0."""
        if num == 0:
            return {}
        settings = {**self._sampler.settings(), "num": num}
        hashes = {name: fingerprint({"estimator": describe(part), **settings}) for name, part in parts.items()}
        # The name is for people, and the hash knows the settings.
        paths = {name: self.folder / "samples" / f"{name}_{own}.npz" for name, own in hashes.items()}
        found = on_first_rank(lambda: {name: load_tensors(path).get("images") for name, path in paths.items()})
        todo = num * sum(images is None for images in found.values())
        with measuring_bar(trainer, todo * self._sampler.estimates, "Sampling", " estimates", leave=True) as bar:
            for name, images in found.items():
                if images is None:
                    bar.set_description(f"Samples of {name}")
                    found[name] = drawn = self._sampler.draw(parts[name], num, bar.update)
                    if trainer.is_global_zero:
                        save_tensors(paths[name], images=drawn)
        return {name: images.to(self._reference.device) for name, images in found.items() if images is not None}

    def _compare(self, trainer: pl.Trainer, generated: dict[str, Tensor]) -> list[Row]:
        """Compare at all kinds of images and noise levels what is not finished; return the rows of all."""
        real = {TRAINING: self._reference, HELD_OUT: self._held_out}
        sets = image_sets(self.networks, {kind: x for kind, x in real.items() if kind in self.images}, generated)
        points = [(kind, whose, x, t) for kind, whose, x in sets for t in self.noise_levels]
        todo = [self._unfinished(kind, whose, t) for kind, whose, _, t in points]
        total = sum(map(len, todo)) * self.num_images
        with measuring_bar(trainer, total, "Network agreement", " estimates", leave=True) as bar:
            for (kind, whose, x, t), estimators in zip(points, todo, strict=True):
                if estimators:
                    bar.set_description(f"{kind} images, t={t:.3g}")
                    latents = NoisyLatents(x, self.num_images, self._sampler.seed)
                    found = compare_at(estimators, whose, latents, t, self.batch_size, bar.update)
                    self._keep(trainer, [{**row, "images": kind} for row in found])
        rows = [
            self._find(kind, name, net, t) for kind, nets, _, t in points for name in self.estimators for net in nets
        ]
        return [row for row in rows if row is not None]

    def _unfinished(self, kind: str, networks: dict[str, Estimator], t: float) -> dict[str, Estimator]:
        """Return the estimators that were not compared with all of these networks."""
        return {
            name: estimator
            for name, estimator in self.estimators.items()
            if any(self._find(kind, name, network, t) is None for network in networks)
        }

    def _find(self, kind: str, estimator: str, network: str, t: float) -> Row | None:
        settings = fingerprint(self._settings[estimator, network])
        return self._table.find(self._rows, estimator=estimator, network=network, images=kind, t=t, settings=settings)

    def _keep(self, trainer: pl.Trainer, found: list[dict[str, Any]]) -> None:
        """Add rows to the table. A new network is compared together with finished ones, whose rows stay."""
        for row in found:
            if self._find(row["images"], row["estimator"], row["network"], row["t"]) is not None:
                continue
            settings = self._settings[row["estimator"], row["network"]]
            row |= {"seed": self._sampler.seed, "settings": fingerprint(settings)}
            self._rows.append(row)
            if trainer.is_global_zero:
                path = self.folder / "settings" / f"{row['settings']}.json"
                with written_whole(path) as partial:
                    partial.write_text(json.dumps(settings, indent=2) + "\n")
                self._table.append(row)

    def _describe(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Describe everything that the comparisons of each pair depend on."""
        held_out = None if self._held_out is None else self._held_out.fingerprint()
        shared = {**self._sampler.settings(), "held_out": held_out, "num_images": self.num_images}
        shared["num_generated"] = max(self.num_images, self.num_latents)
        networks = {name: describe(network) for name, network in self.networks.items()}
        return {
            (name, network): {"estimator": describe(estimator), "network": own, **shared}
            for name, estimator in self.estimators.items()
            for network, own in networks.items()
        }

    def _open_table(self) -> ResultsTable:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"NetworkAgreement: folder={self.folder} cannot be made: {error.strerror}") from error
        measured = {f"{name}{end}": float for name in MEASURES for end in ("", "_se")}
        columns = {"estimator": str, "network": str, "images": str, "t": float, **measured}
        columns |= {"num_images": int, "seed": int, "settings": str}
        key = ("estimator", "network", "images", "t", "settings")
        return ResultsTable(self.folder / CSV_NAME, columns, key)

    def _show(
        self,
        trainer: pl.Trainer,
        folder: Path,
        rows: list[Row],
        samples: dict[str, Tensor],
        generated: dict[str, Tensor],
    ) -> None:
        """Write the run's tables and pictures, and tell which estimator is nearest."""
        averaged = over_networks(rows)
        figures = {CURVES: agreement_curves(averaged)}
        write_rows(folder / CSV_NAME, averaged)
        rank_zero_info(f"The estimator nearest to the networks:\n{text_table(nearest(averaged), NEAREST)}")
        if samples:
            pairs = same_noise(samples, generated)
            write_rows(folder / f"{SAME_NOISE}.csv", pairs)
            figures[SAME_NOISE] = same_noise_boxes(samples, generated)
            rank_zero_info(f"Samples from the same noise:\n{text_table(pairs, MEDIANS)}")
            if are_pictures(self._reference.shape):
                for name, images in generated.items():
                    grid = agreement_grid({name: images, **samples}, GRID_SAMPLES)
                    save_picture(trainer, grid, folder / f"same_noise_{name}.png", f"same_noise/{name}")
        for name, figure in figures.items():
            save_figure(figure, folder / name)
            show_figure(trainer, name, figure)
        rank_zero_info(f"Results: {self._table.path}\nTables and pictures: {folder}")
