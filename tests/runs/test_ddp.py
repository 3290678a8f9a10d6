"""Two processes train as one, whoever starts them; they say in one line what keeps them from it, and lose nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from socket import gethostname

import numpy as np
import pytest
import torch
import yaml
from lightning_utilities.core.rank_zero import rank_zero_only

from main import main
from tests import ROOT
from tests.command_lines import DEMO, TINY
from tests.interrupted_runs import assert_same, killed
from tests.ranks import run_main, run_ranks, run_torchrun
from tests.toys import pixels

pytestmark = pytest.mark.usefixtures("own_folder")


def run_demo(folder, devices, *options, program=None, steps=4):
    """Train the demo for a few steps of 32 images in new processes; return the report of each rank."""
    folder.mkdir()
    distance = {
        "class_path": "lit_knn.callbacks.PixelFrechetDistance",
        "init_args": {"num_samples": 71},
    }
    best = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint"}
    best["init_args"] = {"monitor": "fd_pixels", "mode": "min", "filename": "best"}
    probe = {"class_path": "tests.ddp_probe.DDPProbe", "init_args": {"folder": str(folder)}}
    (folder / "probe.yaml").write_text(
        yaml.safe_dump({"trainer": {"callbacks": [distance, best, probe]}})
    )
    command = [
        "fit",
        "-c",
        DEMO,
        *TINY,
        "-c",
        folder / "probe.yaml",
        "--data.batch_size",
        32 // devices,
        *options,
    ]
    command += [
        "--trainer.max_steps",
        steps,
        "--trainer.val_check_interval",
        2,
        "--trainer.logger.save_dir",
        folder,
    ]
    if program is None:
        run_main(command, devices)
    else:  # Lightning starts the other processes, as for a user's command.
        command = [
            sys.executable,
            program,
            *command,
            "--trainer.devices",
            devices,
            "--trainer.strategy",
            "ddp",
        ]
        # Another package may have installed a folder of this name, and `lit-knn` alone would look there first.
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        options = {
            "cwd": ROOT,
            "env": environment,
            "capture_output": True,
            "text": True,
            "timeout": 120,
        }
        done = subprocess.run([*map(str, command)], **options)
        assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(devices)]


def test_two_processes_train_the_demo(tmp_path):
    ranks = run_demo(tmp_path / "two", 2)
    (single,) = run_demo(tmp_path / "one", 1)
    for rank in ranks:
        # Each rank builds its own index once. Lightning would broadcast a signal before each batch, and wait.
        assert (rank["world_size"], rank["builds"], rank["broadcasts"]) == (2, 1, 0)
    # Each rank draws its own noise. Together they draw the same images as one process with the whole batch.
    assert not set(ranks[0]["noise"]) & set(ranks[1]["noise"])
    assert ranks[0]["levels"] != ranks[1]["levels"]
    for ours, theirs, together in zip(
        ranks[0]["batches"], ranks[1]["batches"], single["batches"], strict=True
    ):
        assert sorted(ours + theirs) == pytest.approx(sorted(together), abs=1e-3)
    # The ranks' weights agree after training. One process gets other weights, because its noise differs.
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["weights"] != single["weights"]
    assert {rank["images_seen"] for rank in (*ranks, single)} == {4 * 32}
    # Samples are split over the ranks. Every rank knows the values of all ranks together, so it can monitor them.
    assert list((tmp_path / "two").rglob("best.ckpt"))
    assert all(ranks[0][name] == ranks[1][name] for name in ("fd_pixels", "val/loss"))
    # With half of the images on each rank, the results are the same as with all images on both.
    sharded = run_demo(tmp_path / "sharded", 2, "--data.sharded", "true")
    for seen, expected in zip(sharded, ranks, strict=True):
        assert seen["builds"] == 1
        assert seen["batches"] == expected["batches"]
        assert seen["noise"] == expected["noise"]
        assert seen["weights"] == pytest.approx(expected["weights"], rel=1e-4)
        assert seen["fd_pixels"] == pytest.approx(expected["fd_pixels"], rel=1e-3)
    assert sharded[0]["weights"] == sharded[1]["weights"]


@pytest.mark.slow  # Two processes import everything. Other tests start forks that have.
@pytest.mark.parametrize(
    "program", ["main.py", str(Path(sys.executable).parent / "lit-knn")], ids=["main", "lit-knn"]
)
def test_lightning_starts_the_other_process(program, tmp_path):
    ranks = run_demo(tmp_path / "two", 2, program=program, steps=2)
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    assert ranks[0]["weights"] == ranks[1]["weights"]


@pytest.mark.slow
def test_torchrun_and_spawned_processes_train_the_demo(tmp_path):
    command = ["fit", "-c", DEMO, *TINY, "--trainer.devices", "2"]
    done = run_torchrun(
        [*command, "--trainer.max_steps", "2", "--trainer.logger.name", "torchrun"], ranks=2
    )
    assert done.stdout.count("Checkpoint:") == 1
    spawn = [sys.executable, str(ROOT / "main.py"), *command, "--trainer.strategy", "ddp_spawn"]
    done = subprocess.run(spawn, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, steps in (("torchrun", 2), ("demo", 1)):
        checkpoint = torch.load(f"runs/{name}/knn_0/checkpoints/last.ckpt", weights_only=True)
        assert (checkpoint["global_step"], checkpoint["images_seen"]) == (steps, steps * 2 * 32)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (["--data.path", "others.npy"], "data "),
        (["--model.lr", "0.1"], "lr 0.1, and rank 0 with 0.003"),
        (["--model.estimator.n", "4"], "estimator.n 4, and rank 0 with "),
        (["--optimizer", "SGD", "--optimizer.lr", "0.003"], "optimizer SGD, and rank 0 with "),
        # The longer one would wait for the other.
        (["--trainer.max_steps", "3"], "max_steps 3, and rank 0 with 1"),
        (["--trainer.gradient_clip_val", "1.0"], "gradient_clip_val 1.0, and rank 0 with None"),
    ],
)
def test_ranks_that_would_train_otherwise_are_refused_at_start(last, said, tmp_path):
    images = pixels(160, (1, 8, 8)).numpy()
    np.save("images.npy", images)
    np.save("others.npy", images[::-1])
    data = ["--data", "Arrays", "--data.path", "images.npy"]
    done = run_main(["fit", "-c", DEMO, *data, *TINY], ranks=2, check=False, last=last)
    assert 0 not in done.codes
    assert f"error: rank 1 trains with {said}" in done.stderr
    assert not list(tmp_path.rglob("last.ckpt"))


def test_a_machine_without_the_checkpoint_is_named_by_all(tmp_path):
    main(["fit", "-c", DEMO, *TINY])
    checkpoint = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    checkpoint["run"]["ranks"] = 2
    torch.save(checkpoint, "here.ckpt")
    again = ["fit", "-c", DEMO, *TINY, "--trainer.max_steps", "2", "--ckpt_path", "here.ckpt"]
    done = run_main(again, 2, check=False, last=["--ckpt_path", "nowhere.ckpt"], nodes=2)
    lacks = "--ckpt_path: nowhere.ckpt: no such file"
    assert done.codes == [2, 2]
    for said, wanted in zip(
        done.errors, (f"rank 1 on {gethostname()} failed", "rank 1"), strict=True
    ):
        assert [line for line in said.splitlines() if "rror" in line] == [
            f"error: {wanted}: {lacks}"
        ]


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": 1,
    "WORLD_SIZE": 2,
    "LOCAL_WORLD_SIZE": 2,
    "RANK": 0,
    "LOCAL_RANK": 0,
}
SBATCH = {"SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_JOB_NAME": "a", "SLURM_JOB_ID": 1}
SBATCH |= {"SLURM_PROCID": 0, "SLURM_NODEID": 0, "SLURM_LOCALID": 0}
STARTED = "has started 2 processes, but trainer.num_nodes=1 and trainer.devices="


@pytest.mark.parametrize(
    ("environment", "devices", "message"),
    [
        (TORCHRUN, "1", f"error: torchrun {STARTED}"),  # Each process would train its own model.
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": 1}, "2", f"error: torchrun {STARTED}"),
        ({**SBATCH, "SLURM_STEP_ID": 0}, "1", f"error: srun {STARTED}"),
        # It would wait for the others.
        (SBATCH, "2", "SLURM_NTASKS=2, but srun has not started this process"),
    ],
)
def test_processes_that_are_not_those_of_the_trainer_are_refused(
    environment, devices, message, monkeypatch, capsys
):
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit):
        main(["fit", "-c", DEMO, "--trainer.devices", devices])
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(Path().iterdir())


def test_a_process_that_fails_says_why_with_its_rank(monkeypatch, capsys):
    monkeypatch.setattr(rank_zero_only, "rank", 3)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", "no.yaml"])
    assert stop.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert errors == ["error: rank 3: --config no.yaml: no such file"]


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_PROCID"])
def test_leftover_rank_of_a_single_process_is_ignored(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # Lightning sets it when it is imported.
    main(["fit", "-c", DEMO, *TINY])
    (run,) = Path("runs/demo").iterdir()
    assert {"config.yaml", "run.json"} < {path.name for path in run.iterdir()}
    assert list(run.glob("events.out.tfevents.*"))


def test_an_error_or_a_signal_on_one_rank_ends_all(tmp_path):
    # Saving a checkpoint takes all ranks: the rank with the error must not wait for the others in it.
    Path("failing.yaml").write_text(
        "trainer: {callbacks: [{class_path: tests.ddp_probe.FailingRank}]}"
    )
    done = run_main(
        ["fit", "-c", DEMO, *TINY, "-c", "failing.yaml", "--trainer.max_steps", "50"],
        2,
        check=False,
    )
    assert done.codes == [2, 1]  # A rank that waited would be killed.
    assert "one rank fails" in done.errors[1]
    codes, _, errors = run_ranks("tests.ddp_probe", tmp_path, 1, ranks=2)
    assert codes == [0, 0], errors
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["SIGTERM", "SIGTERM"]


# Kills. Runs that signals kill, also one rank of two, lose nothing once they are resumed until they are done.

NET = ["--model.net.channels", "8", "--data.batch_size", "16", "--data.val_images", "32"]
ICT = ["fit", "-c", DEMO, *NET, "--model.estimator.k", "32", "--model.estimator.n", "8"]


def run(folder, args, steps, ranks, *callbacks):
    """Start or go on with the run in the folder; the callbacks may kill it."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "killed"}}
    options = {
        "accelerator": "cpu",
        "max_steps": steps,
        "val_check_interval": 5,
        "enable_progress_bar": False,
    }
    config = {
        **options,
        "logger": logger,
        "enable_model_summary": False,
        "callbacks": list(callbacks),
    }
    Path("run.yaml").write_text(
        yaml.safe_dump({"trainer": config, "last_checkpoint": {"every_n_steps": 2}})
    )
    saved = ["--ckpt_path", "last"] if list(Path("runs").rglob("last.ckpt")) else []
    return run_main([*args, "-c", "run.yaml", *saved], ranks, check=False)


def final(folder, steps):
    """The checkpoint of the last step."""
    paths = folder.rglob("last.ckpt")
    return next(
        path for path in paths if torch.load(path, weights_only=True)["global_step"] == steps
    )


@pytest.mark.slow
def test_two_ranks_of_which_one_is_killed_or_stopped(tmp_path):
    kills = [
        ({"step": 4, "hook": "on_before_optimizer_step", "signum": 9, "rank": 1}, [2, -9]),
        ({"step": 5, "hook": "on_after_backward", "signum": 15, "rank": 1}, [143, 0]),
        ({"step": 7, "hook": "on_train_batch_start", "signum": 2, "rank": 0}, [130, 0]),
    ]
    whole = run(tmp_path / "whole", ICT, 10, 2)
    assert whole.codes == [0, 0], whole.stderr[-2000:]
    for options, codes in kills:
        done = run(tmp_path / "killed", ICT, 10, 2, killed("KilledAt", **options))
        assert done.codes == codes, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
        if options["signum"] == signal.SIGKILL:
            (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert error.startswith("error: another process ended in training")
        else:
            assert "--ckpt_path runs/killed/knn_0/checkpoints/last.ckpt" in done.stderr
    assert run(tmp_path / "killed", ICT, 10, 2).codes == [0, 0]
    # Both ranks of each part went on in the folder of the first part.
    assert [path.name for path in Path("runs/killed").iterdir()] == ["knn_0"]
    assert_same(final(tmp_path / "killed", 10), final(tmp_path / "whole", 10))
    # One rank alone would draw other noise.
    alone = run(tmp_path / "killed", ICT, 12, 1)
    assert alone.codes == [2]
    assert "ranks (trainer.devices times trainer.num_nodes) 2, not 1" in alone.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kills"), [(1, 7), (2, 6)])
def test_random_kills_lose_nothing(ranks, kills, tmp_path):
    steps, rng = 120, np.random.default_rng(ranks)
    whole = run(tmp_path / "whole", ICT, steps, ranks)
    assert not any(whole.codes), whole.stderr[-2000:]
    for number in range(kills):
        signum = int(rng.permutation([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])[0])
        options = {
            "seconds": float(rng.uniform(0, 1.5)),
            "signum": signum,
            "rank": int(rng.integers(ranks)),
        }
        done = run(tmp_path / "killed", ICT, steps, ranks, killed("KilledAfter", **options))
        print(number, options, done.codes)
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        assert any(done.codes) or list((tmp_path / "killed").rglob("last.ckpt"))
    done = run(tmp_path / "killed", ICT, steps, ranks)
    assert not any(done.codes), done.stderr[-2000:]
    assert_same(final(tmp_path / "killed", steps), final(tmp_path / "whole", steps))
