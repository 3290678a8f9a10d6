"""`lit-knn best` measures all kept checkpoints of a run, also after interruptions, and names the best."""

import contextlib
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from pytorch_lightning.strategies import SingleDeviceStrategy

import lit_knn
from lit_knn.commands.best_report import summary_of_draws
from lit_knn.commands.report_runs import read_distances
from lit_knn.common.tables import read_rows
from lit_knn.data import Digits
from lit_knn.metrics import FidelityMeasure, Pixels
from lit_knn.metrics.fidelity import frechet_distance
from lit_knn.reference import ReferenceSet
from main import main
from tests.command_lines import refusal_of

RUN = "runs/table1_digits/knn_0"
TABLE = "checkpoints_fd_pixels.csv"
# Training keeps a checkpoint at each multiple of 96 images, and its end.
KEPT = [96, 192, 288, 352]
SMALL = """
trainer:
  callbacks:
    - {class_path: lit_knn.callbacks.PixelFrechetDistance, init_args: {num_samples: 70, batch_size: 16}}
    - {class_path: lit_knn.callbacks.CheckpointByImages, init_args: {every_n_images: 96}}
  enable_progress_bar: false
  enable_model_summary: false
  val_check_interval: 11
data: {init_args: {batch_size: 32, val_images: 32}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of eleven steps; it is trained once."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(SMALL)
    sizes = ["--model.net.channels", "8", "--model.estimator.k", "32", "--model.estimator.n", "8"]
    with contextlib.chdir(folder):
        main(
            ["fit", "-c", "table1/digits", "-c", "small.yaml", *sizes, "--trainer.max_steps", "11"]
        )
    return folder


@pytest.fixture
def run(trained, own_folder, blank_figures):
    """A copy of the trained run in the working directory."""
    shutil.copytree(trained, ".", dirs_exist_ok=True)
    return Path(RUN)


def best(*args, run=RUN):
    main(["best", "--run", run, *args])


def rows(name=TABLE):
    return read_rows(Path(RUN) / name)


def complaint(capsys, *args, run=RUN):
    capsys.readouterr()
    return refusal_of(["best", "--run", run, *args], capsys)


def fidelity(name="other.yaml", key="callbacks", **options):
    """Options of another measurement."""
    callback = {"class_path": "lit_knn.callbacks.Fidelity", "init_args": options}
    Path(name).write_text(yaml.safe_dump({"trainer": {key: [callback]}}))
    return "-c", name


def test_every_kept_checkpoint_gets_a_row_and_the_best_is_told(run, capsys):
    best()
    printed = capsys.readouterr().out
    table = rows()
    assert [int(row["images_seen"]) for row in table] == KEPT
    assert [int(row["step"]) for row in table] == [3, 6, 9, 11]
    files = [*(f"images_seen={n}.ckpt" for n in KEPT[:3]), "last.ckpt"]
    assert [Path(row["checkpoint"]).name for row in table] == files
    # `validate` gives the same number for this checkpoint.
    main(["validate", "-c", str(run / "config.yaml"), "--ckpt_path", table[1]["checkpoint"]])
    (measured,) = read_rows(Path("runs/table1_digits/knn_1/fidelity.csv"))
    assert float(table[1]["fd_pixels"]) == pytest.approx(float(measured["fd_pixels"]), rel=1e-5)
    least = min(table, key=lambda row: float(row["fd_pixels"]))
    assert (
        f"Best of 4 checkpoints: Fréchet distance on pixels {float(least['fd_pixels']):.4g}"
        in printed
    )
    assert f"step {least['step']}, {int(least['images_seen']):,} images seen" in printed
    assert f"  {least['checkpoint']}\n" in printed
    assert (run / "checkpoints_fd_pixels.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "checkpoints_fd_pixels.pdf").read_bytes().startswith(b"%PDF")
    distances = [(n, float(row["fd_pixels"])) for n, row in zip(KEPT, table, strict=True)]
    assert read_distances([run])["fd_pixels"] == distances
    # `best` makes no new run folder.
    assert sorted(path.name for path in run.parent.iterdir()) == ["knn_0", "knn_1"]


def test_further_draws_of_best_checkpoint_have_other_seeds(run, capsys):
    best("--draws", "3")
    chosen = min(rows(), key=lambda row: float(row["fd_pixels"]))
    drawn = rows("draws_fd_pixels.csv")
    assert [(row["draw"], row["checkpoint"]) for row in drawn] == [
        (n, chosen["checkpoint"]) for n in "23"
    ]
    model, values = lit_knn.load(chosen["checkpoint"]), [float(chosen["fd_pixels"])]
    data = Digits()
    data.setup()
    for row, seeds in zip(drawn, (range(70, 140), range(140, 210)), strict=True):
        values.append(frechet_distance(model.sample(seeds), data.reference, Pixels()))
        # float32 rounds the images of other batches otherwise, by 1e-7; other seeds change the value by 1e-4.
        assert float(row["fd_pixels"]) == pytest.approx(values[-1], rel=1e-5)
    printed = capsys.readouterr().out
    told = [
        float(number) for number in re.findall(r"The least, ([\d.]+), .* is ([\d.]+)\n", printed)[0]
    ]
    assert told == pytest.approx([min(values), (values[1] + values[2]) / 2], rel=1e-3)
    # Draws that differ more show that the mean leaves out the first.
    summary = summary_of_draws("fid", [1.0, 3.0, 5.0])
    assert re.findall(r"The least, (\d),.* is (\d)$", summary) == [("1", "4")]
    best("--draws", "3")
    assert rows("draws_fd_pixels.csv") == drawn
    Path(chosen["checkpoint"]).unlink()
    capsys.readouterr()
    best("--draws", "4")
    printed = capsys.readouterr().out
    assert "of 3 draws" in printed
    assert "Its file is gone" in printed


def test_best_loads_data_once_and_skips_measured_checkpoints(run, monkeypatch, capsys):
    passes, measured = [], []
    share, measure = ReferenceSet.share, FidelityMeasure.__call__
    monkeypatch.setattr(ReferenceSet, "share", lambda self, *a: passes.append(1) or share(self, *a))
    monkeypatch.setattr(
        FidelityMeasure,
        "__call__",
        lambda self, *a, **options: measured.append(1) or measure(self, *a, **options),
    )
    best()
    before = (run / TABLE).read_bytes()
    (run / "checkpoints_fd_pixels.png").unlink()
    best()
    assert (len(passes), len(measured)) == (1, 4)
    assert (run / TABLE).read_bytes() == before
    assert (run / "checkpoints_fd_pixels.png").exists()
    # A checkpoint that is kept later is added.
    shutil.copy(run / "checkpoints" / "last.ckpt", run / "checkpoints" / "images_seen=384.ckpt")
    capsys.readouterr()
    best()
    assert "Best of 5 checkpoints" in capsys.readouterr().out
    assert len(measured) == 5


def test_checkpoints_unreadable_on_a_rank_are_named_and_skipped(run, capsys, monkeypatch):
    # The other rank says no: all ranks agree to nothing, and any of them only to what this one reads.
    with monkeypatch.context() as patch:
        decide = "reduce_boolean_decision"
        patch.setattr(
            SingleDeviceStrategy, decide, lambda self, decision, all=True: decision and not all
        )
        with pytest.warns(UserWarning, match="cannot be read by another rank"):
            assert "4 checkpoint(s) are not measured" in complaint(capsys)
    assert not (run / TABLE).exists()
    folder = run / "checkpoints"
    whole = (folder / "images_seen=96.ckpt").read_bytes()
    (folder / "images_seen=96.ckpt").write_bytes(whole[: len(whole) // 2])
    checkpoint = torch.load(folder / "images_seen=192.ckpt", weights_only=False)
    next(iter(checkpoint["state_dict"].values())).fill_(float("nan"))
    torch.save(checkpoint, folder / "images_seen=192.ckpt")
    with pytest.warns(
        UserWarning, match=r"images_seen=96\.ckpt is damaged.*the other checkpoints are measured"
    ):
        line = complaint(capsys)
    assert line.startswith("error: 2 checkpoint(s) are not measured: ")
    assert "images_seen=192.ckpt has weights that are not finite" in line
    assert [int(row["images_seen"]) for row in rows()] == KEPT[2:]
    # Once they are repaired, they are measured, too.
    (folder / "images_seen=96.ckpt").write_bytes(whole)
    shutil.copy(folder / "images_seen=288.ckpt", folder / "images_seen=192.ckpt")
    best()
    assert sorted(int(row["images_seen"]) for row in rows()) == KEPT


class Renamed(Pixels):
    """Pixels that say that they are other features."""

    def fingerprint(self):
        return "renamed pixels"


class Scored(Pixels):
    """Pixels with logits, so that it has an Inception Score like FID."""

    metric = "fid"
    num_logits = 3

    def __call__(self, images):
        features, _ = super().__call__(images)
        return features, features[:, :3]

    def fingerprint(self):
        return "scored pixels"


def test_a_table_of_other_settings_is_not_mixed_with(run, capsys):
    best()
    before, here = (run / TABLE).read_bytes(), "tests.commands.test_best_checkpoint"
    plain = {"extractor": {"class_path": "lit_knn.metrics.Pixels"}, "num_samples": 70}
    for options, words in (
        (fidelity(**{**plain, "num_samples": 71}), "num_samples=70, not 71"),
        (
            fidelity("a.yaml", **{**plain, "extractor": {"class_path": f"{here}.Renamed"}}),
            "extractor=",
        ),
        (fidelity("b.yaml", **plain, mirrored=True), "mirrored=False, not True"),
        (("--data.train_images", "1000"), "data="),
        (("--model.predict_steps", "2"), "model.num_steps=1, not 2"),
    ):
        assert f"{RUN}/{TABLE} has results with {words}" in complaint(capsys, *options)
    line = complaint(capsys, *fidelity("c.yaml", **plain, extra_metrics=["recall"]))
    assert f"{RUN}/{TABLE} has other columns (recall)" in line
    best("--model.total_steps", "99")  # no option of sampling
    assert (run / TABLE).read_bytes() == before


def test_an_appended_measurement_takes_the_place_of_the_runs_own(run, capsys):
    options = {
        "num_samples": 60,
        "extractor": {"class_path": "tests.commands.test_best_checkpoint.Scored"},
    }
    best(
        *fidelity(
            key="callbacks+",
            **options,
            cache_dir=None,
            extra_metrics=["kid", "recall"],
            kid_subset_size=30,
        )
    )
    least = min(rows("checkpoints_fid.csv"), key=lambda row: float(row["fid"]))
    said = f"FID {float(least['fid']):.4g}, Inception Score {float(least['inception_score']):.4g}"
    assert f"Best of 4 checkpoints: {said}" in capsys.readouterr().out
    assert {"inception_score_std", "kid", "kid_std", "recall"} <= set(least)
    other = fidelity(
        key="callbacks+",
        **options,
        cache_dir=None,
        extra_metrics=["kid", "recall"],
        kid_subset_size=20,
    )
    assert "has results with kid_subset_size=30, not 20" in complaint(capsys, *other)
    assert not (run / TABLE).exists()
    assert len(read_distances([run])["inception_score"]) == 4


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_the_images_are_those_that_a_validation_compares_with(run, capsys):
    """These are held-out ones, and not latents."""
    code = {"class_path": "lit_knn.data.autoencoders.PCA", "init_args": {"latent_shape": [1, 8, 8]}}
    images = {
        "class_path": "lit_knn.data.Digits",
        "init_args": {"batch_size": 32, "val_images": 32},
    }
    options = {"images": images, "autoencoder": code, "held_out": 90}
    Path("data.yaml").write_text(
        yaml.safe_dump({"data": {"class_path": "lit_knn.data.Latents", "init_args": options}})
    )
    pixels = {"class_path": "lit_knn.metrics.Pixels"}
    config = [
        *fidelity(extractor=pixels, num_samples=70, held_out=True, extra_metrics=["recall"]),
        "-c",
        "data.yaml",
    ]
    best(*config)
    found = rows("checkpoints_fd_pixels_held_out.csv")[0]
    main(["validate", "-c", str(run / "config.yaml"), *config, "--ckpt_path", found["checkpoint"]])
    (measured,) = read_rows(Path("runs/table1_digits/knn_1/fidelity.csv"))
    for name in ("fd_pixels_held_out", "recall_held_out"):
        assert float(found[name]) == pytest.approx(float(measured[name]), rel=1e-5)
    assert "has results with autoencoder=" in complaint(
        capsys, *config, "--data.autoencoder.scale", "2"
    )


def test_best_refuses_unmeasurable_input_before_sampling(run, capsys, monkeypatch):
    monkeypatch.setattr("callbacks.Fidelity.samples", lambda *_: pytest.fail("samples were drawn"))
    assert "runs/config.yaml does not exist; it holds the runs table1_digits/knn_0" in complaint(
        capsys, run="runs"
    )
    assert "nowhere/config.yaml does not exist; give the folder of a training run" in complaint(
        capsys, run="nowhere"
    )
    line = complaint(capsys, "--trainer.callbacks", "[]")
    assert "the run has no lit_knn.callbacks.Fidelity; add -c configs/evaluate/fid.yaml" in line
    assert "the checkpoint is of another architecture" in complaint(
        capsys, "--model.net.channels", "16"
    )
    # The superuser may write everywhere, so the right is taken away here.
    may = os.access
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path) != run and may(path, mode))
        assert f"nothing can be written into the folder {run}" in complaint(capsys)
    for path in (run / "checkpoints").glob("images_seen*"):
        path.unlink()
    assert "knn_0/checkpoints has no images_seen=N.ckpt" in complaint(capsys)
    (run / "config.yaml").write_text("a: 3")
    assert "is not the configuration of a training run" in complaint(capsys)
    assert not list(run.glob("checkpoints_*"))
