"""Callbacks that sample, run directly: what a finished point depends on, and what each writes and counts."""

import csv

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from lit_knn.callbacks import HybridSampling, Memorisation, PixelFrechetDistance
from lit_knn.estimators import KNN, Estimator, Exact, OneSample
from lit_knn.figures import image_grid
from lit_knn.metrics import Pixels, kept_results
from lit_knn.metrics.hybrid import HybridSamples
from lit_knn.modules import LitEDM, LitEstimator
from lit_knn.reference import ReferenceSet
from tests.short_training import TRAINER
from tests.watched import Images, OneOfSeveral, WatchedNet


def validate(callback, model, data=None, folder=None, **options):
    logger = pl.loggers.CSVLogger(folder, name="run") if folder else False
    options = {**TRAINER, "limit_val_batches": 1, "enable_checkpointing": False, "logger": logger, **options}
    trainer = pl.Trainer(**options, callbacks=[callback])
    return trainer.validate(model, data or Images(), verbose=False)


def sweep(folder, model=None, data=None, rank=0, **options):
    """Run a small sweep and return the number of rows in its table."""
    settings = {
        "estimators": {"a": KNN(k=8, n=4)},
        "num_samples": 5,
        "num_steps": 3,
        "batch_size": 3,
        "cache_dir": None,
    }
    settings |= {"network": Exact(), **options}
    callback = HybridSampling(t_switch=[2.0], folder=str(folder), extractor=Pixels(), **settings)
    validate(callback, LitEstimator(**(model or {})), data, folder / "log", strategy=OneOfSeveral(rank, 2))
    table = folder / "hybrid_sampling_fd_pixels.csv"
    return len(list(csv.DictReader(table.open()))) if table.exists() else 0


class Black(Estimator):
    """Samples of this network are zero everywhere, far from all images."""

    needs_reference = False

    def _posterior_mean(self, z, t, x_source, generator):
        return torch.zeros_like(z)


def test_a_sweep_counts_copies_with_its_threshold_and_keeps_the_statistics_of_the_data(tmp_path):
    # All ratios are below 1, and far above 1/3.
    sweep(tmp_path, network=Black(), threshold=1.0, cache_dir=str(tmp_path / "cache"))
    with (tmp_path / "hybrid_sampling_fd_pixels.csv").open() as file:
        assert [row["copied_fraction"] for row in csv.DictReader(file)] == ["1.0"] * 2
    assert len(list((tmp_path / "cache").glob("fd_pixels-*.npz"))) == 1


class Others(Images):
    """Images with one number changed."""

    def __init__(self):
        super().__init__()
        self.x[59, 0, 3, 3] += 1
        self.reference = ReferenceSet(self.x)


@pytest.mark.usefixtures("blank_figures")
def test_a_point_is_of_its_data_grid_seed_estimator_and_options(tmp_path):
    # There are two methods, and the baseline has no estimator.
    assert sweep(tmp_path) == 2
    changes = [{"threshold": 0.5}, {"batch_size": 2}, {"data": Others()}, {"model": {"rho": 5.0, "seed": 1}}]
    changes += [{"model": {"rho": 5.0}}]
    for number, change in enumerate(changes, start=1):
        assert sweep(tmp_path, **change) == 2 + 2 * number, change
    assert sweep(tmp_path, estimators={"a": KNN(k=9, n=4)}) == 3 + 2 * len(changes)


def test_the_grid_of_a_point_is_of_its_first_batch_and_the_first_rank_alone_writes_the_table(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(kept_results, "on_first_rank", lambda work: [])
        assert sweep(tmp_path / "second", rank=1) == 0
    sweep(tmp_path / "first")
    (path,) = (tmp_path / "first" / "samples").glob("forward_t2_*.png")
    drawing = HybridSamples(Exact().bind(Images().reference), Images().reference, 3, LitEstimator().grid, 0)
    expected = image_grid(drawing.draw(None, 2.0, torch.arange(3)))
    shown = np.asarray(Image.open(path)).transpose(2, 0, 1)
    assert shown.shape == expected.shape
    assert np.abs(shown - expected.numpy() * 255).max() <= 1


class Places(pl.LightningModule):
    """Samples pictures between the first two images of the set, at a ratio of distances that depends on the seed."""

    step, images_seen = 3, 0
    ratios = (0.1, 0.4, 0.5, 0.9)

    def sample(self, seeds, num_steps=None):
        first, second = Set().reference.gather(torch.tensor([0, 1]))
        shares = [ratio / (1 + ratio) for ratio in self.ratios]
        return torch.stack([first + shares[int(seed) % 4] * (second - first) for seed in seeds])

    def validation_step(self, batch, batch_idx):
        """Do nothing."""


class Set(Images):
    """Two images of opposite shades, and many far from both."""

    def __init__(self):
        super().__init__()
        self.x = torch.cat([torch.full((1, 1, 4, 4), v) for v in (-0.5, 0.5, *torch.linspace(3, 9, 58).tolist())])
        self.reference = ReferenceSet(self.x)


@pytest.mark.parametrize(("threshold", "copied"), [(1 / 3, 0.25), (0.45, 0.5), (0.95, 1.0)])
def test_memorisation_counts_each_validation_anew_with_its_threshold(threshold, copied, tmp_path):
    callback = Memorisation(4, 3, threshold, num_pairs=2)
    for number in range(2):
        (found,) = validate(callback, Places(), Set(), tmp_path)
        assert found["samples/copied_fraction"] == copied
        share = sum(ratio / (1 + ratio) for ratio in Places.ratios) / 4
        assert found["samples/mean_nearest_distance"] == pytest.approx(
            share * 4, rel=1e-5
        )  # the two images have distance 4
        (path,) = (tmp_path / "run" / f"version_{number}" / "memorisation").iterdir()
        shown = np.asarray(Image.open(path))[:, :, 0]
        # The pairs with the smallest ratios: samples above, their nearest images below, which is image 0 for both.
        shades = [shown[row, column] for row in (10, 46) for column in (10, 44)]
        expected = [(-0.5 + ratio / (1 + ratio) + 1) * 127.5 for ratio in (0.1, 0.4)] + [0.5 * 127.5] * 2
        assert shades == pytest.approx(expected, abs=1)
    model = Places()
    model.ratios = (0.9,) * 4
    (found,) = validate(callback, model, Set(), tmp_path)
    assert found["samples/copied_fraction"] == (threshold > 0.9)


def test_the_distance_draws_batches_of_the_size_of_the_options(tmp_path):
    class Watched(Places):
        def __init__(self):
            super().__init__()
            self.asked = []

        def sample(self, seeds, num_steps=None):
            self.asked.append(list(map(int, seeds)))
            return super().sample(seeds)

    model = Watched()
    validate(PixelFrechetDistance(num_samples=7, batch_size=3), model, Set(), tmp_path)
    assert model.asked == [[0, 1, 2], [3, 4, 5], [6]]


def test_measurements_of_a_validation_are_rows_of_their_own_and_keep_the_earlier_ones(tmp_path):
    model, callback = Places(), PixelFrechetDistance(num_samples=6, batch_size=3)
    options = {**TRAINER, "limit_val_batches": 1, "enable_checkpointing": False}
    options["logger"] = pl.loggers.CSVLogger(tmp_path, name="run")
    trainer = pl.Trainer(**options, callbacks=[callback])
    for _ in range(2):
        trainer.validate(model, Set(), verbose=False)
    with (tmp_path / "run" / "version_0" / "fidelity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["3", "3"]
    assert all(float(row["fd_pixels"]) > 0 for row in rows)


def test_a_table_of_another_run_gets_a_row_and_a_damaged_one_is_kept_aside(tmp_path):
    table = tmp_path / "run" / "version_0" / "fidelity.csv"
    table.parent.mkdir(parents=True)

    def measure():
        logger = pl.loggers.CSVLogger(tmp_path, name="run", version=0)
        validate(PixelFrechetDistance(num_samples=6, batch_size=3), Places(), Set(), logger=logger)
        with table.open() as file:
            return [(row["step"], row["num_samples"]) for row in csv.DictReader(file)]

    # The earlier row has the same number of samples, another step, and another metric.
    table.write_text("step,images_seen,num_samples,checkpoint,fid\n2,0,6,,9.5\n")
    assert measure() == [("2", "6"), ("3", "6")]
    table.write_text("step,images_seen\n2,0,6\n")
    with pytest.warns(UserWarning, match=r"fidelity.csv is damaged"):
        assert measure() == [("3", "6")]
    assert table.with_name("fidelity.damaged-1.csv").read_text() == "step,images_seen\n2,0,6\n"


def test_the_check_before_training_measures_nothing(tmp_path):
    asked = []

    class Sampling(LitEDM):
        def sample(self, seeds, num_steps=None):
            asked.append(self.trainer.sanity_checking)
            return super().sample(seeds, 2)

    options = {"max_steps": 2, "num_sanity_val_steps": 1, "limit_val_batches": 1, "enable_checkpointing": False}
    options["default_root_dir"] = tmp_path
    trainer = pl.Trainer(**{**TRAINER, **options}, callbacks=[PixelFrechetDistance(num_samples=4, batch_size=2)])
    trainer.fit(Sampling(WatchedNet(), OneSample()), Images())
    assert asked == [False] * 2
