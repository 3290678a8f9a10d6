import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from main import main
from tests import ROOT
from tests.command_lines import DEMO, TINY
from tests.ranks import run_main, run_torchrun
from tests.toys import pixels


def run(command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def run_demo(folder, devices, batch_size, *options, program=None, steps=4):
    """Train the demo for a few steps in new processes; return the report of each rank."""
    folder.mkdir()
    probe = folder / "probe.yaml"
    probe.write_text(
        "trainer:\n  callbacks:\n"
        "    - {class_path: lit_knn.callbacks.PixelFrechetDistance, init_args: {num_samples: 71}}\n"
        "    - class_path: pytorch_lightning.callbacks.ModelCheckpoint\n"
        "      init_args: {monitor: fd_pixels, mode: min, filename: best}\n"
        f"    - {{class_path: tests.ddp_probe.DDPProbe, init_args: {{folder: {folder}}}}}\n"
    )
    command = ["fit", "-c", "configs/demo.yaml", "-c", "tests/tiny.yaml", "-c", str(probe)]
    command += ["--trainer.max_steps", str(steps), "--trainer.val_check_interval", "2"]
    command += ["--data.batch_size", str(batch_size)]
    command += ["--model.net.channels", "8", "--model.estimator.k", "32", "--model.estimator.n", "8"]
    command += ["--trainer.logger.save_dir", str(folder), *options]
    if program is not None:  # Lightning starts the other processes, as for a user's command.
        run([sys.executable, program, *command, "--trainer.devices", str(devices), "--trainer.strategy", "ddp"])
    else:
        run_main(command, devices)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(devices)]


def test_two_processes_train_the_demo(tmp_path):
    ranks = run_demo(tmp_path / "two", devices=2, batch_size=16)
    (single,) = run_demo(tmp_path / "one", devices=1, batch_size=32)
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    # Each rank builds its own index once.
    assert [rank["builds"] for rank in ranks] == [1, 1]
    # Lightning would broadcast a signal before each batch, and wait for the device.
    assert [rank["broadcasts"] for rank in ranks] == [0, 0]
    # Each rank draws its own noise. Together they draw the same images as one process with the whole batch.
    assert not set(ranks[0]["noise"]) & set(ranks[1]["noise"])
    for ours, theirs, together in zip(ranks[0]["batches"], ranks[1]["batches"], single["batches"], strict=True):
        assert sorted(ours + theirs) == pytest.approx(sorted(together), abs=1e-3)
    # The ranks' weights agree after training. One process gets other weights, because its noise differs.
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["weights"] != single["weights"]
    assert {rank["images_seen"] for rank in (*ranks, single)} == {4 * 32}
    # Samples are split over the ranks. Every rank knows the distance of all samples, so it can monitor it.
    assert list((tmp_path / "two").rglob("best.ckpt"))
    assert ranks[0]["fd_pixels"] == ranks[1]["fd_pixels"]
    # With half of the images on each rank, the results are the same as with all images on both.
    sharded = run_demo(tmp_path / "sharded", 2, 16, "--data.sharded", "true")
    assert [rank["builds"] for rank in sharded] == [1, 1]
    for seen, expected in zip(sharded, ranks, strict=True):
        assert seen["batches"] == expected["batches"]
        assert seen["noise"] == expected["noise"]
        assert seen["weights"] == pytest.approx(expected["weights"], rel=1e-4)
        assert seen["fd_pixels"] == pytest.approx(expected["fd_pixels"], rel=1e-3)
    assert sharded[0]["weights"] == sharded[1]["weights"]


@pytest.mark.slow  # Two processes import everything. The tests above and below start forks that have.
@pytest.mark.parametrize("program", ["main.py", str(Path(sys.executable).parent / "lit-knn")], ids=["main", "lit-knn"])
def test_lightning_starts_the_other_process(program, tmp_path):
    ranks = run_demo(tmp_path / "two", devices=2, batch_size=16, program=program, steps=2)
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    assert ranks[0]["weights"] == ranks[1]["weights"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (["--data.path", "others.npy"], "data "),
        (["--model.lr", "0.1"], "lr 0.1, and rank 0 with 0.003"),
        pytest.param(["--data.path", "fewer.npy"], "images 150, and rank 0 with 160", marks=SLOW),
        pytest.param(["--data.batch_size", "16"], "batch_size 16, and rank 0 with 32", marks=SLOW),
        pytest.param(["--model.estimator", "STF"], "estimator STF, and rank 0 with KNN", marks=SLOW),
    ],
)
def test_ranks_that_would_train_otherwise_are_refused_before_the_first_step(last, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = pixels(160, (1, 8, 8)).numpy()
    for name, array in {"images": images, "fewer": images[:150], "others": images[::-1]}.items():
        np.save(f"{name}.npy", array)
    data = ["--data", "Arrays", "--data.path", "images.npy"]
    done = run_main(["fit", "-c", DEMO, *data, *TINY], ranks=2, check=False, last=last)
    assert 0 not in done.codes
    assert f"error: rank 1 trains with {said}" in done.stderr
    assert not list(tmp_path.rglob("last.ckpt"))


@pytest.mark.slow
def test_torchrun_trains_the_demo(tmp_path):
    command = ["fit", "-c", ROOT / "configs/demo.yaml", "-c", ROOT / "tests/tiny.yaml", "--trainer.devices", "2"]
    command += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--model.net.channels", "8"]
    done = run_torchrun([*command, "--trainer.logger.save_dir", tmp_path], ranks=2)
    assert done.stdout.count("Checkpoint:") == 1
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    assert torch.load(checkpoint, weights_only=False)["images_seen"] == 2 * 2 * 32


SLURM = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "JOB_NAME": "a", "JOB_ID": 1}
SLURM |= dict.fromkeys(("STEP_ID", "PROCID", "NODEID", "LOCALID"), 0)
LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0},
    "srun": {f"SLURM_{name}": value for name, value in SLURM.items()},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("devices", ["1", "3"])
def test_processes_that_are_not_those_of_the_trainer_are_refused(launcher, devices, monkeypatch, tmp_path, capsys):
    # With one device each process would train its own model.
    monkeypatch.chdir(tmp_path)
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(ROOT / "configs" / "demo.yaml"), "--trainer.devices", devices])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {launcher} has started 2 processes, but trainer.num_nodes=1 and trainer.devices=")
    assert not list(tmp_path.iterdir())


def test_a_batch_script_without_srun_is_refused_instead_of_waiting(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in LAUNCHERS["srun"].items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("SLURM_STEP_ID")
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(ROOT / "configs" / "demo.yaml"), "--trainer.devices", "2"])
    assert "SLURM_NTASKS=2, but srun has not started this process" in capsys.readouterr().err


def test_the_first_process_of_another_machine_says_what_that_machine_lacks(monkeypatch, tmp_path, capsys):
    from pytorch_lightning.utilities import rank_zero_only

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(ROOT / "configs" / "demo.yaml"), "--data", "ImageFiles", "--data.path", "no.zip"])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert lines == ["error: rank 2: data.path=no.zip: no.zip does not exist"]


@pytest.mark.parametrize("first_goes_on", [True, False])
def test_a_process_that_fails_alone_says_why(first_goes_on, monkeypatch, tmp_path, capsys):
    from pytorch_lightning.utilities import rank_zero_only

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", 3)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    parents = [7, 7 if first_goes_on else 1]
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(ROOT / "configs" / "demo.yaml"), "--data", "ImageFiles", "--data.path", "no.zip"])
    said = "error: rank 3: data.path=no.zip: no.zip does not exist" in capsys.readouterr().err.splitlines()
    assert said is first_goes_on


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_a_rank_that_is_left_in_the_environment_of_a_single_process_is_not_its_own(name, monkeypatch, tmp_path):
    from pytorch_lightning.utilities import rank_zero_only

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # Lightning sets it when it is imported.
    main(["fit", "-c", DEMO, *TINY])
    (run,) = Path("runs/demo").iterdir()
    assert {"config.yaml", "run.json"} < {path.name for path in run.iterdir()}
    assert list(run.glob("events.out.tfevents.*"))


@pytest.mark.slow  # tests/callbacks/test_fidelity_callback.py compares the measurements of two ranks with those of one.
def test_two_processes_measure_what_one_does(tmp_path):
    # The weights are the same, so the distance must be, too.
    run_demo(tmp_path / "trained", devices=1, batch_size=16)
    (checkpoint,) = (tmp_path / "trained").rglob("last.ckpt")
    values = []
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        command = ["validate", "-c", "configs/demo.yaml", "-c", "tests/tiny.yaml", "--model.net.channels", "8"]
        command += ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", folder]
        run_main([*command, "--ckpt_path", checkpoint], devices)
        (metrics,) = folder.rglob("metrics.csv")
        header, row = metrics.read_text().splitlines()[:2]
        values.append(float(dict(zip(header.split(","), row.split(","), strict=True))["samples/fd_pixels"]))
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_an_error_on_one_rank_ends_the_run(tmp_path):
    # Saving a checkpoint takes all ranks: the rank with the error must not wait for the others in it.
    failing = tmp_path / "failing.yaml"
    failing.write_text("trainer:\n  callbacks:\n    - {class_path: tests.ddp_probe.FailingRank}\n")
    command = ["fit", "-c", ROOT / "configs/demo.yaml", "-c", ROOT / "tests/tiny.yaml", "-c", failing]
    command += ["--trainer.max_steps", "50", "--model.net.channels", "8", "--model.estimator.k", "32"]
    done = run_main([*command, "--trainer.logger.save_dir", tmp_path], ranks=2, check=False)
    # A rank that waited would be killed.
    assert done.codes == [2, 1]
    assert "one rank fails" in done.errors[1]


@pytest.mark.slow
def test_processes_that_lightning_spawns_end_well(tmp_path):
    args = ["fit", "-c", "demo", *TINY, "--trainer.strategy", "ddp_spawn", "--trainer.devices", "2"]
    done = subprocess.run([sys.executable, "-m", "lit_knn", *args], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert torch.load(tmp_path / "runs/demo/knn_0/checkpoints/last.ckpt", weights_only=True)["global_step"] == 1
