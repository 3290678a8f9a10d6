"""The Fidelity callback from the command line: logs, table, cache, best checkpoint, ranks, and bad input."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lit_knn.common.tables import read_rows
from lit_knn.modules import LitEstimator
from main import main
from tests import ROOT
from tests.ranks import run_main

DEMO = ["-c", str(ROOT / "configs" / "demo.yaml"), "-c", str(ROOT / "tests" / "tiny.yaml"), "--model.net.channels", "8"]
DEMO += ["--model.estimator.k", "32", "--model.estimator.n", "8"]
# An estimator replaces the model, on a few images.
QUICK = ["--model", "LitEstimator", "--model.estimator", "Exact", "--model.sampling_steps", "4"]
QUICK += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--trainer.limit_val_batches", "1"]
QUICK += ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs", "--data.batch_size", "8"]


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def quick(*args, **callback):
    """Run `validate` with `Fidelity` on 40 random images; return its output."""
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8)
    np.save("images.npy", images)
    return quick_on("Arrays", "--data.path", "images.npy", *args, **callback)


def quick_on(data, *args, class_path="lit_knn.callbacks.Fidelity", **options):
    options = {"num_samples": 30, "batch_size": 7, **options}
    callback = {"class_path": class_path, "init_args": options}
    Path("fidelity.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    main(["validate", "--data", data, *QUICK, "-c", "fidelity.yaml", *args])
    run = max(Path("runs/lightning_logs").iterdir(), key=lambda path: int(path.name.split("_")[1]))
    return run, read_rows(run / "fidelity.csv")


def extractor(name, **options):
    return {"class_path": f"lit_knn.metrics.{name}", "init_args": options}


def test_validate_logs_and_writes_what_it_measured():
    run, (row,) = quick(extractor=extractor("Pixels"), extra_metrics=["kid", "precision", "recall"], kid_subset_size=20)
    logged = read_rows(run / "metrics.csv")[0]
    for name in ("fd_pixels", "kid", "kid_std", "precision", "recall"):
        assert float(row[name]) == pytest.approx(float(logged[f"samples/{name}"]), rel=1e-4)
    assert {name: row[name] for name in ("num_samples", "images_seen", "checkpoint")} == {
        "num_samples": "30",
        "images_seen": "0",
        "checkpoint": "",
    }
    assert "inception_score" not in row
    # A few steps of the exact score's flow end near the data; noise would not.
    assert 0 < float(row["precision"]) <= 1


def test_statistics_of_the_data_are_kept_and_damaged_ones_computed_anew(capsys):
    options = {"extractor": extractor("Pixels"), "cache_dir": "cache"}
    first = quick(**options)[1][0]["fd_pixels"]
    (path,) = Path("cache").iterdir()
    kept = np.load(path)
    # A run uses the cached statistics ...
    np.savez(path, mean=kept["mean"] + 1, cov=kept["cov"], count=kept["count"])
    assert quick(**options)[1][0]["fd_pixels"] != first
    # ... unless they are damaged or from other data.
    path.write_bytes(path.read_bytes()[:300])
    assert quick(**options)[1][0]["fd_pixels"] == first
    assert list(Path("cache").iterdir()) == [path]
    np.save("images.npy", np.zeros((20, 3, 8, 8), np.uint8))
    quick_on("Arrays", "--data.path", "images.npy", **options)
    assert len(list(Path("cache").iterdir())) == 2


def test_mirror_images_are_real_images_only_where_asked():
    options = {"extractor": extractor("Pixels"), "cache_dir": "cache"}
    plain = quick(**options)[1][0]["fd_pixels"]
    (path,) = Path("cache").iterdir()
    # The flipped run uses the statistics without flips; only its samples come from another set.
    flipped = quick("--data.hflip", "true", **options)[1][0]["fd_pixels"]
    assert list(Path("cache").iterdir()) == [path]
    with_mirrored = quick("--data.hflip", "true", mirrored=True, **options)[1][0]["fd_pixels"]
    (other,) = set(Path("cache").iterdir()) - {path}
    assert len({plain, flipped, with_mirrored}) == 3
    images = np.load("images.npy").astype(np.float64) / 127.5 - 1
    for file, real in ((path, images), (other, np.concatenate([images, images[..., ::-1]]))):
        with np.load(file) as kept:
            assert kept["count"] == len(real)
            np.testing.assert_allclose(kept["mean"], real.reshape(len(real), -1).mean(0), atol=1e-6)
            np.testing.assert_allclose(kept["cov"], np.cov(real.reshape(len(real), -1), rowvar=False), atol=1e-6)


def test_two_callbacks_share_a_row_of_the_table():
    both = [
        {"class_path": "lit_knn.callbacks.Fidelity", "init_args": {"num_samples": 20, "extractor": extractor(name)}}
        for name in ("Pixels", "EfficientNetLite0")
    ]
    np.save("images.npy", np.random.default_rng(0).integers(0, 256, (12, 3, 8, 8), dtype=np.uint8))
    Path("both.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": both}}))
    main(["validate", "--data", "Arrays", "--data.path", "images.npy", *QUICK, "-c", "both.yaml"])
    (row,) = read_rows(Path("runs/lightning_logs/exact_0/fidelity.csv"))
    assert float(row["fd_pixels"]) > 0
    assert float(row["fd_efficientnet_lite0"]) > 0
    assert "fid" not in row


def test_fit_keeps_the_best_checkpoint_and_a_row_for_each_validation(capsys):
    callbacks = [
        {"class_path": "lit_knn.callbacks.PixelFrechetDistance", "init_args": {"num_samples": 70}},
        {
            "class_path": "pytorch_lightning.callbacks.ModelCheckpoint",
            "init_args": {"monitor": "fd_pixels", "mode": "min", "filename": "best"},
        },
    ]
    Path("best.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    steps = ["--trainer.max_steps", "12", "--trainer.val_check_interval", "3", "--model.ema_decay", "0.5"]
    main(["fit", *DEMO, "-c", "best.yaml", *steps])
    assert "Fréchet distance on pixels:" in capsys.readouterr().out
    rows = read_rows(Path("runs/demo/knn_0/fidelity.csv"))
    assert [row["images_seen"] for row in rows] == [str(32 * step) for step in (3, 6, 9, 12)]
    best = min(rows, key=lambda row: float(row["fd_pixels"]))
    path = "runs/demo/knn_0/checkpoints/best.ckpt"
    assert torch.load(path, weights_only=False)["global_step"] == int(best["step"])
    # The checkpoint has the averaged weights that were measured.
    main(["validate", *DEMO, "-c", "best.yaml", "--ckpt_path", path])
    (row,) = read_rows(Path("runs/demo/knn_1/fidelity.csv"))
    assert float(row["fd_pixels"]) == pytest.approx(float(best["fd_pixels"]), rel=1e-4)
    assert row["checkpoint"] == path


def validate_on_ranks(folder, ranks):
    command = ["validate", "--data", "Digits", *QUICK]
    # KNN's draws depend on the batch, so each rank must get whole batches.
    command += ["--model.estimator", "KNN", "--model.estimator.k", "64", "--model.estimator.n", "4"]
    run_main([*command, "-c", folder.parent / "two.yaml", "--trainer.logger.save_dir", folder], ranks)
    return read_rows(next(folder.rglob("fidelity.csv")))


def test_two_ranks_measure_what_one_does(tmp_path):
    options = {"num_samples": 70, "batch_size": 16, "extractor": extractor("Pixels")}
    options |= {"extra_metrics": ["kid", "precision", "recall"], "kid_subset_size": 50, "cache_dir": str(tmp_path)}
    callbacks = [
        {"class_path": "lit_knn.callbacks.Fidelity", "init_args": options},
        # There is only one batch, so the second rank has no work.
        {"class_path": "lit_knn.callbacks.PixelFrechetDistance", "init_args": {"num_samples": 66, "batch_size": 100}},
    ]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    two, one = (validate_on_ranks(tmp_path / str(ranks), ranks) for ranks in (2, 1))
    assert len(list(tmp_path.glob("fd_pixels-*.npz"))) == 1
    for ours, theirs in zip(two, one, strict=True):
        assert ours["num_samples"] == theirs["num_samples"]
        for name in ("fd_pixels", "kid", "precision", "recall"):
            if ours[name]:
                assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-4)
    assert two[0]["kid"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_samples": 1}, "num_samples must be at least 2, got 1"),
        ({"extra_metrics": ["kid", "fidd"]}, "unknown metric 'fidd'"),
        ({"extra_metrics": ["kid"], "extractor": "Pixels"}, "kid: kid_subset_size=1000 is more than the 30 images"),
        ({"extractor": extractor("InceptionV3", weights="no.pth")}, "InceptionV3: weights=no.pth: no such file"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_input_ends_in_one_line_before_any_sampling(options, words, capsys, monkeypatch):
    monkeypatch.setattr(LitEstimator, "sample", None)
    if options.get("extractor") == "Pixels":
        options = {**options, "extractor": extractor("Pixels")}
    with pytest.raises(SystemExit) as stop:
        quick(**options)
    assert stop.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert words in line
