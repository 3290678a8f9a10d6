"""Files of samples and pictures: each sample under its seed, each picture with what its place says."""

from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from lit_knn.callbacks import MeanPicture, PosteriorPicture, SampleGrid, SampleWriter
from lit_knn.common.distributed import own_batches
from lit_knn.common.errors import InputError
from lit_knn.common.tables import read_rows
from lit_knn.figures import checkpoint_curve, figure2, figure3, figure5, image_grid, pair_grid
from lit_knn.modules.conditioning import Conditioning
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.samplers import seeded_classes
from tests.interrupted_runs import file_size_limit
from tests.short_training import TRAINER
from tests.watched import Images, OneOfSeveral


def picture(seed):
    """A colour picture of 4 rows and 6 columns that no other seed has, in model space."""
    pixels = (torch.arange(3 * 4 * 6) * 3 + 5 * int(seed)) % 256
    return pixels.reshape(3, 4, 6) / 127.5 - 1


class Painter(pl.LightningModule):
    """Paints `picture` of each seed, or latents, and records what it was asked for."""

    step = 7

    def __init__(self, latents=False):
        super().__init__()
        self.latents = latents
        self.asked = []

    def predict_step(self, batch, batch_idx):
        return torch.stack([self.paint(seed) for seed in batch])

    def paint(self, seed):
        return torch.full((5, 2, 2), 3.25 * int(seed)) if self.latents else picture(seed)

    def sample(self, seeds, num_steps=None):
        self.asked.append((list(seeds), num_steps))
        return torch.stack([picture(seed + 10 * num_steps) for seed in seeds])

    def validation_step(self, batch, batch_idx):
        """Do nothing."""


SEEDS = [5, 0, 3, 70, 1, 4, 2]


def predict(folder, format="png", latents=False):
    trainer = pl.Trainer(**TRAINER, callbacks=[SampleWriter(format, str(folder))])
    trainer.predict(Painter(latents), torch.utils.data.DataLoader(SEEDS, batch_size=3), return_predictions=False)
    return sorted(path.name for path in folder.iterdir())


def pixels(seed):
    return np.rint((picture(seed).permute(1, 2, 0).numpy() + 1) * 127.5)


def test_each_png_is_the_sample_of_the_seed_in_its_name(tmp_path):
    assert predict(tmp_path / "out") == sorted([*(f"{seed:06d}.png" for seed in SEEDS), "grid.png"])
    for seed in SEEDS:
        assert np.array_equal(np.asarray(Image.open(tmp_path / "out" / f"{seed:06d}.png")), pixels(seed))
    # The grid has the first 64 seeds in their order, in rows of two, each pixel six times as large.
    grid = np.asarray(Image.open(tmp_path / "out" / "grid.png"))
    assert np.array_equal(grid[2:26:6, 2:38:6], pixels(0))
    assert np.array_equal(grid[2:26:6, 40:76:6], pixels(1))
    assert np.array_equal(grid[28:52:6, 2:38:6], pixels(2))


@pytest.mark.parametrize(("format", "name"), [("png", "000005.png"), ("npz", "batches/0000_000000.npz")])
def test_a_full_disk_leaves_no_part_of_a_file(format, name, tmp_path):
    with file_size_limit(60), pytest.raises(OSError, match="File too large") as full:
        predict(tmp_path / "out", format)
    assert full.value.filename == str(tmp_path / "out" / name)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_is_refused(bad, tmp_path, monkeypatch):
    monkeypatch.setattr(Painter, "paint", lambda self, seed: picture(seed) * (bad if seed == 3 else 1))
    with pytest.raises(InputError, match="the sample of seed 3 is not finite"):
        predict(tmp_path / "out")


def test_npz_has_samples_and_seeds_in_the_order_of_the_seeds(tmp_path):
    assert predict(tmp_path / "out", "npz") == ["grid.png", "samples.npz"]
    with np.load(tmp_path / "out" / "samples.npz") as file:
        assert file["seeds"].tolist() == sorted(SEEDS)
        for seed, image in zip(file["seeds"], file["images"], strict=True):
            assert np.array_equal(image, pixels(seed))


def test_images_of_a_conditional_model_have_their_classes(tmp_path, monkeypatch):
    classes = Conditioning(SimpleNamespace(num_classes=10), class_conditional=True, sampling_class=None)
    monkeypatch.setattr(Painter, "conditioning", classes, raising=False)
    expected = seeded_classes(sorted(SEEDS), 10, torch.device("cpu")).tolist()
    assert len(set(expected)) > 2
    assert "classes.csv" in predict(tmp_path / "png")
    rows = read_rows(tmp_path / "png" / "classes.csv")
    assert [row["file"] for row in rows] == [f"{seed:06d}.png" for seed in sorted(SEEDS)]
    assert [int(row["class"]) for row in rows] == expected
    assert predict(tmp_path / "npz", "npz") == ["grid.png", "samples.npz"]
    with np.load(tmp_path / "npz" / "samples.npz") as file:
        assert file["labels"].tolist() == expected
    monkeypatch.setattr(Painter, "hparams", {"guidance": 0.0}, raising=False)  # the unconditional model
    assert "classes.csv" not in predict(tmp_path / "without")


def test_latents_are_written_as_they_are(tmp_path):
    assert predict(tmp_path / "out", "png", latents=True) == ["samples.npz"]
    with np.load(tmp_path / "out" / "samples.npz") as file:
        assert file["images"].shape == (7, 5, 2, 2)
        assert file["images"].dtype == np.float32
        assert file["images"][:, 0, 0, 0].tolist() == [3.25 * seed for seed in sorted(SEEDS)]


def test_the_files_of_two_ranks_are_joined(tmp_path):
    # One process plays one rank after the other; the first joins the files.
    module, folder = Painter(), tmp_path / "out"
    writers = [SampleWriter("npz", str(folder)) for _ in range(2)]
    trainers = [pl.Trainer(**TRAINER, strategy=OneOfSeveral(rank, 2)) for rank in range(2)]
    for writer, trainer in zip(writers[::-1], trainers[::-1], strict=True):  # The first rank makes the folder.
        writer.setup(trainer, module, "predict")
    for seeds, writer, trainer in zip(([0, 2, 4], [1, 3, 5]), writers, trainers, strict=True):
        batch = torch.tensor(seeds)
        writer.write_on_batch_end(trainer, module, module.predict_step(batch, 0), None, batch, 0, 0)
    for writer, trainer in zip(writers[::-1], trainers[::-1], strict=True):
        writer.on_predict_epoch_end(trainer, module)
    with np.load(folder / "samples.npz") as file:
        assert file["seeds"].tolist() == list(range(6))
        assert all(np.array_equal(image, pixels(seed)) for seed, image in enumerate(file["images"]))


def test_a_grid_has_the_number_of_samples_and_the_steps_of_the_options(tmp_path):
    grids, module = SampleGrid(num_samples=4, num_steps=(1, 3)), Painter()
    options = {**TRAINER, "logger": pl.loggers.CSVLogger(tmp_path, name="a"), "limit_val_batches": 1}
    pl.Trainer(**options, callbacks=[grids], enable_checkpointing=False).validate(module, Images(), verbose=False)
    assert module.asked == [([0, 1, 2, 3], 1), ([0, 1, 2, 3], 3)]
    names = ["step_0000007_1-step.png", "step_0000007_3-step.png"]
    assert [path.name for path in grids.last_paths] == names
    for steps, path in zip((1, 3), grids.last_paths, strict=True):
        found = np.asarray(Image.open(path))
        assert np.array_equal(found[2:26:6, 2:38:6], pixels(10 * steps))
        assert np.array_equal(found[28:52:6, 40:76:6], pixels(3 + 10 * steps))


def test_the_paths_are_those_of_the_latest_validation_and_pictures_have_its_step(tmp_path):
    grids, shown = SampleGrid(num_samples=1, num_steps=(2,)), []
    logger = pl.loggers.TensorBoardLogger(tmp_path, name="a")
    logger.experiment.add_image = lambda tag, picture, step=None, **_: shown.append((tag, step))
    options = {**TRAINER, "logger": logger, "limit_val_batches": 1, "enable_checkpointing": False}
    trainer, module = pl.Trainer(**options, callbacks=[grids]), Painter()
    for module.step in (7, 9):
        trainer.validate(module, Images(), verbose=False)
    assert [path.name for path in grids.last_paths] == ["step_0000009_2-step.png"]
    assert shown == [("samples/2-step", 7), ("samples/2-step", 9)]


@pytest.mark.parametrize(("num", "size"), [(7, 3), (6, 3), (2, 5), (0, 4)])
def test_batches_of_a_split_are_all_numbers_once(num, size):
    batches = list(own_batches(num, size))
    assert [number for _, numbers in batches for number in numbers] == list(range(num))
    assert [index for index, _ in batches] == list(range(len(batches)))
    assert all(len(numbers) == size for _, numbers in batches[:-1])


# Figures


def test_grids_show_black_as_0_and_white_as_1_and_pairs_one_above_the_other():
    levels = torch.tensor([-1.0, 1.0, 0.0, 0.5]).reshape(4, 1, 1, 1).expand(-1, 1, 32, 32)
    grid = image_grid(levels)
    shown = [grid[0, row, column].item() for row in (10, 44) for column in (10, 44)]
    assert shown == pytest.approx([0, 1, 128 / 255, 191 / 255])
    pairs = pair_grid(levels[:2], levels[2:])
    shown = [pairs[0, row, column].item() for row in (10, 46) for column in (10, 44)]
    assert shown == pytest.approx([0, 1, 128 / 255, 191 / 255])


def test_figure_2_names_rows_and_levels_and_has_the_pictures_in_their_places():
    rows = {"a": torch.full((3, 1, 2, 2), -1.0), "b": torch.full((3, 1, 2, 2), 1.0)}
    rows["b"][2] = 0
    figure = figure2(rows, [0.25, 2.0, 40.0])
    grid = np.array(figure.axes).reshape(2, 3)
    assert [axes.get_title() for axes in grid[0]] == ["$t = 0.25$", "$t = 2$", "$t = 40$"]
    assert [axes.get_ylabel() for axes in grid[:, 0]] == ["a", "b"]
    shown = [[axes.images[0].get_array()[0, 0, 0] for axes in row] for row in grid]
    assert shown == [[0, 0, 0], [255, 255, 128]]


def test_figure_3_draws_scores_above_and_means_below_with_bands_of_one_standard_error():
    rows = []
    for i, t in enumerate((0.5, 5.0)):
        row = {"estimator": "KNN", "t": t}
        values = {"mse": 1e-2, "bias_sq": 3e-3, "bias_sq_corrected": 2e-3, "variance": 8e-3}
        for place, (name, value) in enumerate(values.items()):
            for prefix, factor in (("mu", 1.0), ("score", 100.0)):
                row[f"{prefix}_{name}"] = (value + i * 1e-3) * factor
                row[f"{prefix}_{name}_se"] = (place + 1) * 1e-5 * factor
        rows.append(row)
    figure = figure3(rows)
    grid = np.array(figure.axes).reshape(2, 3)
    assert [axes.get_title() for axes in grid[0]] == ["MSE", "squared bias", "variance"]
    assert [axes.get_ylabel() for axes in grid[:, 0]] == ["score, per dimension", "posterior mean, per dimension"]
    for row, factor in zip(grid, (100.0, 1.0), strict=True):
        for axes, value, error in zip(row, (1e-2, 2e-3, 8e-3), (1e-5, 3e-5, 4e-5), strict=True):
            (line,) = axes.lines
            assert line.get_xdata().tolist() == [0.5, 5.0]
            assert list(line.get_ydata()) == pytest.approx([value * factor, (value + 1e-3) * factor])
            heights = axes.collections[0].get_paths()[0].vertices[:, 1]
            assert heights.min() == pytest.approx((value - error) * factor)
            assert heights.max() == pytest.approx((value + 1e-3 + error) * factor)


def test_figure_5_has_the_distance_left_and_the_copies_right_in_the_order_of_t_switch():
    rows = [
        {"method": method, "t_switch": t, "fid": fid, "copied_fraction": copied}
        for method, t, fid, copied in (
            ("KNN", 5.0, 30.0, 0.1), ("forward", 0.1, 2.0, 0.9), ("KNN", 0.1, 3.0, 0.8), ("forward", 5.0, 20.0, 0.2)
        )
    ]  # fmt: skip
    left, right = figure5(rows, "fid", "forward").axes
    lines = [{line.get_label(): line for line in axes.lines} for axes in (left, right)]
    expected = {"KNN": ([3.0, 30.0], [0.8, 0.1]), "forward": ([2.0, 20.0], [0.9, 0.2])}
    for name, values in expected.items():
        for panel, heights in zip(lines, values, strict=True):
            assert list(panel[name].get_xdata()) == [0.1, 5.0]
            assert list(panel[name].get_ydata()) == heights
    assert lines[0]["forward"].get_linestyle() == "--"
    assert (left.get_ylabel(), right.get_ylabel()) == ("FID", "copied fraction")


def test_the_curve_of_checkpoints_marks_the_best_at_its_place():
    figure = checkpoint_curve([(2_500_000, 9.0), (5_000_000, 4.0), (7_500_000, 6.0)], (5_000_000, 4.0), "fid", "run")
    curve, best = figure.axes[0].lines
    assert curve.get_xdata().tolist() == [2.5, 5.0, 7.5]
    assert list(curve.get_ydata()) == [9.0, 4.0, 6.0]
    assert (best.get_xdata()[0], best.get_ydata()[0]) == (5.0, 4.0)
    assert "millions" in figure.axes[0].get_xlabel()
    short = checkpoint_curve([(250_000, 9.0), (999_999, 4.0)], (999_999, 4.0), "fid", "run").axes[0]
    assert short.lines[0].get_xdata().tolist() == [250, 999.999]
    assert "thousands" in short.get_xlabel()


# Callbacks that draw


def validate(callback, data, folder, seed=0):
    """Run one validation with one callback; return the figures that it shows."""
    module = Painter()
    module.hparams.seed = seed
    options = {**TRAINER, "logger": pl.loggers.TensorBoardLogger(folder, name="a"), "limit_val_batches": 1}
    trainer = pl.Trainer(**options, callbacks=[callback], enable_checkpointing=False)
    shown = []
    trainer.logger.experiment.add_image = lambda tag, pixels, *args, **kwargs: shown.append((tag, np.array(pixels)))
    trainer.validate(module, data, verbose=False)
    return dict(shown)


def test_pictures_of_means_are_of_several_images_and_of_the_seed(tmp_path):
    pictures = [validate(MeanPicture({"z": Echo()}, [0.01, 0.02], num_images=2), Images(), tmp_path, s) for s in (0, 1)]
    assert [list(found) for found in pictures] == [["figure2/0", "figure2/1"]] * 2
    shown = [image for found in pictures for image in found.values()]
    assert all((one != other).any() for i, one in enumerate(shown) for other in shown[:i])


class Echo(SimpleNamespace):
    """An estimator that returns z."""

    needs_reference = deterministic = False

    def posterior_mean(self, z, t, x_source=None, **options):
        return z


def test_the_picture_of_a_posterior_has_k_neighbours_of_z(tmp_path):
    class Line(Images):
        def __init__(self):
            super().__init__()
            self.reference = ReferenceSet(torch.linspace(0, 1, 20)[:, None])

    shown = {}
    for k, z in ((2, 0.1), (6, 0.1), (2, 0.8)):
        (image,) = validate(PosteriorPicture(k, z, (0.05,)), Line(), tmp_path).values()
        shown[k, z] = image
    assert (shown[2, 0.1] != shown[6, 0.1]).any()
    assert (shown[2, 0.1] != shown[2, 0.8]).any()
