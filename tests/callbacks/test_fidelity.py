"""Samples of a run against its data: distances, their table and cache, memorisation, and ranks."""

from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from PIL import Image

from lit_knn.callbacks import Memorisation
from lit_knn.common.tables import read_rows
from lit_knn.data import Digits
from lit_knn.estimators import Exact, Wiener
from lit_knn.metrics import Pixels, frechet_distance
from lit_knn.modules import LitEstimator
from lit_knn.sampling.samplers import heun_sampler, seeded_noise
from main import main
from tests import ROOT
from tests.interrupted_runs import file_size_limit
from tests.ranks import run_main
from tests.short_training import TRAINER
from tests.trained_runs import events_of
from tests.watched import Images

PIXELS = {"class_path": "lit_knn.metrics.Pixels"}
FEW = {"num_samples": 30, "batch_size": 7, "extractor": PIXELS, "cache_dir": None}
CACHED = {**FEW, "cache_dir": "cache"}


@pytest.fixture
def measure(validate):
    """`measure(*args, **options)` measures the fidelity of a few samples; returns the run and the last row."""
    np.save("images.npy", np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8))
    data = ["--data", "Arrays", "--data.path", "images.npy", "--data.batch_size", "8"]

    def measured(*args, **options):
        model = ["--model.estimator", "Exact", "--model.sampling_steps", "4"]
        run = validate({"Fidelity": {**FEW, **options}}, *data, *model, *args)
        return run, read_rows(run / "fidelity.csv")[-1]

    return measured


def test_data_statistics_are_cached_and_damaged_ones_recomputed(measure):
    first = measure(**CACHED)[1]["fd_pixels"]
    (path,) = Path("cache").iterdir()
    whole = path.read_bytes()
    # A run uses the kept statistics ...
    with np.load(path) as kept:
        np.savez(path, mean=kept["mean"] + 1, cov=kept["cov"], count=kept["count"])
    assert measure(**CACHED)[1]["fd_pixels"] != first
    # ... unless they are cut off, have other bytes, or are of other data.
    for damaged in (whole[:300], whole[:200] + b"\xff" * 9 + whole[209:]):
        path.write_bytes(damaged)
        assert measure(**CACHED)[1]["fd_pixels"] == first
    assert list(Path("cache").iterdir()) == [path]
    np.save("images.npy", np.zeros((20, 3, 8, 8), np.uint8))
    measure(**CACHED)
    assert len(list(Path("cache").iterdir())) == 2


def test_statistics_that_cannot_be_kept_are_used_all_the_same(measure):
    # They take 295 kB. The pass over the data may have taken hours.
    with (
        file_size_limit(200_000),
        pytest.warns(UserWarning, match="cannot be written: File too large; going on"),
    ):
        value = measure(**CACHED)[1]["fd_pixels"]
    assert not list(Path("cache").iterdir())
    assert measure(**FEW)[1]["fd_pixels"] == value


def test_mirror_images_are_real_images_only_where_asked(measure):
    plain = measure(**CACHED)[1]["fd_pixels"]
    (path,) = Path("cache").iterdir()
    # The flipped run uses the statistics without flips; only its samples come from another set.
    flipped = measure("--data.hflip", "true", **CACHED)[1]["fd_pixels"]
    assert list(Path("cache").iterdir()) == [path]
    with_mirrored = measure("--data.hflip", "true", mirrored=True, **CACHED)[1]["fd_pixels"]
    (other,) = set(Path("cache").iterdir()) - {path}
    assert len({plain, flipped, with_mirrored}) == 3
    images = np.load("images.npy").astype(np.float64) / 127.5 - 1
    for file, real in ((path, images), (other, np.concatenate([images, images[..., ::-1]]))):
        with np.load(file) as kept:
            assert kept["count"] == len(real)
            np.testing.assert_allclose(kept["mean"], real.reshape(len(real), -1).mean(0), atol=1e-6)
            np.testing.assert_allclose(
                kept["cov"], np.cov(real.reshape(len(real), -1), rowvar=False), atol=1e-6
            )


def test_each_measurement_is_logged_and_is_a_row(measure):
    where, extra = (
        ["--trainer.logger.version", "one"],
        {"extra_metrics": ["kid", "precision", "recall"]},
    )
    run, first = measure(*where, kid_subset_size=20, **extra)
    _, logged = events_of(run)
    for name in ("fd_pixels", "kid", "kid_std", "precision", "recall"):
        assert float(first[name]) == pytest.approx(logged[f"samples/{name}"][0], rel=1e-4)
    assert (first["num_samples"], first["images_seen"], first["checkpoint"]) == ("30", "0", "")
    # A few steps of the exact score's flow end near the data; noise would not.
    assert 0 < float(first["precision"]) <= 1
    _, again = measure(*where)
    _, last = measure(*where, num_samples=20)
    table = run / "fidelity.csv"
    assert again["fd_pixels"] == first["fd_pixels"]
    assert read_rows(table) == [first, again, last]
    # The row of an earlier run may have the same samples, another step and another metric.
    table.write_text("step,images_seen,num_samples,checkpoint,fid\n2,0,30,,9.5\n")
    measure(*where)
    assert [(row["step"], row["fid"]) for row in read_rows(table)] == [("2", "9.5"), ("0", "")]


class Halves(Pixels):
    """The left half of each image."""

    metric = "fd_halves"

    def __call__(self, images):
        return super().__call__(images * (torch.arange(8) < 4))


def test_callbacks_of_one_name_have_rows_and_the_last_logs(validate):
    options = {**FEW, "extra_metrics": ["recall"]}
    halves = {**options, "extractor": {"class_path": f"{__name__}.Halves"}}
    estimator = ["--model.estimator", "Exact", "--model.sampling_steps", "4"]
    run = validate(
        {"Fidelity": options, "fidelity.Fidelity": halves, "Memorisation": {"num_samples": 9}},
        *estimator,
    )
    whole, half = read_rows(run / "fidelity.csv")
    assert 0 < float(whole["recall"]) != float(half["recall"]) > 0
    assert events_of(run)[1]["samples/recall"] == [pytest.approx(float(half["recall"]), rel=1e-4)]
    assert whole["fd_halves"] == half["fd_pixels"] == ""


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_distance_uses_held_out_and_copies_use_training_images(
    validate,
):
    size = {"num_samples": 60, "batch_size": 25}
    both = {
        "Fidelity": {**FEW, **size},
        "PixelFrechetDistance": {**size, "held_out": True},
        "Memorisation": size,
    }
    data = ["--data.held_out", "100", "--data.train_images", "300", "--data.batch_size", "50"]
    run = validate(both, "--model.estimator", "Exact", *data)
    data = Digits(held_out=100, train_images=300)
    data.setup()
    exact = Exact().bind(data.reference)
    samples = heun_sampler(exact.posterior_mean, seeded_noise(range(60), (1, 8, 8)))
    distance = frechet_distance(samples, data.held_out_reference, Pixels())
    events, logged = events_of(run)
    assert logged["samples/fd_pixels_held_out"] == [pytest.approx(distance, rel=1e-3)]
    assert logged["samples/copied_fraction"][0] > 0.9
    assert events.Tags()["images"] == ["samples/memorisation"]
    # The two callbacks share a row.
    (row,) = read_rows(run / "fidelity.csv")
    assert float(row["fd_pixels_held_out"]) > float(row["fd_pixels"]) > 0


DEMO = [
    "-c",
    str(ROOT / "configs" / "demo.yaml"),
    "-c",
    str(ROOT / "tests" / "tiny.yaml"),
    "--model.net.channels",
    "8",
]
DEMO += ["--model.estimator.k", "32", "--model.estimator.n", "8", "-c", "best.yaml"]


def test_fit_keeps_best_checkpoint_and_a_row_per_validation(capsys):
    best = {"monitor": "fd_pixels", "mode": "min", "filename": "best"}
    callbacks = [
        {"class_path": "lit_knn.callbacks.PixelFrechetDistance", "init_args": {"num_samples": 70}},
        {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": best},
    ]
    Path("best.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    steps = [
        "--trainer.max_steps",
        "12",
        "--trainer.val_check_interval",
        "3",
        "--trainer.num_sanity_val_steps",
        "1",
    ]
    main(["fit", *DEMO, *steps, "--model.ema_decay", "0.5"])
    assert "Fréchet distance on pixels:" in capsys.readouterr().out
    rows = read_rows(Path("runs/demo/knn_0/fidelity.csv"))
    assert [row["images_seen"] for row in rows] == [str(32 * step) for step in (3, 6, 9, 12)]
    best = min(rows, key=lambda row: float(row["fd_pixels"]))
    path = "runs/demo/knn_0/checkpoints/best.ckpt"
    assert torch.load(path, weights_only=False)["global_step"] == int(best["step"])
    # The checkpoint has the averaged weights that were measured.
    main(["validate", *DEMO, "--ckpt_path", path])
    (row,) = read_rows(Path("runs/demo/knn_1/fidelity.csv"))
    assert float(row["fd_pixels"]) == pytest.approx(float(best["fd_pixels"]), rel=1e-4)
    assert row["checkpoint"] == path


def test_two_ranks_measure_what_one_does(command):
    options = {"num_samples": 70, "batch_size": 16, "extractor": PIXELS, "cache_dir": "cache"}
    options |= {"extra_metrics": ["kid", "precision", "recall"], "kid_subset_size": 50}
    estimators = {
        "KNN": {"class_path": "KNN", "init_args": {"k": 32, "n": 8}},
        "exact": {"class_path": "Exact"},
    }
    curve = {
        "estimators": estimators,
        "noise_levels": [0.5, 5.0],
        "num_z": 20,
        "repeats": 3,
        "batch_size": 8,
    }
    # There is only one batch of pixels, so the second rank has no work.
    callbacks = {
        "Fidelity": options,
        "PixelFrechetDistance": {"num_samples": 66, "batch_size": 100},
        "FreeParticles": {
            "estimators": {"Exact": {"class_path": "Exact"}},
            "num_particles": 40,
            "steps": 2,
            "every_n_steps": 2,
        },
    }
    # KNN's draws depend on the batch, so each rank must get whole batches.
    knn = ["--model.estimator", "KNN", "--model.estimator.k", "64", "--model.estimator.n", "4"]
    args = [*command({**callbacks, "EstimatorError": curve}, *knn), "--trainer.logger.save_dir"]
    for ranks in (1, 2):
        run_main([*args, str(ranks)], ranks)
    assert len(list(Path("cache").iterdir())) == 1
    for name in ("fidelity.csv", "estimator_error.csv", "particles.csv"):
        one, two = (read_rows(next(Path(ranks).rglob(name))) for ranks in ("1", "2"))
        for ours, theirs in zip(two, one, strict=True):
            for column, value in ours.items():
                if column not in ("estimator", "ms_per_estimate", "run", "seconds") and value:
                    assert float(value) == pytest.approx(
                        float(theirs[column]), rel=1e-4, abs=1e-18
                    ), column


def test_memorisation_restarts_each_validation_and_shows_pairs(
    tmp_path,
):
    options = {
        "limit_val_batches": 1,
        "enable_checkpointing": False,
        "logger": pl.loggers.CSVLogger(tmp_path),
    }

    def copied(callback, *estimators):
        trainer = pl.Trainer(**{**TRAINER, **options}, callbacks=[callback])
        models = [LitEstimator(own, sampling_steps=40) for own in estimators]
        found = [trainer.validate(model, Images(), verbose=False)[0] for model in models]
        assert not trainer.progress_bar_metrics  # Only distances are shown there.
        return [values["samples/copied_fraction"] for values in found]

    assert copied(Memorisation(8, 3, num_pairs=2), Exact(), Wiener(r=4)) == [1, 0]
    assert copied(Memorisation(8, 3, threshold=1.0, num_pairs=2), Wiener(r=4), Exact()) == [1, 1]
    # The last picture is of copies, samples above, their images below.
    (path,) = tmp_path.rglob("memorisation/step_0000000.png")
    picture = np.asarray(Image.open(path))[:, :, 0].astype(int)
    upper, lower = picture[2:34], picture[36:68]
    assert picture.shape[1] == 2 * 34 + 2
    assert np.abs(upper - lower).max() <= 2
    assert upper.std() > 30
