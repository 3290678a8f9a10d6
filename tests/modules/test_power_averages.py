"""Snapshots of averages in trainings, and `lit-knn average`, which makes averages of other lengths from them."""

import contextlib
import shutil
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.callbacks import PowerAverages
from lit_knn.commands.average import average, fit_length
from lit_knn.common.checkpoint_file import kept_in, read_checkpoint_file
from lit_knn.common.errors import InputError
from lit_knn.common.tables import read_rows
from lit_knn.modules.power_averages import exponent
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.kept_files import kept_checkpoints
from main import main
from tests.command_lines import ROOT, refusal_of
from tests.interrupted_runs import (
    At,
    assert_same,
    assert_same_numbers,
    edm,
    fit,
    interrupt,
    tensors,
)
from tests.ranks import run_main

BATCH, STEPS, EVERY = 32, 24, 64
DIGITS = [
    "-c",
    str(ROOT / "configs" / "table2" / "digits.yaml"),
    "-c",
    str(ROOT / "tests" / "tiny.yaml"),
]
NET = [
    "--model.net.channels",
    "8",
    "--model.net.multipliers",
    "[1]",
    "--model.measure_target",
    "false",
]
NET += ["--model.lr", "0.01", "--model.lr_ramp_up_images", "0"]
SAVED = [
    "--trainer.callbacks+",
    "lit_knn.callbacks.CheckpointByImages",
    "--trainer.callbacks.every_n_images",
    "1",
]
TRACKED = [
    "--trainer.callbacks+",
    "lit_knn.callbacks.PowerAverages",
    "--trainer.callbacks.every_n_images",
    str(EVERY),
]
RUN = Path("runs/table2_digits/knn_0")


def read_snapshots(paths):
    return [read_checkpoint_file(path) for path in paths.values()]


def train(*args):
    steps = ["--trainer.max_steps", str(STEPS), "--trainer.val_check_interval", str(STEPS)]
    return ["fit", *DIGITS, *NET, *steps, *SAVED, *TRACKED, *args]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of 24 steps with 12 snapshots and a checkpoint of every step; it is trained once."""
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder):
        main(train())
    return folder


def trajectory(run):
    """The weights after each step, from its checkpoint, in one vector of float64, by images seen."""
    loaded = {
        seen: torch.load(path, weights_only=True)
        for seen, path in kept_checkpoints(RunFolder(run)).items()
    }
    return {seen: vector(checkpoint["current_model_state"]) for seen, checkpoint in loaded.items()}


def vector(weights):
    return torch.cat([value.flatten().double() for value in weights.values()])


def explicit(thetas, length, end):
    """Average a trajectory; also return the spread of each weight in L2 over time."""
    values = torch.stack([theta for seen, theta in thetas.items() if seen <= end])
    times = torch.tensor([0, *(seen for seen in thetas if seen <= end)], dtype=torch.float64)
    average = torch.diff((times / end) ** (exponent(length) + 1)) @ values
    return average, (torch.diff(times) @ (values - values.mean(0)).square()).sqrt()


def test_an_average_made_afterwards_is_the_one_of_the_training(trained):
    thetas, snapshots = (
        trajectory(trained / RUN),
        read_snapshots(kept_in(trained / RUN / "snapshots")),
    )
    assert [s["images_seen"] for s in snapshots] == list(range(EVERY, STEPS * BATCH + 1, EVERY))
    assert exponent(0.2887) == 0  # The longest length that the messages name.
    for length, last in [(0.05, 12), (0.07, 12), (0.1, 12), (0.15, 12), (0.15, 8)]:
        end = snapshots[last - 1]["images_seen"]
        found = fit_length(snapshots[:last], length)
        made = vector(average(snapshots[:last], found.weights))
        expected, spread = explicit(thetas, length, end)
        # Cauchy-Schwarz, as in tests/theory/test_power_average.py, and the rounding of 24 updates in float32.
        rounding = (
            24 * 2**-24 * abs(found.weights).sum() * torch.stack([*thetas.values()]).abs().amax(0)
        )
        gamma = exponent(length)
        norm_of_profile = (gamma + 1) / (2 * gamma + 1) ** 0.5 / end**0.5
        tolerance = found.residual * norm_of_profile * spread + rounding
        assert ((made - expected).abs() <= tolerance).all()
        # That tells it from an average of another length.
        assert (
            (made - explicit(thetas, 0.8 * length, end)[0]).abs() > tolerance
        ).double().mean() > 0.5


def test_average_writes_checkpoints_that_all_commands_take(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(
        trained, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("images_seen=*1.ckpt")
    )
    monkeypatch.chdir(tmp_path)
    run = RUN
    lengths = ["--ema", "0.07", "0.1", "0.1234"]
    main(["average", str(run), *lengths])
    files = [run / "averages" / f"ema={name}.ckpt" for name in ("0.070", "0.100", "0.1234")]
    tracked = torch.load(run / "snapshots" / "images_seen=768.ckpt", weights_only=True)["averages"][
        1
    ]
    made = torch.load(files[1], weights_only=True)["state_dict"]
    assert made.keys() == tracked.keys()
    assert all(torch.allclose(made[name], tracked[name], rtol=1e-5, atol=1e-6) for name in made)
    config = ["-c", str(run / "config.yaml"), "--ckpt_path", str(files[0])]
    main(["validate", *config])
    assert not Path("runs/table2_digits/knn_1/snapshots").exists()  # Only a training has averages.
    main(["predict", *config, "--data.predict_samples", "2"])
    assert len(list((run / "predict_0" / "predictions").glob("0*.png"))) == 2
    (row,) = read_rows(Path("runs/table2_digits/knn_1/fidelity.csv"))
    assert (row["step"], row["images_seen"]) == ("24", "768")
    main(["best", "--run", str(run), "--checkpoints", str(run / "averages")])
    rows = read_rows(run / "averages" / "averages_fd_pixels.csv")
    assert [(r["ema"], r["images_seen"]) for r in rows] == [
        ("0.07", "768"),
        ("0.1", "768"),
        ("0.1234", "768"),
    ]
    assert float(rows[0]["fd_pixels"]) == pytest.approx(float(row["fd_pixels"]), rel=1e-5)
    best = min(rows, key=lambda r: float(r["fd_pixels"]))
    assert f"  {best['checkpoint']}\n" in capsys.readouterr().out
    assert (run / "averages" / "averages_fd_pixels.png").is_file()
    refusal = (
        "ema=0.070.ckpt cannot be resumed from: it is an average that was made after a training"
    )
    assert refusal_of(["fit", *config], capsys).endswith(refusal)
    # An interrupted command goes on: the files that are there stay.
    times = {path: path.stat().st_mtime_ns for path in files[:2]}
    files[2].unlink()
    main(["average", str(run), *lengths])
    assert "Written: 1 average(s)" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in files[:2]} == times
    line = refusal_of(["average", str(run), "--ema", "0.07", "--images", "512"], capsys)
    assert "is another average; nothing is overwritten" in line
    # An average up to some images uses no later snapshots.
    main(["average", str(run), "--ema", "0.08", "--images", "512", "--output", "until"])
    made = torch.load("until/ema=0.080.ckpt", weights_only=True)
    assert made["images_seen"] == 512
    until = read_snapshots(kept_in(run / "snapshots"))[:8]
    expected = average(until, fit_length(until, 0.08).weights)
    assert all(torch.equal(value, expected[name]) for name, value in made["state_dict"].items())
    shutil.copy("until/ema=0.080.ckpt", files[1])
    line = refusal_of(["best", "--run", str(run), "--checkpoints", str(run / "averages")], capsys)
    assert "ema=0.100.ckpt is of 512 images, and its row in " in line
    with pytest.warns(
        UserWarning, match=r"--ema 0\.02: the nearest sum of 12 snapshot\(s\) has an error of 1\d%"
    ):
        main(["average", str(run), "--ema", "0.02"])
    assert "above 30%; stored are the lengths" in refusal_of(
        ["average", str(run), "--ema", "0.28", "--images", "64"], capsys
    )


def snapshots(*folders):
    """Read all numbers of the snapshots in these folders, by file; the training's time is left out."""
    found = {
        path.name: path for folder in folders for path in (folder / "run" / "snapshots").iterdir()
    }
    contents = {name: torch.load(path, weights_only=True) for name, path in found.items()}
    return {name: tensors({**c, "training_time": None}) for name, c in contents.items()}


def test_snapshots_weigh_steps_by_images_and_survive_a_resume(
    tmp_path,
):
    thetas = {}

    class Weights(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == len(thetas) + 1:
                thetas[pl_module.images_seen] = vector(dict(pl_module.named_parameters()))

    def run(name, *args, own=(), **more):
        tracked = [PowerAverages([0.05, 0.2], every_n_images=150), *own]
        return fit(
            tmp_path / name, edm(), 6, *args, callbacks=tracked, accumulate_grad_batches=2, **more
        )[1]

    whole = run("whole", own=[Weights()])
    assert list(thetas) == [80, 160, 240, 320, 400, 480]
    last = read_snapshots(kept_in(tmp_path / "whole" / "run" / "snapshots"))[-1]
    for length, made in zip(last["lengths"], last["averages"], strict=True):
        expected, _ = explicit(thetas, length, last["images_seen"])
        torch.testing.assert_close(vector(made), expected, rtol=1e-5, atol=1e-6)
    first = run("a", at=At(3, "on_after_backward", interrupt))
    second = run("b", first)
    assert_same(second, whole)
    expected, found = snapshots(tmp_path / "whole"), snapshots(tmp_path / "a", tmp_path / "b")
    # The run that goes on after 320 images writes none at 400.
    assert set(expected) == {f"images_seen={seen}.ckpt" for seen in (160, 320, 480)}
    assert found.keys() == expected.keys()
    for name in expected:
        assert_same_numbers(found[name], expected[name])


def test_averages_need_whole_training_and_no_later_snapshots(tmp_path):
    _, without = fit(tmp_path / "a", edm(), 2)
    for _ in range(2):  # A refused run leaves the checkpoint as it was.
        with pytest.raises(
            InputError, match="PowerAverages: the checkpoint, of 80 images, has no such averages"
        ):
            fit(tmp_path / "a", edm(), 4, without, callbacks=[PowerAverages()])
    own = {"lengths": [0.1], "every_n_images": 40}
    _, path = fit(tmp_path / "c", edm(), 2, callbacks=[PowerAverages(**own)])
    with pytest.raises(
        InputError, match=r"PowerAverages: .* averages of the lengths \[0\.1\], not \[0\.05, 0\.1\]"
    ):
        fit(tmp_path / "d", edm(), 4, path, callbacks=[PowerAverages()])
    with pytest.raises(
        InputError, match=r"images_seen=40\.ckpt is of another training: move .*snapshots away"
    ):
        fit(tmp_path / "c", edm(), 2, callbacks=[PowerAverages(**own)])
    # A resumed training makes the later ones again.
    (tmp_path / "c" / "run" / "snapshots" / "images_seen=400.ckpt").write_bytes(b"")
    with pytest.warns(
        UserWarning, match=r"images_seen=400\.ckpt is removed: this training resumes from 80 images"
    ):
        fit(tmp_path / "c", edm(), 3, path, callbacks=[tracked := PowerAverages(**own)])
    assert list(kept_in(tmp_path / "c" / "run" / "snapshots")) == [40, 80, 120]
    # The next training of the same callback knows nothing of the last one.
    with pytest.raises(
        InputError, match="PowerAverages: the checkpoint, of 80 images, has no such averages"
    ):
        fit(tmp_path / "b", edm(), 4, without, callbacks=[tracked])


def test_last_snapshot_is_written_once_before_a_validation(tmp_path):
    # A training that is stopped early has one, too.
    fit(tmp_path / "e", edm(), 3, callbacks=[PowerAverages()], max_time={"microseconds": 1})
    assert list(kept_in(tmp_path / "e" / "run" / "snapshots")) == [40]
    fit(
        tmp_path / "g",
        edm(),
        3,
        at=At(3, "on_validation_start", interrupt),
        callbacks=[PowerAverages()],
    )
    assert list(kept_in(tmp_path / "g" / "run" / "snapshots")) == [120]
    path, files = tmp_path / "h" / "run" / "snapshots" / "images_seen=120.ckpt", []
    at = At(3, "on_validation_start", lambda: files.append(path.stat().st_ino))
    fit(tmp_path / "h", edm(), 3, at=at, callbacks=[PowerAverages()])
    assert files == [path.stat().st_ino]
    for _ in range(2):  # A trial leaves none for the next trial to find.
        fit(tmp_path / "f", edm(), 1, callbacks=[PowerAverages()], fast_dev_run=True)


def test_an_average_beyond_16_bits_is_told_and_makes_no_snapshot(tmp_path):
    def run(folder, dtype):
        model = edm()
        model.register_buffer("large", torch.tensor(1e5))  # float16 ends at 65,504.
        fit(folder, model, 1, callbacks=[PowerAverages(every_n_images=40, dtype=dtype)])
        return read_snapshots(kept_in(folder / "run" / "snapshots"))

    with pytest.warns(
        UserWarning,
        match=r"PowerAverages: at step 1 an average is not finite in float16; no snapshot",
    ):
        assert run(tmp_path / "a", "float16") == []
    # bfloat16 holds as large numbers as float32.
    (snapshot,) = run(tmp_path / "b", "bfloat16")
    assert {value.dtype for value in snapshot["averages"][0].values()} == {torch.bfloat16}


def test_the_usual_snapshots_are_those_of_edm2():
    usual = PowerAverages()
    assert usual.lengths == (0.05, 0.10)
    assert 40 * usual.every_n_images == 200_000_000


def test_two_ranks_write_one_average_rounded_once_to_16_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    half = ["--trainer.callbacks.dtype", "float16", "--data.batch_size", str(BATCH // 2)]
    run_main(train(*half, "--trainer.max_steps", "4", "--trainer.val_check_interval", "4"), 2)
    snapshot = torch.load(RUN / "snapshots" / "images_seen=128.ckpt", weights_only=True)
    assert {value.dtype for value in snapshot["averages"][0].values()} == {torch.float16}
    expected, _ = explicit(trajectory(RUN), 0.05, 128)
    assert torch.allclose(vector(snapshot["averages"][0]), expected, rtol=2**-10, atol=1e-6)
    assert list(kept_in(RUN / "snapshots")) == [64, 128]
    main(["average", str(RUN), "--ema", "0.05"])
    made = torch.load(RUN / "averages" / "ema=0.050.ckpt", weights_only=True)["state_dict"]
    assert {value.dtype for value in made.values()} == {torch.float32}
    assert all(
        torch.allclose(made[n], v.float(), rtol=1e-5, atol=1e-6)
        for n, v in snapshot["averages"][0].items()
    )
