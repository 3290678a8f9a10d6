"""Files of samples: each sample under its seed, and grids with what their names say."""

import os
import resource
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from lit_knn.callbacks import SampleGrid, SampleWriter
from lit_knn.common.errors import InputError
from lit_knn.common.tables import read_rows
from lit_knn.data.image_files import read_image_files
from lit_knn.figures import captioned, sample_picture
from lit_knn.modules.conditioning import Conditioning
from lit_knn.sampling.samplers import seeded_classes
from tests.interrupted_runs import file_size_limit
from tests.ranks import run_main
from tests.short_training import TRAINER
from tests.trained_runs import last
from tests.watched import Images

SEEDS = [5, 0, 3, 70, 1, 4, 2]


def picture(seed):
    """A colour picture of 4 rows and 6 columns that no other seed has, in model space."""
    pixels = (torch.arange(3 * 4 * 6) * 3 + 5 * int(seed)) % 256
    return pixels.reshape(3, 4, 6) / 127.5 - 1


def pixels(seed):
    return np.rint((picture(seed).permute(1, 2, 0).numpy() + 1) * 127.5)


class Painter(pl.LightningModule):
    """Paints the `picture` of each seed, and records what it was asked for."""

    step = 7
    paint = staticmethod(picture)

    def __init__(self):
        super().__init__()
        self.asked = []

    def predict_step(self, batch, batch_idx):
        return torch.stack([self.paint(seed) for seed in batch])

    def sample(self, seeds, num_steps=None):
        self.asked.append((list(seeds), num_steps))
        return torch.stack([picture(seed + 10 * num_steps) for seed in seeds])

    def validation_step(self, batch, batch_idx):
        """Do nothing."""


def predict(folder, format="png", **attributes):
    """Write the samples of a `Painter` with these attributes; returns the names of the files."""
    model = type("Changed", (Painter,), attributes)()
    trainer = pl.Trainer(**TRAINER, callbacks=[SampleWriter(format, str(folder))])
    trainer.predict(
        model, torch.utils.data.DataLoader(SEEDS, batch_size=3), return_predictions=False
    )
    return sorted(path.name for path in folder.iterdir())


def test_each_png_is_the_sample_of_the_seed_in_its_name(tmp_path):
    assert predict(tmp_path / "out") == sorted(f"{seed:06d}.png" for seed in SEEDS)
    for seed in SEEDS:
        assert np.array_equal(
            np.asarray(Image.open(tmp_path / "out" / f"{seed:06d}.png")), pixels(seed)
        )
    # The grid has the first 64 seeds in their order, in rows of two, each pixel six times as large.
    grid = np.asarray(Image.open(tmp_path / "out_grid.png"))
    assert np.array_equal(grid[2:26:6, 2:38:6], pixels(0))
    assert np.array_equal(grid[2:26:6, 40:76:6], pixels(1))
    assert np.array_equal(grid[28:52:6, 2:38:6], pixels(2))


def test_a_grid_says_how_many_of_the_samples_it_shows(monkeypatch, tmp_path):
    monkeypatch.setitem(globals(), "SEEDS", list(range(70)))
    predict(tmp_path / "out")
    grid = np.asarray(Image.open(tmp_path / "out_grid.png"))
    grid_height = 8 * (4 * 6 + 2) + 2
    blank = torch.ones(3, grid_height, grid.shape[1])
    expected = captioned(blank, "64 of 70 samples")[:, grid_height:]
    assert np.array_equal(grid[grid_height:], np.rint(expected.permute(1, 2, 0).numpy() * 255))

    # A scatter plot has room for more.
    predict(tmp_path / "points", paint=lambda self, seed: torch.tensor([float(seed), 1.0]))
    plot = np.asarray(Image.open(tmp_path / "points_grid.png"))
    text = captioned(torch.ones(3, 480, 480), "70 of 70 samples")[:, 480:]
    assert np.array_equal(plot[480:], np.rint(text.permute(1, 2, 0).numpy() * 255))


@pytest.mark.parametrize(
    ("format", "name"), [("png", "000005.png"), ("npz", "batches/0000_000000.npz")]
)
def test_a_full_disk_leaves_no_part_of_a_file(format, name, tmp_path):
    with file_size_limit(60), pytest.raises(OSError, match="File too large") as full:
        predict(tmp_path / "out", format)
    assert full.value.filename == str(tmp_path / "out" / name)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_there_may_be_more_batches_than_open_files(monkeypatch, tmp_path):
    monkeypatch.setitem(globals(), "SEEDS", list(range(300)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 50, limits[1]))
    try:
        assert predict(tmp_path / "out", "npz") == ["samples.npz"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_batches_that_lie_on_another_machine_are_missed(monkeypatch, tmp_path):
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    with pytest.raises(InputError, match="lacks batches of other machines"):
        predict(tmp_path / "out", "npz")


def test_a_sample_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(InputError, match="the sample of seed 3 is not finite"):
        predict(tmp_path / "out", paint=lambda self, seed: picture(seed) / (seed != 3))


def test_images_of_a_conditional_model_have_their_classes(tmp_path):
    classes = Conditioning(
        SimpleNamespace(num_classes=10), class_conditional=True, sampling_class=None
    )
    expected = seeded_classes(sorted(SEEDS), 10, torch.device("cpu")).tolist()
    assert len(set(expected)) > 2
    assert "dataset.json" in predict(tmp_path / "png", conditioning=classes)
    rows = read_rows(tmp_path / "png" / "classes.csv")
    assert [row["file"] for row in rows] == [f"{seed:06d}.png" for seed in sorted(SEEDS)]
    assert [int(row["class"]) for row in rows] == expected
    # The samples are a data set of images with labels.
    images, labels, _ = read_image_files(tmp_path / "png")
    assert np.array_equal(images[:3].transpose(0, 2, 3, 1), [pixels(seed) for seed in range(3)])
    assert labels.tolist() == expected
    assert predict(tmp_path / "npz", "npz", conditioning=classes) == ["samples.npz"]
    with np.load(tmp_path / "npz" / "samples.npz") as file:
        assert file["labels"].tolist() == expected
    # With guidance 0 it is the unconditional model.
    without = predict(tmp_path / "without", conditioning=classes, guidance=0.0)
    assert not {"dataset.json", "classes.csv"} & set(without)


@pytest.mark.parametrize("name", ["out_grid.png", "out/1.png"])
def test_no_earlier_sample_or_picture_is_overwritten(name, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(InputError, match=r"SampleWriter: .*(is not empty|exists); nothing"):
        predict(tmp_path / "out")
    assert (tmp_path / name).read_bytes() == b"mine"


def test_latents_are_written_as_they_are(tmp_path):
    latents = {"paint": lambda self, seed: torch.full((5, 2, 2), 3.25 * int(seed))}
    assert predict(tmp_path / "out", **latents) == ["samples.npz"]
    assert os.listdir(tmp_path) == ["out"]
    with np.load(tmp_path / "out" / "samples.npz") as file:
        assert file["images"].shape == (7, 5, 2, 2)
        assert file["images"].dtype == np.float32
        assert file["images"][:, 0, 0, 0].tolist() == [3.25 * seed for seed in sorted(SEEDS)]


@pytest.mark.usefixtures("own_folder")
def test_two_ranks_write_the_samples_of_one_in_seed_order(trained_run):
    run, options = trained_run("ict")
    predict = ["predict", *options, "--ckpt_path", str(last(run)), "--data.predict_samples", "6"]
    predict += ["--data.batch_size", "2", "--sample_writer.format", "npz", "--sample_writer.folder"]
    for ranks in (1, 2):
        run_main([*predict, str(ranks)], ranks)
    one, two = (np.load(f"{ranks}/samples.npz") for ranks in (1, 2))
    assert two["seeds"].tolist() == one["seeds"].tolist() == list(range(6))
    # Another batch may round a value to the next grey level.
    assert np.abs(one["images"].astype(int) - two["images"]).max() <= 1


def test_grids_have_samples_steps_and_step_of_their_validation(tmp_path):
    grids, module, seen = SampleGrid(num_samples=4, num_steps=(1, 3)), Painter(), []
    logger = pl.loggers.TensorBoardLogger(tmp_path, name="a")
    logger.experiment.add_image = lambda tag, picture, step=None, **_: seen.append((tag, step))
    options = {**TRAINER, "logger": logger, "limit_val_batches": 1, "enable_checkpointing": False}
    trainer = pl.Trainer(**options, callbacks=[grids])
    for module.step in (7, 9):
        trainer.validate(module, Images(), verbose=False)
        assert [path.name for path in grids.last_paths] == [
            f"step_000000{module.step}_{n}-step.png" for n in (1, 3)
        ]
    assert seen == [(f"samples/{steps}-step", step) for step in (7, 9) for steps in (1, 3)]
    assert module.asked == [([0, 1, 2, 3], 1), ([0, 1, 2, 3], 3)] * 2
    for steps, path in zip((1, 3), grids.last_paths, strict=True):
        found = np.asarray(Image.open(path))
        assert np.array_equal(found[2:26:6, 2:38:6], pixels(10 * steps))
        assert np.array_equal(found[28:52:6, 40:76:6], pixels(3 + 10 * steps))


def inked(picture):
    """Tell which pixels (H, W) are neither white nor the grey of the axes."""
    return (picture.amax(0) - picture.amin(0)).numpy() > 0.2


def test_points_and_series_are_drawn_where_they_are(tmp_path):
    cross = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    rows, columns = np.nonzero(inked(sample_picture(cross)))
    assert np.ptp(columns) == pytest.approx(np.ptp(rows), abs=3)  # The axes have one unit.
    rows, columns = np.nonzero(inked(sample_picture(cross[:2])))
    assert np.ptp(columns) > 10 * np.ptp(rows)
    # A series that rises is a line from the lower left to the upper right.
    rising = torch.linspace(0, 1, 50)
    rows, columns = np.nonzero(inked(sample_picture(rising.repeat(1, 1, 1))))
    assert np.corrcoef(rows, columns)[0, 1] < -0.95
    # Four of them stand in two rows, with room between them.
    ink = inked(sample_picture(rising.repeat(4, 1, 1)))
    for across in (0, 1):
        used = ink.any(across)
        assert np.count_nonzero(np.diff(used.astype(int)) == 1) == 2
    # They stand along the rows, in the order of the samples: where one rises, ink is at many heights.
    for number, (is_low, is_right) in enumerate(
        ((False, False), (False, True), (True, False), (True, True))
    ):
        series = torch.zeros(4, 1, 50)
        series[number] = rising
        ink = inked(sample_picture(series))
        height, middle = ink.shape[0], ink.shape[1] // 2
        heights = [half.any(1).nonzero()[0] for half in (ink[:, :middle], ink[:, middle:])]
        assert (len(heights[1]) > len(heights[0])) == is_right
        assert (heights[is_right].mean() > height / 2) == is_low
    assert sample_picture(torch.zeros(4, 5)) is None
    drawn = {"paint": lambda self, seed: torch.tensor([float(seed), 1.0])}
    assert predict(tmp_path / "out", **drawn) == ["samples.npz"]
    assert inked(
        torch.from_numpy(np.asarray(Image.open(tmp_path / "out_grid.png")) / 255).permute(2, 0, 1)
    ).any()


def test_a_validation_draws_points_too(tmp_path):
    class Points(Painter):
        def sample(self, seeds, num_steps=None):
            return torch.randn(len(seeds), 2)

    grids = SampleGrid(num_samples=9, num_steps=(1,))
    options = {
        **TRAINER,
        "limit_val_batches": 1,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
    }
    pl.Trainer(**options, callbacks=[grids]).validate(Points(), Images(), verbose=False)
    (path,) = grids.last_paths
    assert np.asarray(Image.open(path)).std() > 5


def test_samples_that_are_no_pictures_are_named(tmp_path):
    class Vectors(Painter):
        def sample(self, seeds, num_steps=None):
            return torch.randn(len(seeds), 5)

    options = {**TRAINER, "limit_val_batches": 1, "enable_checkpointing": False}
    trainer = pl.Trainer(**options, default_root_dir=tmp_path, callbacks=[SampleGrid(9, (1,))])
    with pytest.warns(UserWarning, match=r"SampleGrid draws nothing of samples of shape \(5,\)"):
        trainer.validate(Vectors(), Images(), verbose=False)
