"""`lit-knn best` measures all kept checkpoints of a run, also after interruptions, and names the best."""

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from pytorch_lightning.strategies import SingleDeviceStrategy

from lit_knn.commands.report import read_distances
from lit_knn.common.tables import read_rows
from lit_knn.metrics import FidelityMeasure, Pixels
from lit_knn.reference import ReferenceSet
from main import main
from tests import ROOT

RUN = "runs/table1_digits/knn_0"
TABLE = "checkpoints_fd_pixels.csv"
SIZES = ["--model.net.channels", "8", "--model.estimator.k", "32", "--model.estimator.n", "8"]
STEPS, BATCH, EVERY = 11, 32, 96
# Training keeps a checkpoint at each multiple of 96 images, and its end.
KEPT = [96, 192, 288, 352]
callbacks = [
    {"class_path": "lit_knn.callbacks.PixelFrechetDistance", "init_args": {"num_samples": 70, "batch_size": 16}},
    {"class_path": "lit_knn.callbacks.CheckpointByImages", "init_args": {"every_n_images": EVERY}},
]
SMALL = {
    "trainer": {"callbacks": callbacks, "enable_progress_bar": False, "enable_model_summary": False},
    "data": {"init_args": {"batch_size": BATCH, "val_images": 32}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of eleven steps; it is trained once."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    with contextlib.chdir(folder):
        fit("--trainer.max_steps", str(STEPS))
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of the trained run in the working directory."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path(RUN)


def fit(*args):
    config = str(ROOT / "configs" / "table1" / "digits.yaml")
    main(["fit", "-c", config, "-c", "small.yaml", *SIZES, "--trainer.val_check_interval", "11", *args])


def best(*args, run=RUN):
    main(["best", "--run", run, *args])


def rows(run=RUN, name=TABLE):
    return read_rows(Path(run) / name)


def complaint(capsys, *args, run=RUN):
    with pytest.raises(SystemExit) as stop:
        best(*args, run=run)
    assert stop.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


def test_every_kept_checkpoint_gets_a_row_and_the_best_is_told(run, capsys):
    best()
    printed = capsys.readouterr().out
    table = rows()
    assert [int(row["images_seen"]) for row in table] == KEPT
    assert [int(row["step"]) for row in table] == [3, 6, 9, 11]
    assert [Path(row["checkpoint"]).name for row in table] == [
        *(f"images_seen={n}.ckpt" for n in KEPT[:3]),
        "last.ckpt",
    ]
    # `validate` gives the same number for this checkpoint.
    main(["validate", "-c", str(run / "config.yaml"), "--ckpt_path", table[1]["checkpoint"]])
    (measured,) = read_rows(Path("runs/table1_digits/knn_1/fidelity.csv"))
    assert float(table[1]["fd_pixels"]) == pytest.approx(float(measured["fd_pixels"]), rel=1e-5)
    least = min(table, key=lambda row: float(row["fd_pixels"]))
    assert f"Best of 4 checkpoints: Fréchet distance on pixels {float(least['fd_pixels']):.4g}" in printed
    assert f"step {least['step']}, {int(least['images_seen']):,} images seen" in printed
    assert f"  {least['checkpoint']}\n" in printed
    assert (run / "checkpoints_fd_pixels.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "checkpoints_fd_pixels.pdf").read_bytes().startswith(b"%PDF")
    assert read_distances([run])["fd_pixels"] == [
        (n, float(row["fd_pixels"])) for n, row in zip(KEPT, table, strict=True)
    ]
    # `best` makes no new run folder.
    assert sorted(path.name for path in run.parent.iterdir()) == ["knn_0", "knn_1"]


@pytest.mark.usefixtures("blank_figures")
def test_the_data_are_looked_at_once_and_finished_checkpoints_not_again(run, monkeypatch, capsys):
    passes, measured = [], []
    share, measure = ReferenceSet.share, FidelityMeasure.__call__
    monkeypatch.setattr(ReferenceSet, "share", lambda self, *a: passes.append(1) or share(self, *a))
    monkeypatch.setattr(FidelityMeasure, "__call__", lambda self, *a: measured.append(1) or measure(self, *a))
    best()
    assert (len(passes), len(measured)) == (1, 4)
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


@pytest.mark.usefixtures("blank_figures")
def test_damaged_checkpoints_are_named_and_the_others_measured(run, capsys):
    folder = run / "checkpoints"
    whole = (folder / "images_seen=96.ckpt").read_bytes()
    (folder / "images_seen=96.ckpt").write_bytes(whole[: len(whole) // 2])
    checkpoint = torch.load(folder / "images_seen=192.ckpt", weights_only=False)
    next(iter(checkpoint["state_dict"].values())).fill_(float("nan"))
    torch.save(checkpoint, folder / "images_seen=192.ckpt")
    with pytest.warns(UserWarning, match=r"images_seen=96\.ckpt is damaged.*the other checkpoints are measured"):
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


@pytest.mark.usefixtures("blank_figures")
def test_a_table_of_other_settings_is_not_mixed_with(run, capsys):
    best()
    before = (run / TABLE).read_bytes()
    capsys.readouterr()
    for options, words in (
        ({"num_samples": 71}, "num_samples=70, not 71"),
        ({"extractor": {"class_path": "tests.commands.test_best_checkpoint.Renamed"}}, "extractor="),
    ):
        options = {"num_samples": 70, "extractor": {"class_path": "lit_knn.metrics.Pixels"}, **options}
        other = {"trainer": {"callbacks": [{"class_path": "lit_knn.callbacks.Fidelity", "init_args": options}]}}
        Path("other.yaml").write_text(yaml.safe_dump(other))
        assert f"{RUN}/{TABLE} has results with {words}" in complaint(capsys, "-c", "other.yaml")
    assert "model.predict_steps=1, not 2" in complaint(capsys, "--model.predict_steps", "2")
    assert "has results with data=" in complaint(capsys, "--data", "PointsOnALine")
    assert (run / TABLE).read_bytes() == before


class Scored(Pixels):
    """Pixels with logits, so that it has an Inception Score like FID."""

    metric = "fid"
    num_logits = 3

    def __call__(self, images):
        features, _ = super().__call__(images)
        return features, features[:, :3]

    def fingerprint(self):
        return "scored pixels"


@pytest.mark.usefixtures("blank_figures")
def test_an_appended_measurement_takes_the_place_of_the_runs_own(run, capsys):
    options = {
        "num_samples": 60,
        "extractor": {"class_path": "tests.commands.test_best_checkpoint.Scored"},
        "cache_dir": None,
    }
    options |= {"extra_metrics": ["kid", "recall"], "kid_subset_size": 30}
    callback = {"class_path": "lit_knn.callbacks.Fidelity", "init_args": options}
    Path("fid.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": [callback]}}))
    best("-c", "fid.yaml")
    table = rows(name="checkpoints_fid.csv")
    least = min(table, key=lambda row: float(row["fid"]))
    said = f"FID {float(least['fid']):.4g}, Inception Score {float(least['inception_score']):.4g}"
    assert f"Best of 4 checkpoints: {said}" in capsys.readouterr().out
    assert {"inception_score_std", "kid", "kid_std", "recall"} <= set(least)
    assert not (run / TABLE).exists()
    assert len(read_distances([run])["inception_score"]) == 4


@pytest.mark.usefixtures("blank_figures")
def test_what_cannot_be_measured_is_said_in_one_line(run, capsys):
    assert "config.yaml does not exist; give the folder of a training run" in complaint(capsys, run="runs")
    with pytest.raises(SystemExit):
        main(["best"])
    assert "run" in capsys.readouterr().err
    line = complaint(capsys, "--trainer.callbacks", "[]")
    assert "the run has no lit_knn.callbacks.Fidelity; add -c configs/evaluate/fid.yaml" in line
    other = complaint(capsys, "--model.net.channels", "16")
    assert "the checkpoint is of another architecture" in other
    for path in (run / "checkpoints").glob("images_seen*"):
        path.unlink()
    assert "knn_0/checkpoints has no checkpoint that lit_knn.callbacks.CheckpointByImages kept" in complaint(capsys)
    assert "nowhere has no checkpoint" in complaint(capsys, "--checkpoints", "nowhere")
    (run / "config.yaml").write_text("a: 3")
    assert "is not the configuration of a training run" in complaint(capsys)
    assert not list(run.glob("checkpoints_*"))


def test_what_another_rank_cannot_read_is_not_measured(run, capsys, monkeypatch):
    # The other rank says no: all ranks agree to nothing, and any of them only to what this one reads.
    monkeypatch.setattr(
        SingleDeviceStrategy, "reduce_boolean_decision", lambda self, decision, all=True: decision and not all
    )
    with pytest.warns(UserWarning, match="cannot be read by another rank"):
        assert "4 checkpoint(s) are not measured" in complaint(capsys)
    assert not (run / TABLE).exists()
